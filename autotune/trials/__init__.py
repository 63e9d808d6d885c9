"""Runs the trials of a study: inputs, processes, numbers, and whether the machine disturbed a trial."""
