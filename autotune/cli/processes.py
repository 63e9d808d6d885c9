"""Re-exports `own_environment`, for commands that run autotune in a subprocess."""

from autotune.launchers.environment import own_environment

__all__ = ["own_environment"]
