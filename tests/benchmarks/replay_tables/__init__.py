"""The workloads of the recorded tables on which searches are replayed; `__main__.py` records the tables."""
