"""Holds the training scripts of the built-in recipes: plain PyTorch, run by file path in the program's interpreter."""
