"""Which loaders of a real run the study's knobs apply to."""

from types import SimpleNamespace

import pytest
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler

from autotune.harness.knobs.loader import LoaderKnobs
from autotune.harness.sites import TargetSites, batch_size_of, code_of, marked
from tests.harness.contexts import context


def made(sites, code, site="train.py:1", ordinal=0):
    info = SimpleNamespace(code=code, site=site, ordinal=ordinal, nth=sites.nth(code))
    return sites.is_target(info, {"dataset": []}, is_chained=False)


def target(code="train", nth=0, site="train.py:1"):
    return {"site": site, "ordinal": 0, "code": code, "nth": nth}


def here(depth=0):
    import sys

    return code_of(sys._getframe(depth), lambda name: False)


def test_same_code_is_recognised_at_another_line():
    first = [here() for _ in range(2)]
    assert first[0] == first[1]
    assert first[0].startswith("test_sites.py:here:")
    assert ":test_same_code_is_recognised_at_another_line:" in here()
    assert here() != first[0]  # here() is called by another line


def test_loader_is_identified_by_its_code_and_not_by_its_line():
    sites = TargetSites([target(site="elsewhere.py:3")])
    assert made(sites, "train")
    assert not made(sites, "evaluate")
    assert not made(sites, "train")  # the second loader made by this code is not the target


def test_loader_is_identified_by_its_line_if_no_code_is_recorded():
    sites = TargetSites([{"site": "train.py:1", "ordinal": 0}])
    assert made(sites, "train")
    assert not made(sites, "train", site="train.py:2")
    assert not made(sites, "train", ordinal=1)


def test_loaders_that_each_epoch_rebuilds_are_identified_by_their_order():
    sites = TargetSites([target(nth=1)])
    assert [made(sites, "train") for _ in range(2)] == [False, True]
    sites.begin_training([])
    assert [made(sites, "train") for _ in range(4)] == [False, True, False, True]


def test_during_training_every_shuffled_loader_of_the_same_code_is_a_target():
    sites = TargetSites([target(code="train:shuffled", nth=1)])
    assert [made(sites, "train:shuffled") for _ in range(2)] == [False, True]
    sites.begin_training([])
    assert [made(sites, "train:shuffled") for _ in range(3)] == [True, True, True]


def test_wrapping_loader_is_a_target_only_if_it_wraps_a_target():
    sites = TargetSites([target(), target(code="accelerate")])
    info = SimpleNamespace(code="accelerate", site="", ordinal=0, nth=0)
    assert sites.is_target(info, {}, is_chained=True)
    assert not sites.is_target(info, {}, is_chained=False)


def test_batch_samplers_without_weak_references_are_tolerated():
    sites, known = TargetSites(None), in_order(range(4))
    for batch_sampler in ([[0, 1]], known, None):
        sites.made(batch_sampler, SimpleNamespace(is_target=True))
    info = SimpleNamespace(code="", site="", ordinal=0, nth=0, is_target=False, is_shuffled=False)
    info.has_own_iterators = False
    knobs = LoaderKnobs(context({"loader.num_workers": 1}))
    sites.change(info, {"dataset": [], "batch_sampler": known}, knobs)
    assert info.is_target
    arguments = {"dataset": [], "batch_sampler": in_order(range(4))}
    sites.change(info, arguments, knobs)
    assert not info.is_target
    assert "num_workers" not in arguments


def in_order(data):
    return BatchSampler(SequentialSampler(data), 2, drop_last=False)


@pytest.mark.parametrize(
    ("given", "trains"),
    [
        ({"shuffle": True}, True),
        ({"shuffle": False}, False),
        ({"sampler": RandomSampler(range(4))}, True),
        ({"sampler": SequentialSampler(range(4))}, False),
        ({"sampler": DistributedSampler(range(4), 2, 0, shuffle=False)}, False),
        ({"batch_sampler": in_order(range(4))}, False),
        ({"batch_sampler": SimpleNamespace(batch_sampler=in_order(range(4)))}, False),
        ({"batch_sampler": [[0, 1], [3, 2]]}, True),
    ],
)
def test_settings_without_a_recorded_loader_apply_to_loaders_that_shuffle(given, trains):
    info = SimpleNamespace(code="", site="", ordinal=0, nth=0)
    assert TargetSites(None).is_target(info, {"dataset": range(4), **given}, is_chained=False) is trains
    assert marked("code", {"dataset": range(4), **given}) == ("code:shuffled" if trains else "code")


def test_batch_size_is_found_inside_a_sampler_that_skips_batches():
    class Skipping(BatchSampler):
        def __init__(self, batch_sampler):
            self.batch_sampler = batch_sampler

    outer = Skipping(BatchSampler(RandomSampler(range(64)), 32, False))
    assert batch_size_of(outer) is None  # an unknown class may join or split the batches
    Skipping.__module__ = "accelerate.data_loader"
    assert batch_size_of(outer) == 32
    assert batch_size_of(None) is None
