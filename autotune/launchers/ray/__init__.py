"""Runs trials on a node of a Ray cluster."""
