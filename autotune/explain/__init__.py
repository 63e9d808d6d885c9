"""Explains where a program's time goes, what a change would gain, and whether that was right."""
