"""Prepares the launch of the program, for a trial of a study or for `inspect`."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from autotune.config.command import CommandTemplate
from autotune.config.recipe import tokens_per_sample
from autotune.config.schema import LOCAL, StudyConfig
from autotune.harness.protocol import Spec
from autotune.knobs.base import HostContext, Knob
from autotune.knobs.catalogue import CATALOGUE, knob
from autotune.launchers.base import Launch
from autotune.machine.visible import visible_devices
from autotune.records import Knobs
from autotune.trials.settings import compile_cache, deadlines, memory_cap_bytes, process_environment

ANYWHERE = HostContext(num_cores=8)  # an assumed machine, for which `_may_be_active` lists the values that each knob can have


def launch(
    config: StudyConfig,
    command: CommandTemplate,
    *,
    pinned: Knobs,
    changed: Knobs,
    knobs: Knobs,
    machine: dict[str, Any],
    folder: Path,
    study: Path,
    env: Mapping[str, str] | None = None,
    total_s: float | None = None,
    warm: Sequence[str] = (),
    is_warm_whole: bool = False,
    number: int = 0,
    **spec: Any,
) -> Launch:
    """Returns the launch of the program with the given knobs.

    Args:
        config: the study's configuration.
        command: the program.
        pinned: the user's pinned knobs, only those that have an effect here (see `meaningful`).
        changed: further knobs to set.
        knobs: all known knobs of the configuration. They only fill the command's placeholders.
        machine: `machine.host_facts()`.
        folder: the trial's folder.
        study: the study's folder, which holds the compile cache its trials share.
        env: further variables; variables of the user and of knobs take precedence.
        total_s: wall time the program may take; None for no overall limit.
        warm: modules that a warm start has imported; () for a fresh start.
        is_warm_whole: whether only a warm start with all modules in `warm` will do. If it is not possible, the trial starts
            fresh. If False, a warm start with only the modules in `OF_TORCH` (launchers/base.py) is allowed, too.
        number: the trial's number.
        spec: further fields of the harness's Spec.
    """
    everything, wanted = {**command.placeholders, **knobs}, {**pinned, **changed}
    passed = {key: everything[key] for key in command.placeholders}
    variables = {**process_environment(config, machine), **compile_cache(study), **(env or {}), **config.env}
    for key, value in wanted.items():
        variables.update(knob(key).environment(value))
    return Launch(
        argv=command.argv(everything),
        cwd=command.cwd,
        env=variables,
        folder=folder,
        spec=Spec(
            trial=number,
            nonce=secrets.token_hex(8),
            folder=os.path.abspath(folder),
            knobs={key: value for key, value in wanted.items() if key not in passed},
            passed=passed,
            device=_kind(config.device.kind, machine, is_here=config.launcher == LOCAL),
            memory_limit_bytes=memory_cap_bytes(config.device, machine),
            global_batch=config.train.global_batch,
            tokens_per_sample=tokens_per_sample(config),
            **spec,
        ),
        deadlines=deadlines(config.measure, max_s=total_s),
        warm=tuple(warm),
        is_warm_whole=is_warm_whole,
    )


def _kind(kind: str, machine: dict[str, Any], *, is_here: bool) -> str:
    """Returns `device.kind`; "cuda" for "auto" on a machine with a GPU.

    With "auto", the harness would apply a memory limit to the host's memory: it does so when torch is imported, before it can
    see that the program trains on the GPU.

    If the trial runs on another machine (not `is_here`), `machine` describes that machine and lists only the GPUs that the
    trial may use. CUDA_VISIBLE_DEVICES of this process is then ignored, because a login node may hide all GPUs.
    """
    has_gpu = bool(machine.get("gpus")) and not (is_here and visible_devices(os.environ) == [])
    return "cuda" if kind == "auto" and has_gpu else kind


def meaningful(pinned: Knobs, known: Knobs) -> Knobs:
    """Returns the pinned knobs that have an effect in a configuration; the others are left out without an error.

    Before the baseline, the program's own values are unknown. If a pinned knob depends on such a value (as prefetch_factor
    depends on the number of workers), it is kept, and the harness reports whether it was applied.

    Args:
        pinned: knobs that the user has set.
        known: the pinned knobs and all other knobs whose values are known.
    """
    return {key: value for key, value in pinned.items() if _may_be_active(knob(key), known)}


def _may_be_active(found: Knob, known: Knobs) -> bool:
    unknown = (each for each in CATALOGUE.values() if each.key not in known)
    settings = ({**known, each.key: value} for each in unknown for value in (*each.choices, *each.domain(ANYWHERE)))
    return found.is_active(known) or any(found.is_active(setting) for setting in settings)
