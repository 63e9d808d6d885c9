"""autotune finds the fastest correct way to run a PyTorch training job, proves it, and hands it over as a file."""

__version__ = "0.1.0"
