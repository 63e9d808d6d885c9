"""How the command line starts itself again, as another process."""

from autotune.launchers.environment import own_environment

__all__ = ["own_environment"]
