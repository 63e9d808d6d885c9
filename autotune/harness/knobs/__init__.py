"""Sets each family of knobs in the training process and reads them back; keys match those on the tuner's side."""
