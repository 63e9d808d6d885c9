"""The replay benchmark: recorded tables of real trials, and searches run on them through the real study loop."""
