"""How each family of knobs is set in the training process and read back; joined to the tuner's side by the key."""
