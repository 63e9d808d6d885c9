"""Padding is counted from the indices with which a model looks up its tokens."""

from __future__ import annotations

import pytest
import torch

from autotune.harness.explain.flops import StepFlops
from autotune.harness.explain.padding import Padding

TABLE, SMALL = torch.zeros(1000, 4), torch.zeros(2, 4)


def tokens(*lengths: int, length: int = 40, pad: int = 0) -> torch.Tensor:
    made = torch.randint(1, 1000, (len(lengths), length), generator=torch.Generator().manual_seed(0))
    for row, kept in zip(made, lengths, strict=True):
        row[kept:] = pad
    return made


def shares(*indices: torch.Tensor) -> list[float]:
    padding = Padding()
    for each in indices:
        padding.note("embedding", (TABLE, each))
    return list(padding.result().values())


@pytest.mark.parametrize("turn", [lambda x: x, lambda x: x.t(), lambda x: x.flip(1), lambda x: x.flip(1).t()])
def test_padding_is_found_in_each_layout(turn):
    assert shares(turn(tokens(10, 20, 30))) == pytest.approx([0.5, 0.25])


@pytest.mark.parametrize(
    "indices",
    [
        tokens(40, 40, 40),
        torch.zeros(3, 40, dtype=torch.long),  # samples of one token only
        torch.arange(40).expand(3, 40),
        tokens(5, 6, 7, length=10),  # too short
        torch.arange(40),
    ],
)
def test_tokens_without_padding_have_none(indices):
    assert sum(shares(indices)) == 0


def test_a_full_sample_leaves_no_position_that_is_padded_in_all():
    assert shares(tokens(10, 40)) == pytest.approx([30 / 80, 0.0])
    assert shares(tokens(10, 10), tokens(40, 40)) == pytest.approx([60 / 160, 60 / 160])


def test_only_the_largest_table_counts_and_packed_samples_do_not():
    padding = Padding()
    padding.note("embedding", (SMALL, tokens(10, 20)))  # segments or a mask
    padding.note("embedding", (TABLE, tokens(40, 40)))
    assert padding.result() == {"padded_frac": 0.0, "in_all_frac": 0.0}
    padding.note("_pack_padded_sequence", ())
    assert padding.result() == {}


def test_the_tokens_of_a_step_are_counted_with_its_flops():
    counted = StepFlops()
    counted.begin()
    torch.nn.Embedding(1000, 4)(tokens(10, 30)).sum().backward()
    counted.end()
    assert counted.padding.result() == pytest.approx({"padded_frac": 0.5, "in_all_frac": 0.25})
