"""How loader workers are started and how they share tensors, as the workers themselves report it."""

import functools
import json
import logging
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import ConcatDataset, Subset

from autotune.harness import persistent
from autotune.harness.knobs.loader import has_in_order
from autotune.harness.protocol import APPLIED, NOT_APPLICABLE, OVERRIDDEN
from tests.harness.conftest import Trial
from tests.support.rows import more

CONTEXT, IN_ORDER, SHARING = "loader.multiprocessing_context", "loader.in_order", "loader.sharing_strategy"
NUM_WORKERS, PERSISTENT = "loader.num_workers", "loader.persistent_workers"


def worker(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "worker0.json").read_text()))


@pytest.mark.parametrize(
    ("method", "strategy"),
    [("forkserver", "file_system"), pytest.param("spawn", "file_descriptor", marks=pytest.mark.thorough)],
)
def test_workers_use_the_requested_start_method_and_sharing_strategy(trial: Trial, method: str, strategy: str) -> None:
    run = trial("workers.py", "lock=1", "workers=1", knobs={CONTEXT: method, SHARING: strategy}, mode="inspect")
    found = run.result()
    assert {key: (report.status, report.observed) for key, report in found.knobs.items()} == {
        CONTEXT: (APPLIED, method),
        SHARING: (APPLIED, strategy),
    }
    assert worker(run.folder)["sharing"] == strategy
    told = " ".join(worker(run.folder)["command"])
    assert {"forkserver": "forkserver import main", "spawn": "--multiprocessing-fork"}[method] in told


@pytest.mark.parametrize("method", ["spawn", *more("forkserver")])
def test_workers_start_and_are_counted_if_the_program_changes_pythonpath(trial: Trial, method: str) -> None:
    # A single worker that lives for all epochs saves seconds: each imports torch.
    run = trial("workers.py", f"context={method}", "path=/elsewhere", "lock=1", "workers=1", "persistent=1")
    found = run.result()
    assert (found.status, found.error) == ("measured", None), run.stderr
    assert found.regime  # known only if the workers count their batches
    assert worker(run.folder)


@pytest.mark.thorough
def test_knob_replaces_the_sharing_strategy_of_the_program(trial: Trial) -> None:
    run = trial("workers.py", "sharing=file_system", knobs={SHARING: "file_descriptor"}, mode="inspect")
    assert run.result().knobs[SHARING].status == APPLIED
    assert worker(run.folder)["sharing"] == "file_descriptor"


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("workers.py", "the data set cannot be sent to workers that are not forked: "),
        ("unguarded.py", "each worker that is not forked imports the program's main module"),
    ],
)
def test_workers_that_can_only_be_forked_are_forked_with_a_reason(trial: Trial, program: str, reason: str) -> None:
    words = ["lambda=1"] if program == "workers.py" else []
    run = trial(program, *words, "context=fork", knobs={CONTEXT: "spawn"}, mode="inspect")
    found = run.result()
    assert found.applicability[CONTEXT].startswith(reason)
    report = found.knobs[CONTEXT]
    assert (report.status, report.reason, report.observed) == (NOT_APPLICABLE, found.applicability[CONTEXT], "fork")
    assert "--multiprocessing-fork" not in worker(run.folder)["command"]  # the worker is a fork of the training process


# "default": as from Python 3.14 on. "locks": Python sets the default as soon as a library makes a lock.
@pytest.mark.parametrize(
    ("words", "method"),
    [("default=forkserver", "fork"), ("default=forkserver locks=1", "fork"), ("chosen=spawn", "spawn")],
)
def test_added_workers_are_forked_unless_the_program_chooses_another_method(trial: Trial, words: str, method: str) -> None:
    found = trial("workers.py", "workers=0", *words.split(), knobs={NUM_WORKERS: 1}, mode="inspect").result()
    assert found.knobs[NUM_WORKERS].status == APPLIED
    assert found.observed[CONTEXT] == method
    report = found.knobs.get(CONTEXT)  # reported only if the harness forks the workers
    assert (report is not None and (report.status, report.observed) == (APPLIED, "fork")) == (method == "fork")


def test_added_workers_that_cannot_be_pickled_are_forked_whatever_is_requested(trial: Trial) -> None:
    words = ("workers.py", "workers=0", "default=forkserver", "lambda=1")
    report = trial(*words, knobs={NUM_WORKERS: 2, CONTEXT: "forkserver"}, mode="inspect").result().knobs[CONTEXT]
    assert (report.status, report.observed) == (NOT_APPLICABLE, "fork")


@pytest.mark.skipif(not has_in_order(), reason="before torch 2.6, a loader cannot change the order of batches")
def test_batches_arrive_out_of_order_if_the_knob_allows_it(trial: Trial) -> None:
    knobs = {IN_ORDER: False, "loader.prefetch_factor": 4}
    run = trial("workers.py", "slow=0.3", knobs=knobs, mode="parity", max_steps=30)
    assert run.result().knobs[IN_ORDER].status == APPLIED
    due, came = (
        [int(line.rsplit(" ", 1)[1]) for line in run.stdout.splitlines() if line.startswith(f"slow batch {word} number")]
        for word in ("is", "was")
    )
    assert any(late > planned for planned, late in zip(due, came, strict=False))  # the other worker's batches overtook it


@pytest.mark.thorough
def test_order_of_a_loader_that_does_not_shuffle_is_kept(trial: Trial) -> None:
    baseline = trial("workers.py", "ordered=1", mode="inspect").result()
    assert baseline.applicability[IN_ORDER] == "the loader does not shuffle: the order of its samples may be intended"
    assert CONTEXT not in baseline.applicability
    found = trial("workers.py", "ordered=1", knobs={IN_ORDER: False}, mode="inspect").result()
    assert (found.knobs[IN_ORDER].status, found.knobs[IN_ORDER].observed) == (NOT_APPLICABLE, True)


@pytest.mark.thorough
def test_knobs_of_workers_are_not_applicable_without_workers(trial: Trial) -> None:
    found = trial("workers.py", "workers=0", knobs={CONTEXT: "spawn", IN_ORDER: False, SHARING: "file_system"}, mode="inspect")
    assert {report.status for report in found.result().knobs.values()} == {NOT_APPLICABLE}


@pytest.mark.parametrize(
    ("words", "workers", "reason"),
    [
        ("", 1, ""),
        ("variable", 1, ""),
        ("listed", 1, ""),
        ("shuffled", 1, ""),
        ("first", 1, ""),
        ("nested", 3, persistent.NESTED),
        ("last", 3, persistent.NESTED),
        ("changed", 3, persistent.CHANGED),
        ("changed remade", 3, persistent.CHANGED),
        ("array", 3, persistent.CHANGED),
    ],
)
def test_persistent_workers_yield_the_same_batches_as_new_workers(
    trial: Trial, plain: Trial, words: str, workers: int, reason: str
) -> None:
    run = trial("persistent.py", *words.split(), knobs={PERSISTENT: True})
    expected = {**json.loads(plain("persistent.py", *words.split()).stdout), "workers": workers}
    assert json.loads(run.stdout) == expected, run.stderr
    report = run.result().knobs[PERSISTENT]
    assert (report.status, report.reason) == (OVERRIDDEN if reason else APPLIED, reason)


def test_facts_about_a_data_set_tell_whether_it_was_changed() -> None:
    class Data:
        def __init__(self) -> None:
            self.ids, self.shared = list(range(100)), torch.zeros(2).share_memory_()
            self.inner, self.transforms = SimpleNamespace(scale=1.0), [SimpleNamespace(size=4)]
            self.options, self.pairs = {"size": 4}, [(str(number), number) for number in range(100)]
            self.words, self.square, self.logger = {number: "word" for number in range(100)}, math.sqrt, logging.getLogger("x")
            self.steps, self.weight = [SimpleNamespace(size=4) for _ in range(20)], torch.nn.Parameter(torch.zeros(2))
            self.large = SimpleNamespace(**{f"{n}": SimpleNamespace(**{f"{m}": m for m in range(60)}) for n in range(60)})
            self.epoch = 0

    def told(change: Callable[[Any], Any]) -> bool:
        data = Data()
        before = persistent.facts([data, None])
        change(data)
        return persistent.facts([data, None]) != before

    assert told(lambda data: setattr(data.inner, "scale", 2.0))
    assert told(lambda data: setattr(data.transforms[0], "size", 8))
    assert told(lambda data: setattr(data.steps[3], "size", 8))
    assert told(lambda data: data.weight.detach().add_(1))  # the data set holds the model, and an optimizer steps
    assert told(lambda data: data.options.update(size=8))
    assert told(lambda data: data.ids.__setitem__(5, 0))
    assert told(lambda data: data.ids.append(0))
    assert told(lambda data: data.pairs.reverse())
    assert told(lambda data: data.words.update({5: "other"}))
    assert told(lambda data: setattr(data, "epoch", 1))
    assert not told(lambda data: data.logger.isEnabledFor(17))  # the logger caches the answer
    assert not told(lambda data: data.shared.fill_(1))
    assert not told(lambda data: setattr(data.inner, "scale", 1.0))


def test_facts_can_be_collected_for_objects_that_raise_errors() -> None:
    class Odd(type):
        def __eq__(cls, other: object) -> bool:
            raise ArithmeticError

        __hash__ = type.__hash__

    class Lazy(metaclass=Odd):
        @property
        def __dict__(self) -> Any:  # type: ignore[override]
            raise RuntimeError

    data = SimpleNamespace(lazy=Lazy(), epoch=0)
    before = persistent.facts([data])
    assert persistent.facts([data]) == before
    data.epoch = 1
    assert persistent.facts([data]) != before


def test_objects_used_by_a_collate_function_are_part_of_the_facts() -> None:
    options = SimpleNamespace(size=4)

    def collate(batch: Any) -> Any:
        return options, batch

    for function in (collate, functools.partial(print, end=options), functools.partial(print, options)):
        before = persistent.facts([function])
        options.size += 1
        assert persistent.facts([function]) != before


class Trainer:
    """A program's class; one of its methods is the collate function."""

    SIZE = 4

    def __init__(self) -> None:
        self.step, self.options, self.padding = 0, {"size": 4}, 0

    @property
    def size(self) -> int:
        return self.step

    @staticmethod
    def joined(batch: Any) -> Any:
        return batch

    def padded(self, sample: Any) -> Any:
        return sample, self.padding, self.SIZE

    def collate(self, batch: Any) -> Any:
        return self.joined([self.padded(each) for each in batch]), self.options["size"]

    def collate_by_property(self, batch: Any) -> Any:
        return batch, self.size

    def collate_by_helper(self, batch: Any) -> Any:
        return vars(self), batch


@pytest.mark.parametrize(
    ("method", "changed", "is_told"),
    [
        ("collate", "step", False),
        ("collate", "padding", True),
        ("collate", "options", True),
        ("collate", "SIZE", True),
        ("collate_by_property", "step", True),
        ("collate_by_helper", "step", True),
    ],
)
def test_facts_about_a_method_cover_only_the_attributes_that_it_uses(method: str, changed: str, is_told: bool) -> None:
    trainer = Trainer()
    before = persistent.facts([getattr(trainer, method)])
    assert persistent.facts([getattr(trainer, method)])[1:] == before[1:]  # a method is a new object each time
    collate = getattr(trainer, method)
    before = persistent.facts([collate])
    setattr(trainer, changed, 5)
    assert (persistent.facts([collate]) != before) == is_told


def test_nested_data_set_is_part_of_the_facts() -> None:
    resize = SimpleNamespace(size=4)
    images = SimpleNamespace(transform=SimpleNamespace(transforms=[resize]))
    joined: Any = ConcatDataset([Subset[Any](images, [0])])  # type: ignore[arg-type]
    before = persistent.facts([joined])
    resize.size = 8
    assert persistent.facts([joined]) != before
