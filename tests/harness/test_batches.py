"""The number of samples in a batch: from its shape, from its sampler's indices, or from the command line."""

import dataclasses
from collections import UserDict, namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from autotune.harness import members
from autotune.harness.batches import NUM_COMPARED, CallSizes, Sizes, first_shape, is_packed, probe_batch_size

Pair = namedtuple("Pair", "left right")


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    name: str
    inputs: Any


class Graph:
    """A graph as in graph libraries: `keys` is a list or a method, and indexing by a key gives a value."""

    def __init__(self, keys: Any) -> None:
        self.keys = keys

    def __getitem__(self, key: str) -> Tensor:
        return torch.zeros(5, 2)


@pytest.mark.parametrize(
    "batch",
    [
        torch.zeros(5, 2),
        (torch.zeros(5, 2), torch.zeros(7)),
        ["a", torch.tensor(1.0), torch.zeros(5, 2)],
        {"text": "a", "inputs": {"ids": torch.zeros(5, 2)}},
        UserDict(ids=torch.zeros(5, 2)),
        Pair(torch.zeros(5, 2), 1),
        Batch("a", [torch.zeros(5, 2)]),
        Graph(["x"]),
        Graph(lambda: ["x"]),
    ],
)
def test_first_tensor_is_found_in_a_batch_of_any_type(batch: Any) -> None:
    assert (first_shape(batch), CallSizes(None).count((batch,), {})) == ((5, 2), 5)


@pytest.mark.parametrize("batch", ["text", ["a", "b"], {}, None, torch.tensor(1.0), 3])
def test_batch_without_a_tensor_that_has_dimensions_has_no_samples(batch: Any) -> None:
    assert (first_shape(batch), CallSizes(None).count((batch,), {})) == ((), 0)


def counted(batches: list[Tensor], asked: list[int]) -> list[float]:
    sizes = Sizes()
    return [sizes.count(batch, tuple(batch.shape), each, 4) for batch, each in zip(batches, asked, strict=True)]


def test_batch_dimension_that_agrees_with_the_sampler_is_used_from_then_on() -> None:
    usual, last = [torch.zeros(4, 4, 2)] + [torch.zeros(6, 4, 2)] * NUM_COMPARED, torch.zeros(6, 3, 2)
    assert counted([*usual, last], [4] * len(usual) + [0]) == [4] * len(usual) + [3]


def test_sampler_counts_are_used_for_good_if_no_dimension_agrees() -> None:
    assert counted([torch.zeros(30), torch.zeros(41), torch.zeros(8)], [4, 5, 2]) == [4, 5, 2]


def test_batch_smaller_than_requested_counts_its_actual_samples() -> None:
    assert counted([torch.zeros(4, 2), torch.zeros(3, 2), torch.zeros(4, 2)], [4, 4, 4]) == [4, 3, 4]


@pytest.mark.parametrize("first", [torch.zeros(3, 2), torch.zeros(0), torch.tensor(1.0)])
def test_samples_are_counted_even_if_some_are_missing_in_the_first_batch(first: Tensor) -> None:
    """A collate function that leaves out broken samples is often called with one of them at once."""
    assert counted([first, torch.zeros(4, 2), torch.zeros(3, 2)], [4, 4, 4]) == [4, 4, 3]


def test_packed_row_counts_tokens_and_an_unbatched_batch_counts_samples() -> None:
    row = {"tokens": torch.ones(9, dtype=torch.int64), "offsets": torch.tensor([0, 4, 9])}
    for batch, unit, count in ((row, "tokens", 9), ({"x": torch.zeros(6, 2)}, "samples", 6)):
        sizes = Sizes()
        assert (sizes.count(batch, first_shape(batch), 0, None), sizes.unit) == (count, unit)
    assert is_packed({"tokens": torch.ones(1, 9), "offsets": torch.tensor([0, 4, 9])}, (1, 9))
    assert not is_packed({"x": torch.ones(9), "labels": torch.tensor([0, 9, 9, 1, 2, 3, 4, 5, 1])}, (9,))


def test_probe_returns_the_batch_sizes_of_a_sampler_in_order() -> None:
    loader = DataLoader(TensorDataset(torch.zeros(3)), batch_size=2)
    probe = probe_batch_size(iter(loader))
    assert probe is not None
    probe.note([9])
    probe.begin()
    for indices in ([1, 2], [3], iter([4])):
        probe.note(indices)
    assert [probe.last() for _ in range(4)] == [2, 1, 0, 0]
    assert probe_batch_size(iter(DataLoader(TensorDataset(torch.zeros(3)), batch_size=None))) is None


def test_long_lists_of_words_and_ids_are_not_searched_for_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[Any] = []
    own = members.shape_of
    monkeypatch.setattr(members, "shape_of", lambda value: (looks.append(value), own(value))[1])
    batch = [{"ids": list(range(512)), "words": ["a"] * 512} for _ in range(32)]
    assert first_shape(batch) == ()
    assert len(looks) < 200
    assert first_shape({"texts": ["a"] * 512, "ids": torch.zeros(5, 2)}) == (5, 2)


@pytest.mark.parametrize(
    ("asked", "inputs", "count", "unit"),
    [
        (20, torch.zeros(35, 20, dtype=torch.int64), 20, "samples"),
        (20, torch.zeros(20, 35), 20, "samples"),
        (20, torch.zeros(700, 8), 20, "samples"),
        (None, torch.zeros(35, 20, dtype=torch.int64), 700, "tokens"),
        (None, torch.zeros(35, 20), 35, "samples"),
    ],
)
def test_batch_size_on_the_command_line_is_used_else_tokens_or_samples_are_counted(
    asked: int | None, inputs: Tensor, count: float, unit: str
) -> None:
    sizes = CallSizes(asked)
    assert (sizes.count((), {"inputs": inputs}), sizes.unit, sizes.odd_shape) == (count, unit, None)


@pytest.mark.parametrize(
    ("first", "inputs", "count"),
    [
        ((2, 4), torch.zeros(4), 1),
        ((2, 1), torch.zeros(4), 4),
        ((2, 4), torch.zeros(4, 4), 4),
        ((8, 3, 5, 5), torch.zeros(3, 9, 9), 1),
        ((8, 1, 5, 5), torch.zeros(3, 9, 9), 3),
        ((8, 3, 5, 5), torch.zeros(3, 3, 9, 9), 3),
        ((3,), torch.zeros(3, 9), 3),
        ((), torch.zeros(3), 3),
    ],
)
def test_input_that_fits_the_first_layer_without_a_batch_dimension_is_one_sample(
    first: tuple[int, ...], inputs: Tensor, count: float
) -> None:
    assert CallSizes(None, first).count((inputs,), {}) == count


@pytest.mark.parametrize(
    ("batch", "called", "counts"),
    [
        ((3, 8, 9), (1, 3, 8, 9), (3, 1)),
        ((3, 8, 9), (32, 3, 8, 9), (3, 1)),
        ((3, 8, 9), (3, 1, 8, 9), (3, 3)),
        ((3, 8, 9), (3, 8, 9), (3, 3)),
        ((3, 8, 9), (), (3, 3)),
    ],
)
def test_loader_batch_that_the_program_batches_again_is_one_sample(
    batch: tuple[int, ...], called: tuple[int, ...], counts: Any
) -> None:
    sizes = Sizes()
    before = sizes.count(torch.zeros(batch), batch, 0, None)
    is_single = sizes.are_single(called)
    assert (before, sizes.count(torch.zeros(batch), batch, 0, None)) == counts
    assert is_single == (counts[0] != counts[1])
    assert not sizes.are_single((*called, 1))


@pytest.mark.parametrize(
    ("other", "count", "unit"),
    [(torch.zeros(64, 3), 64, "samples"), (torch.ones(64, 6), 384, "tokens"), (torch.zeros(2, 64, 8), 384, "tokens")],
)
def test_integer_columns_of_a_table_are_not_counted_as_tokens(other: Tensor, count: float, unit: str) -> None:
    sizes = CallSizes(None)
    assert (sizes.count((torch.zeros(64, 6, dtype=torch.int64), other), {}), sizes.unit) == (count, unit)


def test_rows_of_a_jagged_tensor_are_samples() -> None:
    rows: Any = torch.nested.nested_tensor([torch.arange(2), torch.arange(5), torch.arange(3)], layout=torch.jagged)
    sizes = CallSizes(None)
    assert (sizes.count((rows,), {}), sizes.unit, first_shape([rows])) == (3, "samples", (3, 0))
    assert Sizes().count([rows], first_shape([rows]), 3, 3) == 3


def test_input_that_lacks_the_given_batch_size_is_reported() -> None:
    sizes = CallSizes(20)
    sizes.count((torch.zeros(35, 16),), {})
    assert (sizes.odd_shape, sizes.is_as_asked) == ((35, 16), False)


def test_input_without_rows_has_no_samples_if_a_batch_size_is_given() -> None:
    sizes = CallSizes(20)
    assert (sizes.count((torch.zeros(0, 16),), {}), sizes.continues, sizes.odd_shape) == (0, False, None)
