"""Knobs of the training DataLoader: changed in the arguments of its constructor, read back from the loader that yields."""

from __future__ import annotations

from typing import Any, Dict, Optional

from ..adapters import reads_batch_size_as_it_goes
from ..protocol import APPLIED, NOT_APPLICABLE, OVERRIDDEN, KnobReport

PREFIX = "loader."
SETTABLE = ("num_workers", "prefetch_factor", "pin_memory", "persistent_workers")
ABOUT_WORKERS = ("num_workers", "prefetch_factor", "persistent_workers")
WITHOUT_WORKERS = {"prefetch_factor": None, "persistent_workers": False, "multiprocessing_context": None, "timeout": 0}


OWN_SAMPLER = "the loader is built with its own batch sampler ({}) without a batch_size"
BATCHES_ITSELF = "the program batches by itself (batch_size=None)"
UNSHARED = "the IterableDataset is not seen to ask get_worker_info(): every worker would yield all of its data"


def apply(
    knobs: Dict[str, Any], arguments: Dict[str, Any], reports: Dict[str, KnobReport], *, is_chained: bool, is_unshared: bool
) -> None:
    """Changes the constructor's arguments in place and notes the knobs that have no hold there.

    Args:
        knobs: the trial's knobs.
        arguments: bound arguments of `DataLoader.__init__`.
        reports: where knobs without effect are noted.
        is_chained: the loader is made around an earlier target's batch sampler, which carries the batch size already.
        is_unshared: the data set is a stream that does not ask which worker it is in: its workers stay as they are.
    """
    for key, value in knobs.items():
        if not key.startswith(PREFIX):
            continue
        name = key[len(PREFIX) :]
        if name == "batch_size":
            problem = None if is_chained else _set_batch_size(arguments, value)
        elif is_unshared and name in ABOUT_WORKERS and not (name != "num_workers" and arguments.get("num_workers")):
            problem = UNSHARED
        elif name in SETTABLE:
            arguments[name] = value
            problem = None
        else:
            problem = "the DataLoader has no such argument"
        if problem:
            reports[key] = KnobReport(NOT_APPLICABLE, problem)
    _drop_what_needs_workers(arguments, reports, knobs)


def _set_batch_size(arguments: Dict[str, Any], value: int) -> Optional[str]:
    sampler = arguments.get("batch_sampler")
    if sampler is not None:
        if not isinstance(getattr(sampler, "batch_size", None), int):
            return OWN_SAMPLER.format(type(sampler).__name__)
        sampler.batch_size = value
        return None
    if arguments.get("batch_size", 1) is None:
        return BATCHES_ITSELF
    arguments["batch_size"] = value
    return None


def _drop_what_needs_workers(arguments: Dict[str, Any], reports: Dict[str, KnobReport], knobs: Dict[str, Any]) -> None:
    # torch refuses these without workers, so a program's own setting must go when the workers go.
    if arguments.get("num_workers", 0):
        return
    for name, neutral in WITHOUT_WORKERS.items():
        if arguments.get(name, neutral) != neutral:
            arguments[name] = neutral
            key = PREFIX + name
            if key in knobs:
                reports[key] = KnobReport(NOT_APPLICABLE, "means nothing without workers (loader.num_workers=0)")


def settings(loader: Any, batch_size: Optional[int]) -> Dict[str, Any]:
    """Returns knob key -> value as the constructed loader has it; knobs it has no value for are left out."""
    found = {
        "loader.batch_size": batch_size,
        "loader.num_workers": loader.num_workers,
        "loader.prefetch_factor": loader.prefetch_factor if loader.num_workers else None,
        "loader.pin_memory": bool(loader.pin_memory),
        "loader.persistent_workers": bool(loader.persistent_workers) if loader.num_workers else None,
    }
    return {key: value for key, value in found.items() if value is not None}


def verify(knobs: Dict[str, Any], noted: Dict[str, KnobReport], training: Any) -> Dict[str, KnobReport]:
    """Returns a report for every loader knob of the trial.

    Args:
        knobs: the trial's knobs.
        noted: what construction could not do.
        training: the loader whose batches reached the optimizer; None when there was none.
    """
    reports = {}
    for key, value in knobs.items():
        if not key.startswith(PREFIX):
            continue
        observed = training.settings.get(key) if training is not None else None
        if key in noted:
            reports[key] = KnobReport(noted[key].status, noted[key].reason, observed)
        elif training is None:
            reports[key] = KnobReport(NOT_APPLICABLE, "no DataLoader feeds the optimizer's steps")
        elif observed != value:
            missed = "" if training.is_target else " (it is not the loader that trained in the baseline)"
            why = f"the training loader{missed} has {observed!r}, {value!r} was asked"
            reports[key] = KnobReport(OVERRIDDEN, why, observed)
        elif key == PREFIX + "num_workers" and value > 1 and not training.is_shared_out:
            reports[key] = KnobReport(NOT_APPLICABLE, UNSHARED, observed)
        elif key == PREFIX + "batch_size" and not _yields(training, value):
            seen = int(training.largest_batch)
            why = f"the program's own batch sampler yields batches of {seen}, {value!r} was asked"
            reports[key] = KnobReport(OVERRIDDEN, why, seen)
        else:
            reports[key] = KnobReport(APPLIED, "", observed)
    return reports


def _yields(training: Any, size: int) -> bool:
    # A batch sampler of the program's own may have its batches ready when its batch_size is changed.
    sampler, largest = training.given_batch_sampler, training.largest_batch
    is_own = sampler is not None and not reads_batch_size_as_it_goes(sampler)
    return not is_own or not largest or largest == size


def applicability(loader: Any) -> Dict[str, str]:
    """Returns knob key -> why it cannot be turned, for the training loader of the baseline (None: no loader)."""
    names = ("batch_size", "num_workers", "prefetch_factor", "pin_memory", "persistent_workers")
    if loader is None:
        return {PREFIX + name: "no DataLoader feeds the optimizer's steps" for name in names}
    reasons = {}
    if loader.batch_size is None:
        kind = loader.given_kinds[2]
        is_own = kind is not type(None)
        reasons["loader.batch_size"] = OWN_SAMPLER.format(kind.__name__) if is_own else BATCHES_ITSELF
    if not loader.is_shared_out:
        kept = ABOUT_WORKERS[:1] if loader.num_workers else ABOUT_WORKERS
        reasons.update({PREFIX + name: UNSHARED for name in kept})
    return reasons
