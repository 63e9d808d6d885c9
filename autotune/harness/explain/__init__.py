"""Passes that explain where a program's time and memory go. A trial with a pass measures no rate."""
