"""Makes study.json. Its `identity` has, as named values, what must be equal for two studies' results to be comparable."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
import shutil
from pathlib import Path
from typing import Any

import optuna

import autotune
from autotune.config.command import CommandTemplate
from autotune.config.keys import settings
from autotune.config.wrapped_commands import program_of
from autotune.harness.protocol import RankResult
from autotune.machine import comparable
from autotune.records import StudyRecord
from autotune.run_dir import StudyFolder
from autotune.space import ResolvedSpace
from autotune.trials.inputs import StudyInputs
from autotune.trials.objective import Goal

PROGRAM_FACTS = ("torch", "device_name")  # the entries of `comparable` that the program reports; the host reports the others
# Fields that keep their values when study.json is rewritten.
KEPT = ("base", "sequence", "started_at", "slots", "spent_s", "search_ended", "warm_start", "noise", "target", "detected")
SPACE = "space."
SCRIPT = "program.script"
DETECTED = ("optimizers", "modules", "world_size", "num_replicas", "batches_per_step")
MAX_SCRIPT_BYTES = 1 << 20  # larger files are not scripts


def about(
    inputs: StudyInputs,
    folder: StudyFolder,
    before: StudyRecord | None,
    *,
    space: ResolvedSpace | None = None,
    first: RankResult | None = None,
) -> StudyRecord:
    """Returns study.json. Its space is the requested one until the baseline has run, then the space that is searched.

    Args:
        inputs: the study's inputs.
        folder: the study's folder.
        before: an earlier version of the record, whose start time and sequence number are kept; None if there is none.
        space: what is searched here; None before the baseline.
        first: rank 0's result of the baseline; None before there is one.
    """
    asked = {key: domain.as_json() if domain else {"auto": True} for key, domain in inputs.space.domains.items()}
    versions = {"autotune": autotune.__version__, "optuna": optuna.__version__, "python": platform.python_version()}
    versions |= inputs.versions
    if first and first.facts.get("torch"):
        versions["torch"] = str(first.facts["torch"])
    parts = identity(inputs, space, first)
    budget, wanted = inputs.config.study.budget, inputs.config.record
    slots = {"num": num} if (num := len(inputs.launcher.beside())) else {}
    begun = {"base": folder.base, "sequence": folder.sequence, "started_at": inputs.clock.time(), "slots": slots}
    kept: dict[str, Any] = {name: getattr(before, name) for name in KEPT} if before else begun
    if first:
        detected = {name: first.detected.get(name) for name in DETECTED}
        kept |= {"target": first.target, "detected": dict(inputs.secrets.document(detected))}
    return StudyRecord(
        **kept,
        name=folder.name,
        title=inputs.title,
        command=inputs.secrets.words(inputs.command.parts),
        placeholders=inputs.command.placeholders,
        is_recipe=inputs.command.is_recipe,
        cwd=inputs.command.cwd,
        objective=inputs.config.objective,
        terms=_terms(inputs, first),
        fingerprint=hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16],
        identity=parts,
        asked=asked,
        space=space.as_json() if space else asked,
        pinned=inputs.space.pinned,
        machine={**inputs.machine, **(first.facts if first else {})},
        versions=versions,
        budget_s=None if budget.minutes is None else budget.minutes * 60,
        budget_trials=budget.trials,
        settings=inputs.secrets.document(settings(inputs.config)),
        verifies=inputs.secrets.document(dataclasses.asdict(inputs.verify)) if inputs.verify else {},
        recording=(
            {"configurations": wanted.configurations, "repeats": wanted.repeats, "warm": inputs.config.launch.warm}
            if inputs.is_recording
            else {}
        ),
    )


def identity(inputs: StudyInputs, space: ResolvedSpace | None, first: RankResult | None) -> dict[str, Any]:
    """Returns {name: plain value} of what results depend on. Only results with equal identities may be compared."""
    facts = comparable({**(first.facts if first else {}), **inputs.machine})
    device = inputs.config.device
    parts = {
        **{f"machine.{name}": value for name, value in facts.items() if name not in PROGRAM_FACTS},
        **{f"program.{name}": facts[name] for name in PROGRAM_FACTS},
        "program.command": inputs.secrets.words(inputs.command.parts),
        "program.executable": executable(inputs.command),
        SCRIPT: script(inputs.command),
        "objective": inputs.config.objective,
        "study.samples": inputs.config.study.samples,
        "train.global_batch": inputs.config.train.global_batch,
        "machine.price_per_hour": inputs.config.machine.price_per_hour,
        **Goal.of(inputs.config).limits,
        "device.kind": device.kind,
        "device.index": device.index,
        "device.memory_limit": device.memory_limit,
        **{f"pinned.{key}": value for key, value in inputs.space.pinned.items()},
        **{f"{SPACE}{key}": domain.as_json() for key, domain in (space.domains if space else {}).items()},
    }
    return dict(json.loads(json.dumps(parts, default=str)))


def _terms(inputs: StudyInputs, first: RankResult | None) -> dict[str, Any]:
    goal = Goal.of(inputs.config)
    if first:
        goal.learn([first], capacity_bytes=None)
    return goal.terms


def executable(command: CommandTemplate) -> str | None:
    """Returns the file that the command's first word resolves to on this machine; None if there is none."""
    word = command.parts[0]
    return os.path.abspath(os.path.join(command.cwd, word)) if os.sep in word else shutil.which(word)


def script(command: CommandTemplate) -> str | None:
    """Returns the script, or module in the working directory, that the command names, as "train.py (SHA-256 3f2a...)".

    Returns "train.py (not in /home/me)" if the script does not exist, None if the script is unknown or unreadable. Imports of
    the script are not examined.
    """
    program = program_of(command.parts)
    name = program.script or f"{(program.module or '').replace('.', os.sep)}.py"
    path = Path(command.cwd, name)
    try:
        if not path.exists() and program.script and program.by != "system":
            return f"{name} (not in {command.cwd})"
        if not path.is_file() or path.stat().st_size > MAX_SCRIPT_BYTES:
            return None
        return f"{name} (SHA-256 {hashlib.sha256(path.read_bytes()).hexdigest()[:12]})"
    except (OSError, ValueError):  # unreadable, or a name too long for a path
        return None


def differences(was: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Returns one phrase for each difference of two identities: "program.torch: was '2.14.1', is '2.15.0'".

    The resolved space and the facts that the program reports are known only after a baseline. So they are compared only if both
    identities have them. The script is compared only if it was recorded, which earlier versions of autotune did not do.
    """
    reported = [f"program.{name}" for name in PROGRAM_FACTS]
    is_reported = all(any(parts.get(name) for name in reported) for parts in (was, now))
    names = [name for name in sorted({*was, *now}) if is_reported or not (name.startswith(SPACE) or name in reported)]
    if not was.get(SCRIPT):
        names = [name for name in names if name != SCRIPT]
    return [f"{name}: was {was.get(name)!r}, is {now.get(name)!r}" for name in names if was.get(name) != now.get(name)]


def changed_variables(was: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Returns one phrase for each difference of two machines' recorded environments: "OMP_NUM_THREADS: was '8', is None"."""
    if "environment" not in was:  # written by an earlier version
        return []
    before, after = (machine.get("environment") or {} for machine in (was, now))
    names = [name for name in sorted({*before, *after}) if before.get(name) != after.get(name)]
    return [f"{name}: was {before.get(name)!r}, is {after.get(name)!r}" for name in names]
