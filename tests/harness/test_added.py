"""A knob adds workers: their samples are those of one process, also if the program changes its data set later."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from autotune.harness import added_workers, persistent
from autotune.harness.patches import patches
from autotune.harness.protocol import APPLIED, OVERRIDDEN
from tests.harness.conftest import RULES, Trial


class Data(Dataset[Any]):
    def __init__(self) -> None:
        self.value = 0

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[int, int, bool]:
        return index, self.value, get_worker_info() is None


class Stream(Data, IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(10))


class Endless:
    def __iter__(self) -> Iterator[int]:
        return itertools.cycle(range(10))


@pytest.fixture(autouse=True)
def _looks_at_each_batch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(added_workers, "LOOK_S", 0.0)
    monkeypatch.setattr(added_workers, "MAX_COST_FRAC", 1e9)
    added_workers._install.cache_clear()
    persistent._install.cache_clear()
    yield
    patches.uninstall_all()


def seen(loader: DataLoader[Any], data: Any, number: int, changed_at: int = 6) -> list[tuple[int, int, bool]]:
    """Returns (index, value, whether this process fetched it) of the first samples; the value changes after `changed_at`."""
    found = []
    for index, value, is_here in loader:
        found.append((int(index), int(value), bool(is_here)))
        data.value = int(len(found) >= changed_at)
        if len(found) == number:
            break
    return found


@pytest.mark.parametrize("options", [{}, {"persistent_workers": True}, {"sampler": Endless()}])
def test_after_a_change_the_rest_of_the_iteration_is_fetched_without_workers(
    options: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    data, number = Data(), 25 if "sampler" in options else 10
    loader = DataLoader(data, num_workers=1, prefetch_factor=2, **options)
    added_workers.watch(loader)
    if options.get("persistent_workers"):
        persistent.watch(loader)
    found = seen(loader, data, number)
    assert [index for index, _, _ in found] == [each % 10 for each in range(number)]
    assert [value for _, value, _ in found] == [0] * 8 + [1] * (number - 8)  # two batches were made before the change
    assert [is_here for _, _, is_here in found] == [False] * 8 + [True] * (number - 8)
    assert capfd.readouterr().err == f"autotune: {added_workers.STALE}: from here on, batches are fetched without workers\n"
    assert seen(loader, data, 10, 0) == [(index, 1, False) for index in range(10)]  # workers again, with new copies


def test_iteration_after_a_change_has_the_usual_length() -> None:
    data = Data()
    loader = DataLoader(data, num_workers=1)
    added_workers.watch(loader)
    assert len(seen(loader, data, 99)) == 10


def test_changed_stream_gets_only_a_warning(capfd: pytest.CaptureFixture[str]) -> None:
    data = Stream()
    loader = DataLoader(data, batch_size=None, num_workers=1, prefetch_factor=2)
    added_workers.watch(loader)
    assert len(seen(loader, data, 99)) == 10
    assert capfd.readouterr().err == f"autotune: {added_workers.STALE}: set loader.num_workers=0\n"


def test_loader_rebuilt_from_one_with_added_workers_is_recognised() -> None:
    data = torch.utils.data.TensorDataset(torch.zeros(4))
    first = DataLoader(data, num_workers=1)
    added_workers.watch(first)
    assert added_workers.is_remade(DataLoader(data, num_workers=1, batch_sampler=first.batch_sampler))
    assert not added_workers.is_remade(DataLoader(data))
    assert not added_workers.is_remade(DataLoader(torch.utils.data.TensorDataset(torch.zeros(4)), num_workers=1))


@pytest.mark.parametrize(("words", "status", "observed"), [((), OVERRIDDEN, 0), (("fixed",), APPLIED, 1)])
def test_added_workers_are_reported_as_overridden_if_the_data_set_changes(
    trial: Trial, words: tuple[str, ...], status: str, observed: int
) -> None:
    rules = dataclasses.replace(RULES, min_s=1.4, max_s=1.4, warmup_max_s=1.0)
    found = trial("late.py", *words, knobs={"loader.num_workers": 1}, rules=rules).result()
    assert found.status == "measured"
    report = found.knobs["loader.num_workers"]
    assert (report.status, report.reason, report.observed) == (
        status,
        added_workers.STALE if status == OVERRIDDEN else "",
        observed,
    )


def sides(num_workers: int, *, are_persistent: bool = False) -> list[Any]:
    """Returns what two epochs over two zipped loaders yield, of which the second has workers, and a draw after each batch."""
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.arange(12))
    first = DataLoader(data, 4, shuffle=True)
    second = DataLoader(data, 4, shuffle=True, num_workers=num_workers, persistent_workers=are_persistent)
    if num_workers:
        added_workers.watch(second)
    if are_persistent:
        persistent.watch(second)
    pairs = itertools.chain.from_iterable(zip(first, second, strict=True) for _ in range(2))
    return [(x.tolist(), y.tolist(), float(torch.rand(()))) for (x,), (y,) in pairs]


@pytest.mark.parametrize("are_persistent", [False, True])
def test_order_with_added_workers_is_that_without_in_zipped_loaders(are_persistent: bool) -> None:
    assert sides(2, are_persistent=are_persistent) == sides(0)
