"""Mirrors study folders into a tracking system. The folder stays the source of truth: a mirror can be lost and rebuilt."""
