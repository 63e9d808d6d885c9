"""The knobs: the tuner's side."""
