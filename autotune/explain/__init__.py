"""Explains where a program's time goes, what a change would gain, and whether that was right.

The tuner's side of the passes: no torch. A table that cannot be made is absent with a reason, never zero.
"""
