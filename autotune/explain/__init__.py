"""Explains where a program's time goes, what a change would gain, and whether predictions held.

The harness measures in passes; this package evaluates what they wrote, without torch. If a table cannot be made, the
explanation says why instead; it is never filled with zeros.
"""
