"""Configuration: what the user typed and wrote, composed with Hydra and checked."""
