"""Explains where a program's time goes, what a change would gain, and whether predictions held.

This is the tuner's side of the passes and uses no torch. A table that cannot be made is absent with a reason, never filled with
zeros.
"""
