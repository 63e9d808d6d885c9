"""The state that the sampler keeps between proposals equals the state after reading all trials again."""

import random

import numpy as np
import optuna
import pytest
from optuna.distributions import CategoricalDistribution
from optuna.trial import TrialState

from autotune.search.rates import MEASURED
from autotune.search.rates import coding as coding_module
from autotune.search.rates import history as module
from autotune.search.rates.coding import BATCH, Coding
from autotune.search.rates.history import History, Known, Seen
from autotune.search.rates.pool import Pool
from autotune.search.rates.sampler import _Recent

SPACE = {
    BATCH: CategoricalDistribution((16, 32, 64, 128)),
    "precision.amp": CategoricalDistribution(("off", "bf16")),
    "loader.num_workers": CategoricalDistribution((0, 1, 2, 4, 8)),
}


def a_study():
    return optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0), direction="maximize")


def end(study, trial, rng):
    """Ends a trial: with a rate, as out of memory, or without an answer."""
    kind = rng.choice(["ok", "ok", "ok", "out", "works", "fail"])
    if kind == "fail":
        study.tell(trial, state=TrialState.FAIL)
        return
    for name in ("memory", "works"):
        trial.set_constraint(name, 1.0 if {"out": "memory"}.get(kind, kind) == name else 0.0)
    rate = rng.uniform(50, 150) if kind == "ok" else None
    trial.set_user_attr(MEASURED, {"rate": rate, "score": rate, "peak_memory_bytes": 1e6, "outcome": "ok"})
    study.tell(trial, rate or 1.0)


def states():
    """Yields a study after each event. Trials end in another order than they begin."""
    study, rng, running = a_study(), random.Random(0), []
    for _ in range(200):
        if running and (len(running) == 5 or rng.random() < 0.5):
            end(study, running.pop(rng.randrange(len(running))), rng)
        else:
            running.append(study.ask(SPACE))
        yield study


def test_incremental_history_equals_a_newly_read_history():
    history = History()
    for study in states():
        fresh, before = History(), [*history._first.trials]
        known, anew = history.seen(study), fresh.seen(study)
        assert list(known) == list(anew)
        assert known.first.trials[: len(before)] == before
        plain = Known(known)
        for name in ("running", "num_finished", "num_out", "rated", "by_rate", "failed", "peaks"):
            assert getattr(known, name) == getattr(anew, name) == getattr(plain, name)
        assert known.measured(most=30) == plain.measured(most=30)
        assert {item for one in known.values for item in one.items()} == {item for one in known for item in one.params.items()}
        assert known.within(SPACE) is known
        assert not len(known.within(["no knob"]))
        assert (history.num_rates, history.ratios) == (fresh.num_rates, fresh.ratios)
    assert history.num_rates > 30
    assert history.ratios == (1.0, 1.0)


def test_another_study_is_read_from_its_beginning():
    history, (*_, study) = History(), states()
    history.seen(study)
    other, rng = a_study(), random.Random(1)
    end(other, other.ask(SPACE), rng)
    assert list(history.seen(other)) == list(History().seen(other))


def test_each_finished_trial_is_read_once(monkeypatch):
    read = []
    monkeypatch.setattr(module, "_finished", lambda trial, make=module._finished: read.append(trial.number) or make(trial))
    history = History()
    for study in states():
        history.seen(study)
    assert sorted(read) == [trial.number for trial in study.get_trials(states=(TrialState.COMPLETE,))]


def encoded(coding, known):
    return {bytes(row) for row in coding.encode([one.params for one in known])}


def test_reused_pool_equals_a_new_pool():
    history, pool, coding = History(), Pool(Coding(SPACE), lambda params: params), Coding(SPACE)
    codes = coding.all_codes()
    for study in states():
        known = history.seen(study)
        fresh = Pool(coding, lambda params: params)
        pool.read(known)
        fresh.read(known)
        are_new = pool.are_new(codes)
        assert are_new.tolist() == fresh.are_new(codes).tolist()
        assert are_new.tolist() == [bytes(code) not in encoded(coding, known) for code in codes]
        assert (pool._proven.values, pool._proven.pairs) == (fresh._proven.values, fresh._proven.pairs)
        assert vars(pool.failure_model(known)) == vars(fresh.failure_model(known))
    assert (~are_new).sum() > 20
    assert len(pool._proven.pairs) > 10
    assert known.failed


@pytest.mark.parametrize("num", [10, 151, 400])
def test_measured_keeps_the_fastest_the_latest_and_some_other_trials(num):
    rng = np.random.default_rng(num)
    known = [Seen(params={"n": n}, rate=float(rng.integers(50, 80))) for n in range(num)]
    by_rate = sorted(range(num), key=lambda place: -known[place].rate)
    kept = {*by_rate[:50], *range(num - 50, num)}
    others = [place for place in by_rate if place not in kept]
    kept |= {others[place * len(others) // (150 - len(kept))] for place in range(150 - len(kept))} if num > 150 else set(others)
    assert [one.params["n"] for one in Known(known).measured(most=150)] == sorted(place for place in kept if place >= 0)


def fits(recent, known):
    found = []
    recent.get(Known(known), lambda: found.append(1) or object())
    return bool(found)


def test_model_is_refitted_after_each_trial_and_later_after_one_percent_more_trials():
    recent, known = _Recent(), [Seen(params={}, rate=1.0)]
    for _ in range(99):
        assert fits(recent, known)
        assert not fits(recent, [*known, Seen(params={}, is_running=True)])
        known = [*known, Seen(params={}, rate=1.0)]
    known = known * 10
    assert [fits(recent, [*known, *known[:more]]) for more in (0, 0, 8, 9)] == [True, False, False, True]


def test_trials_that_ran_out_of_host_memory_are_kept_apart_by_what_they_needed():
    params = [{"loader.num_workers": 8, "loader.prefetch_factor": prefetch} for prefetch in (4, 2)]
    trials = [Seen(params=one, is_out=True, is_host_out=is_host) for one in params for is_host in (True, False)]
    peaks = Known(trials).peaks
    assert [peak.params for peak in peaks if peak.is_host] == params
    assert sum(not peak.is_host for peak in peaks) == 1


def test_model_is_refitted_at_once_after_an_out_of_memory_trial():
    recent, known = _Recent(), [Seen(params={}, rate=1.0)] * 1000
    assert fits(recent, known)
    assert fits(recent, [*known, Seen(params={}, is_out=True)])
    assert not fits(recent, [*known, Seen(params={}, is_out=True), Seen(params={}, is_running=True)])


def test_weighted_interactions_equal_the_products_over_all_pairs_of_knobs(monkeypatch):
    monkeypatch.setattr(coding_module, "TOGETHER_VARIANCE", 0.0)
    coding = Coding(SPACE)
    codes, weights = coding.all_codes(), {BATCH: 0.5, "precision.amp": 2.0}
    codes = np.vstack([codes, np.where(np.arange(3) == 2, -1, codes[:1])])
    tables = [knob.pair_columns()[codes[:, n]] * weights.get(knob.key, 1.0) for n, knob in enumerate(coding.knobs)]
    pairs = [(tables[n][:, :, None] * tables[m][:, None, :]).reshape(len(codes), -1) for n in range(3) for m in range(n)]
    features, explicit = coding.features(codes, weights), np.hstack(pairs)
    assert features.of_interactions(features) == pytest.approx(explicit @ explicit.T, abs=1e-12)
    assert np.diag(features.of_interactions(features)) == pytest.approx((explicit**2).sum(axis=1), abs=1e-12)
    assert features.squares.shape[1] < sum(table.shape[1] ** 2 for table in tables)
