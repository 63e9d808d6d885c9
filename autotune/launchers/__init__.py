"""Starts a trial's processes, watches them, and ends every one of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autotune.config.command import CommandTemplate
    from autotune.config.schema import StudyConfig
    from autotune.launchers.base import Launcher


def make_launcher(config: StudyConfig, command: CommandTemplate) -> Launcher:
    """Returns the launcher that `launcher=` names. Imports only its module; other modules may need missing packages.

    Args:
        config: the configuration; `config.launcher` is one of `config.schema.LAUNCHERS`.
        command: the program.
    """
    if config.launcher == "local":
        from autotune.launchers.local import LocalLauncher

        return LocalLauncher()
    from autotune.launchers.remote import Place

    minutes, device = config.launch.queue_minutes, (config.device.kind, config.device.index, config.launch.nproc)
    place = Place(cwd=command.cwd, program=command.parts[0], runs_dir=config.runs_dir, device=device)
    patience_s = None if minutes is None else 60 * minutes
    if config.launcher == "slurm":
        from autotune.launchers.slurm import SlurmLauncher

        return SlurmLauncher(config.launch.slurm, place, patience_s=patience_s)
    if config.launcher == "ray":
        from autotune.launchers.ray.launcher import RayLauncher

        return RayLauncher(config.launch.ray, place, patience_s=patience_s)
    raise ValueError(f"no such launcher: {config.launcher}")
