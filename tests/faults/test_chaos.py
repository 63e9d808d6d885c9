"""The short version of `python -m tests.benchmarks.chaos`: whatever is killed, nothing is lost, repeated or left behind."""

import pytest

from tests.benchmarks import chaos


@pytest.mark.thorough  # the other tests of this folder kill each part at a chosen moment
def test_study_survives_the_death_of_its_parts(tmp_path):
    toll = chaos.run(tmp_path, 3, seed=3, minutes=0.3, study_minutes=0.3)
    assert toll.is_clean, "\n".join(toll.lines())
    assert toll.kills.total() >= 1


def test_a_toll_that_is_not_clean_is_called_so():
    assert not chaos.Toll().is_clean, "no verdict"
    assert chaos.Toll(verdicts=["faster"]).is_clean
    for harm in ({"lost": ["x"]}, {"repeated": ["x"]}, {"orphans": ["x"]}, {"segments": ["x"]}, {"verdicts": ["faster", ""]}):
        assert not chaos.Toll(**{"verdicts": ["faster"], **harm}).is_clean
