"""The version of autotune."""

__version__ = "0.1.0"
