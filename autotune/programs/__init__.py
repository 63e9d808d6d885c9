"""Plain PyTorch training scripts, run by file path in the program's interpreter: what the built-in recipes train."""
