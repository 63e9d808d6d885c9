"""Starts a trial's processes, watches them, and ends all of them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autotune.config.command import CommandTemplate
    from autotune.config.schema import StudyConfig
    from autotune.launchers.base import Launcher
    from autotune.launchers.remote import RemoteLauncher


def make_launcher(config: StudyConfig, command: CommandTemplate, facts: dict[str, Any] | None = None) -> Launcher:
    """Returns the launcher that `launcher=` names.

    Only the modules of this launcher are imported, because the other launchers may need packages that are not installed.

    Args:
        config: the configuration; `config.launcher` is one of `config.schema.LAUNCHERS`.
        command: the program.
        facts: `machine.host_facts()` of this machine. The local launcher divides the machine into slots by these facts; if
            they are None, the launcher runs one trial at a time. Other launchers ignore them.
    """
    if config.launcher == "local":
        from autotune.config.slots import gpus_of, num_slots
        from autotune.launchers.local import LocalLauncher
        from autotune.launchers.slots import SlotsLauncher, slots_of

        if facts is None or (num := num_slots(config, command, facts)) == 1:
            return LocalLauncher()
        return SlotsLauncher(slots_of(num, [gpu["uuid"] for gpu in gpus_of(config, facts)], facts))
    from autotune.launchers.remote import Place
    from autotune.launchers.remote_slots import RemoteSlots

    minutes, device = config.launch.queue_minutes, (config.device.kind, config.device.index, config.launch.nproc)
    place = Place(cwd=command.cwd, program=command.parts[0], runs_dir=config.runs_dir, device=device)
    patience_s = None if minutes is None else 60 * minutes
    num = config.launch.slots if isinstance(config.launch.slots, int) else 1
    parts: list[RemoteLauncher]
    if config.launcher == "slurm":
        from autotune.launchers.slurm import SlurmLauncher
        from autotune.launchers.slurm_cancel import LeftJobs

        left = LeftJobs(Path(config.runs_dir))
        parts = [SlurmLauncher(config.launch.slurm, place, patience_s=patience_s, left=left) for _ in range(num)]
    elif config.launcher == "ray":
        from autotune.launchers.ray.launcher import RayLauncher

        parts = [RayLauncher(config.launch.ray, place, patience_s=patience_s, num_slots=num) for _ in range(num)]
    else:
        raise ValueError(f"no such launcher: {config.launcher}")
    return parts[0] if num == 1 else RemoteSlots(parts)
