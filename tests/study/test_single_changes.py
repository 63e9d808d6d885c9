import pytest

from autotune.knobs.base import HostContext
from autotune.space import Choice, IntInterval, ResolvedSpace
from autotune.study.single_changes import SingleChanges
from tests.support.records import a_trial

REFERENCE = {"loader.batch_size": 32, "loader.num_workers": 0, "precision.amp": "off", "layout.channels_last": False}
KEYS = list(REFERENCE)


@pytest.fixture
def space():
    domains = {
        "loader.batch_size": Choice((16, 32, 64, 128)),
        "loader.num_workers": Choice((0, 1, 2, 4, 8)),
        "precision.amp": Choice(("off", "bf16")),
        "layout.channels_last": Choice((False, True)),
    }
    return ResolvedSpace(domains=domains, pinned={}, baseline=REFERENCE, dropped={}, reference=REFERENCE)


def trial(waiting=0.0, **changed):
    changed = {key.replace("__", "."): value for key, value in changed.items()}
    return a_trial(1, knobs={**REFERENCE, **changed}, changed=changed, value=100.0, data_wait_frac=waiting)


def test_each_proposal_changes_one_knob(space):
    best = trial()
    proposed = list(SingleChanges(space, KEYS, None).of(best))
    assert {key for key, _ in proposed} == set(KEYS)
    for key, knobs in proposed:
        assert {other for other in knobs if knobs[other] != best.knobs[other]} == {key}


@pytest.mark.parametrize("batches", [Choice((16, 32, 64, 128)), IntInterval(4, 600, log=True)])
def test_ordered_knobs_move_to_adjacent_values_larger_first(space, batches):
    space.domains["loader.batch_size"] = batches
    found = [knobs["loader.batch_size"] for key, knobs in SingleChanges(space, KEYS, None).of(trial()) if "batch" in key]
    assert found == [64, 16]


def test_expert_value_is_proposed_before_the_adjacent_value(space):
    changes = SingleChanges(space, KEYS, HostContext(num_cores=16, has_cuda=True))
    found = [knobs["loader.num_workers"] for key, knobs in changes.of(trial()) if key == "loader.num_workers"]
    assert found[0] > 1


@pytest.mark.parametrize(("waiting", "group"), [(0.5, "loader"), (0.0, "precision")])
def test_knobs_of_the_bottleneck_are_proposed_first(space, waiting, group):
    first, _ = next(SingleChanges(space, KEYS, None).of(trial(waiting)))
    assert first.startswith(group)


def test_undecided_knobs_are_proposed_before_reverting_decided_ones(space):
    order = [key for key, _ in SingleChanges(space, KEYS, None).of(trial(precision__amp="bf16"))]
    assert order[0] == "layout.channels_last"
    assert order[-1] == "precision.amp"


def test_knob_proposed_already_comes_after_the_others(space):
    changes = SingleChanges(space, KEYS, None)
    changes.taken("precision.amp")
    assert [key for key, _ in changes.of(trial())][-1] == "precision.amp"
