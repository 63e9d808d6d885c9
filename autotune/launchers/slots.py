"""Divides this machine into slots, on which trials run in parallel. Each slot has its own GPUs, cores and TMPDIR."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autotune.harness.knobs.affinity import SYSTEM, cores_of, gpu_node
from autotune.launchers.base import Launcher, Slot
from autotune.launchers.local import Graces, LocalLauncher
from autotune.owner import held

PREFIX = "autotune-slots-"  # name prefix of the folder that holds the slots' TMPDIRs
STUDY_FILE = "study"  # file in that folder; holds the study's path


class SlotsLauncher(LocalLauncher):
    """Starts a trial on the whole machine, like `LocalLauncher`. The launchers of its slots (`beside`) run parallel trials."""

    def __init__(self, slots: Sequence[Slot], graces: Graces | None = None) -> None:
        super().__init__(graces)
        # Short folder names, because worker processes put sockets into TMPDIR, and a socket's path has at most 107 characters.
        self._temporary = tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True)
        self._locked = contextlib.ExitStack()
        self._locked.enter_context(held(Path(self._temporary.name)))  # tells `autotune prune` that the folder is in use
        self._parts = [LocalLauncher(graces, slot=slot, made=self._files.made, temporary=self._folder(slot)) for slot in slots]

    def beside(self) -> list[Launcher]:
        """Returns the launchers of the slots."""
        return list(self._parts)

    def sweep(self, study: Path) -> list[str]:
        """Also removes the temporary folders that a killed tuner of this study has left. See `Launcher.sweep`."""
        lines, name = super().sweep(study), str(study.resolve())
        for left in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
            with contextlib.suppress(OSError), held(left) as is_free:
                is_ours = left.stat(follow_symlinks=False).st_uid == os.getuid()
                if is_free and is_ours and (left / STUDY_FILE).read_text(encoding="utf-8", errors="surrogateescape") == name:
                    shutil.rmtree(left)
        with contextlib.suppress(OSError):  # the disk is full
            Path(self._temporary.name, STUDY_FILE).write_text(name, encoding="utf-8", errors="surrogateescape")
        return lines

    def close(self) -> None:
        """Ends all processes that still run, including those on the slots."""
        for part in self._parts:
            part.close()
        super().close()
        self._temporary.cleanup()
        self._locked.close()

    def _folder(self, slot: Slot) -> Path:
        folder = Path(self._temporary.name, slot.name)
        folder.mkdir(mode=0o700)
        return folder


def slots_of(num: int, gpus: Sequence[str], facts: dict[str, Any]) -> list[Slot]:
    """Returns `num` slots that share this machine's cores and `gpus` (UUIDs; [] for trials on the CPU) equally."""
    # `cores_of` sorts CPUs so that those of a NUMA node are next to each other, and so are the hardware threads of a core.
    cores = [core.number for core in cores_of(SYSTEM, frozenset(os.sched_getaffinity(0)))]
    each = len(gpus) // num
    share = max(1, len(cores) // num)
    turns = _turns([gpus[index * each] for index in range(num)] if each else [""] * num)
    return [
        Slot(
            name=str(index + 1),
            host=str(facts.get("hostname") or platform.node()),
            gpus=tuple(gpus[index * each : (index + 1) * each]),
            cores=tuple(sorted(cores[turns[index] * share : (turns[index] + 1) * share])),
            facts=facts,
        )
        for index in range(num)
    ]


def _turns(gpus: Sequence[str]) -> list[int]:
    """Returns, for each slot, its place in the order in which cores are assigned.

    If the NUMA nodes of all GPUs are known, slots are sorted by the node of their GPU: [1, 0] for GPUs on nodes 1 and 0.
    Otherwise, they keep their order.
    """
    nodes = [gpu_node({"CUDA_VISIBLE_DEVICES": gpu}, 0) for gpu in gpus]
    order = sorted(range(len(gpus)), key=lambda index: nodes[index] or 0) if None not in nodes else range(len(gpus))
    return [list(order).index(index) for index in range(len(gpus))]
