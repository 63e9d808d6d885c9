"""Proposals while trials run are based on assumed results of the running trials."""

from types import SimpleNamespace

import numpy as np
import pytest

from autotune.search.rates import Rules, SamplerOptions, supposition
from autotune.search.rates.failure_model import Proven
from autotune.search.rates.sampler import STOP_AFTER
from tests.search.rates.test_sampler import (
    AMP,
    BATCH,
    SOME,
    WORKERS,
    active,
    all_configurations,
    asked,
    new_study,
    proposal,
    rates_of,
    tell,
    with_,
)

BEST = max(rates_of(one)[2] for one in all_configurations())


def asked_at_once(study, num):
    return [asked(study)[1] for _ in range(num)]


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(3))
def test_sixteen_parallel_proposals_differ_and_combine_expected_gains(seed):
    first = asked_at_once(new_study([with_()], seed=seed), 16)
    assert len({tuple(one.items()) for one in first}) == 16
    assert max(rates_of(one)[2] for one in first) > 0.9 * BEST


def test_proposal_builds_on_a_running_trial_that_the_sampler_did_not_propose(monkeypatch):
    monkeypatch.setattr(supposition, "FAILS_CHANCE", 0.0)
    expert = with_(workers=8, batch=64, amp="bf16")
    params, found = proposal(new_study([with_()], rules=Rules(active=active, running=lambda: [expert])))
    assert params != expert
    assert (params[WORKERS], params[AMP]) == (8, "bf16")
    assert "workers" not in found.why
    assert "bf16" not in found.why


def test_risky_running_trial_is_assumed_to_run_out_of_memory():
    safe, risky = with_(batch=64), with_(batch=128)
    memory = SimpleNamespace(fitting=lambda configurations: [params[BATCH] < 128 for params in configurations])
    found = supposition.supposition([safe, risky], SimpleNamespace(knobs=[]), memory, Proven([safe]), np.random.default_rng(0))
    assert found.working == [safe]
    assert [(one.params, one.is_out) for one in found.out] == [(risky, True)]


def test_some_proposals_avoid_a_new_value_that_is_still_running(monkeypatch):
    running = [with_(amp="bf16"), with_(amp="bf16", workers=8)]
    study = new_study([with_()], rules=Rules(active=active, running=lambda: running))
    monkeypatch.setattr(supposition, "FAILS_CHANCE", 1.0)
    assert {params[AMP] for params in asked_at_once(study, 4)} == {"off"}
    monkeypatch.setattr(supposition, "FAILS_CHANCE", 0.0)
    assert "bf16" in {params[AMP] for params in asked_at_once(new_study([with_()], rules=study.sampler.rules), 4)}


def test_search_does_not_end_on_assumed_results():
    study = new_study([*SOME, with_(batch=128, workers=8, amp="bf16")], options=SamplerOptions())
    running = [asked(study) for _ in range(4 * STOP_AFTER)]
    assert not study.sampler.has_nothing_more
    assert study.sampler.is_provisional
    for trial, params in running:
        tell(study, trial, params)
        if params[WORKERS] and not study.sampler.has_nothing_more:
            asked(study)
    assert study.sampler.has_nothing_more, "results came in between"
