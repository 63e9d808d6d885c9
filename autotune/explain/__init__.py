"""Explains where a program's time goes, what a change would gain, and whether predictions held.

This is the tuner's side of the passes and uses no torch. If a table cannot be made, the explanation says why instead;
it is never filled with zeros.
"""
