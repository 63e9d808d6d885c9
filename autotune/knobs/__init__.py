"""The tuner's side of the knobs: definitions, domains and documentation."""
