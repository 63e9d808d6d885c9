"""The figures of a report: each function takes a study and returns one figure."""
