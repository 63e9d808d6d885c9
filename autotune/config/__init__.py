"""Configuration: command line and files, composed with Hydra and checked."""
