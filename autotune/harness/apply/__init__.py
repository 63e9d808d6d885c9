"""How each family of knobs is set in the process and read back; joined to the tuner's side by the key."""
