"""Who wins, and why: finals, ablation of the winner, losses side by side, tiers, verification of a file's claim."""
