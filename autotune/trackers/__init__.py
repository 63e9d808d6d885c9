"""Trackers mirror study folders into a tracking system. The folder stays the truth: a tracker can be lost and rebuilt."""
