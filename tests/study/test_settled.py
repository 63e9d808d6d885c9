"""Which configurations need no further trial."""

from types import SimpleNamespace

import pytest

from autotune.records import Outcome
from autotune.study.recording import _counted
from autotune.study.resuming import CUT_OFF_CAUSE
from autotune.study.settled import MAX_CHANCES, Settled
from autotune.trials.running import NODE_LOST
from tests.support.records import a_trial

CHANGED = {"loader.num_workers": 64}


@pytest.mark.parametrize(
    ("evidence", "is_given_up"), [({}, False), ({"cause": CUT_OFF_CAUSE}, True), ({"cause": "stopped", NODE_LOST: True}, True)]
)
def test_configuration_that_ends_its_node_or_autotune_is_given_up(evidence, is_given_up):
    session = SimpleNamespace(
        resolved=None,
        inputs=SimpleNamespace(config=SimpleNamespace(search=SimpleNamespace(sampler="rates"))),
        about=SimpleNamespace(warm_start={}),
    )
    settled = Settled(session, parity=None, culprits=SimpleNamespace(learn=lambda record: None))
    records = [
        a_trial(number, changed=CHANGED, outcome=Outcome.interrupted, evidence=evidence) for number in range(1, MAX_CHANCES + 1)
    ]
    for record in records:
        settled.note(record)
    assert (settled.own_trial(CHANGED) is not None) is is_given_up
    _, chances = _counted(records)
    assert bool(chances) is is_given_up
