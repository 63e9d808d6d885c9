"""Passes that explain where a program's time and memory go. Such a trial has no value: nothing is measured beside a pass."""
