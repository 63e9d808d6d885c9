"""Re-exports the environment in which the command line starts itself in another process."""

from autotune.launchers.environment import own_environment

__all__ = ["own_environment"]
