"""Explains where a program's time goes, what a change would gain, and whether predictions held.

The harness measures in passes. This package evaluates the files that the passes wrote, without torch. If a table cannot be
made, the explanation says why. It never contains a table of zeros instead.
"""
