"""Benchmarks searches on recorded tables of real trials, through the real study loop."""
