"""Runs one trial of a study: its inputs, its process, its numbers, and whether the machine disturbed it."""
