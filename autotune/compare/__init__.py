"""Decides which configuration wins, and why: finals, ablation, loss parity, tiers, verification of a best.yaml."""
