"""Whole studies on tables whose true rates are given by a formula."""

import itertools
import statistics

import optuna
import pytest

from autotune.errors import BadInput
from autotune.records import Outcome
from autotune.replay.rivals import EXHAUSTED, Rival, Sampled
from autotune.replay.space import grid_of
from autotune.replay.strategies import STRATEGIES, Strategy, strategy
from autotune.replay.study import Limits, replay
from autotune.replay.table import key_of
from tests.replay.tables import BEST, DOMAINS, OK_S, REFERENCE, make_table, rate_of

TABLE = make_table()
GRID = grid_of(TABLE)
QUICK = [name for name in STRATEGIES if name != "gp"]  # gp imports torch, which is slow


class Oracle(Rival):
    """A fake search that knows the best configuration and proposes it."""

    def proposals(self):
        yield self.space.active({**self.space.reference, **BEST}), None


def run(chosen, *, seed=0, trials=6, table=TABLE):
    found = strategy(chosen) if isinstance(chosen, str) else chosen
    return replay(table, grid_of(table), found, seed=seed, limits=Limits(trials=trials))


def test_search_that_proposes_the_optimum_scores_one_from_its_first_trial():
    found = run(Strategy(name="oracle", search=Oracle))
    base = rate_of(REFERENCE) / rate_of({**REFERENCE, **BEST})
    assert [step.trials for step in found.steps] == [0, 1]
    assert found.steps[0].fraction == pytest.approx(base)
    assert found.steps[1].fraction == 1.0
    assert found.final_fraction > 0.97, "the attribution may revert the change that gains least"
    assert [step.seconds for step in found.steps] == [OK_S, 2 * OK_S]
    assert found.total_s > 10 * OK_S, "finals and attribution take time, too"
    assert found.claim.ratio == pytest.approx(found.final_fraction / base)


@pytest.mark.parametrize("name", QUICK)
def test_every_strategy_makes_the_given_trials_and_never_gets_worse(name):
    found = run(name)
    fractions = [step.fraction for step in found.steps]
    assert [step.trials for step in found.steps] == list(range(7))
    assert fractions == sorted(fractions), "without noise the best so far only grows"
    assert found.steps[-1].seconds < found.total_s
    assert found.final_fraction >= fractions[-1] - 0.02


def test_the_same_seed_gives_the_same_study():
    one, two = (run("study-tpe", seed=3, table=make_table(noise_frac=0.02)) for _ in range(2))
    assert one.steps == two.steps
    assert (one.final_fraction, one.total_s, one.claim) == (two.final_fraction, two.total_s, two.claim)


@pytest.mark.thorough
def test_random_search_matches_the_expected_best_of_random_draws():
    seeds, trials = 16, 4
    found = [run(Strategy(name="r", keys={"parity.steps": 0}, search=STRATEGIES["random"].search), seed=s, trials=trials)
             for s in range(seeds)]  # fmt: skip
    rates = sorted(truth(key) for key in GRID.keys if key)
    base, top = truth(key_of({})), max(rates)
    drawn = [max(base, *four) / top for four in itertools.combinations(rates, trials)]
    expected, spread = statistics.mean(drawn), statistics.pstdev(drawn)
    assert statistics.mean(one.steps[-1].fraction for one in found) == pytest.approx(expected, abs=4 * spread / seeds**0.5)


def truth(key):
    knobs = {**REFERENCE, **{name: value for name, (_, value) in key}}
    is_oom = knobs["loader.batch_size"] == 128 and knobs["precision.amp"] == "off"
    return 0.0 if is_oom else rate_of(knobs)


def test_grid_proposes_configurations_in_the_order_of_the_domains():
    found = run("grid", trials=4)
    order = [dict(zip(DOMAINS, point, strict=True)) for point in itertools.product(*DOMAINS.values())][:4]
    best = list(itertools.accumulate([rate_of(REFERENCE), *map(rate_of, order)], max))
    assert [step.fraction for step in found.steps] == pytest.approx([rate / rate_of(BEST) for rate in best])


def test_expert_sets_all_other_knobs_first_and_then_raises_the_batch():
    found = run("expert", trials=2)
    assert [step.outcome for step in found.steps] == [Outcome.ok] * 3
    assert found.steps[1].fraction == pytest.approx(rate_of({**BEST, "loader.batch_size": 32}) / rate_of(BEST))
    assert found.steps[2].fraction == 1.0


def test_trials_out_of_memory_count_as_steps_and_the_search_ends_with_the_table():
    found = run("grid", trials=35)
    assert sum(step.outcome is Outcome.host_oom for step in found.steps) == 6
    assert found.steps[-1].fraction == 1.0
    assert "used up" in run("random", trials=99).reason


def test_table_that_was_recorded_under_a_constraint_is_replayed_under_it():
    """Raw steps are not recorded, so the constraint could not be checked, and no study began."""
    table = make_table(has_oom=False)
    table.settings = {"constraints.max_step_p95_s": 2.0}
    for one in table.measurements:
        batch = {**REFERENCE, **one.changed}["loader.batch_size"]
        one.metrics = {"step_p95_s": batch / one.value}
        one.outcome = Outcome.infeasible if batch > 2 * one.value else Outcome.ok
    found = run("random:measure.racing=false", trials=99, table=table)
    wanted = sum(group[0].outcome is Outcome.infeasible for group in table.by_configuration().values())
    assert sum(step.outcome is Outcome.infeasible for step in found.steps) == wanted > 0
    assert found.steps[-1].fraction == 1.0


def test_strategy_accepts_configuration_keys_and_refuses_wrong_ones():
    assert strategy("default:search.sampler=random").keys == {"search.sampler": "random"}
    assert strategy("default:measure.racing=false:parity.steps=0").keys == {"measure.racing": False, "parity.steps": 0}
    for text, problem in [
        ("nosuch", "no such strategy, got 'nosuch'"),
        ("tpe:search.sampler", "no value, got 'search.sampler'"),
        ("tpe:search.nosuch=1", "search.nosuch: there is no such key"),
        ("default:parity.steps=many", "parity.steps: wrong type"),
        ("default:launch.slots=0", "launch.slots must be at least 1"),
        ("default:launch.slots=auto", "launch.slots must be at least 1"),
        ("expert:launch.slots=4", "only autotune's own search can use it, got 'expert:launch.slots=4'"),
    ]:
        with pytest.raises(BadInput, match=problem):
            strategy(text)


@pytest.mark.thorough
def test_parallel_search_makes_as_many_trials_in_less_time():
    alone, parallel = run("default", trials=15), run("default:launch.slots=4", trials=15)
    assert run("default:launch.slots=1", trials=15).steps == alone.steps
    assert len(parallel.steps) == len(alone.steps) == 16
    assert parallel.steps[-1].seconds <= 0.7 * alone.steps[-1].seconds
    assert parallel.steps[-1].fraction >= 0.97


@pytest.mark.thorough
def test_speedup_claims_on_a_noisy_table_hold_and_overstate_little():
    found = [run("random", seed=seed, trials=12, table=make_table(noise_frac=0.02, seed=seed)) for seed in range(6)]
    claims = [one.claim for one in found if one.claim]
    assert len(claims) == 6
    assert sum(claim.is_verified is True for claim in claims) >= 5
    assert abs(statistics.median(claim.overstated_frac for claim in claims)) < 0.04


@pytest.mark.thorough
def test_path_continues_after_the_search_with_the_states_of_choosing_and_attribution():
    found = [run("random", seed=seed, trials=20, table=make_table(noise_frac=0.1, seed=seed)) for seed in range(30)]
    chosen = [one for one in found if one.choice]
    assert len(chosen) >= 15, "most studies have several finalists"
    for one in chosen:
        assert one.path == [*one.steps, one.choice, *([one.apart] if one.apart else [])]
        assert one.choice.trials >= len(one.steps) - 1 + 2, "at least two finalists"
        assert one.steps[-1].seconds < one.choice.seconds < one.total_s
        assert one.choice.fraction > one.steps[0].fraction, "it was among the best few"
    apart = [one for one in chosen if one.apart]
    assert len(apart) >= 15, "most studies have an attribution"
    for one in apart:
        assert one.apart.trials > one.choice.trials, "an attribution takes at least one trial"
        assert one.choice.seconds < one.apart.seconds < one.total_s
    assert any(one.apart.fraction != one.choice.fraction for one in apart), "some attributions drop a change"
    assert any(one.apart.fraction == one.choice.fraction for one in apart), "without a dropped change, the fraction stays"


class Insisting(optuna.samplers.RandomSampler):
    """A sampler that always suggests the same configuration."""

    def sample_independent(self, study, trial, name, distribution):
        return distribution.to_external_repr(0.0)


def test_repeated_proposals_become_random_draws_until_the_table_is_used_up():
    insisting = Strategy(name="insisting", search=lambda session: Sampled(session, lambda _: Insisting(), patience=3))
    found = run(insisting, trials=99)
    assert found.reason == EXHAUSTED
    assert len(found.steps) == len(GRID.keys)
    waiting = Strategy(name="waiting", search=lambda session: Sampled(session, lambda _: Insisting()))
    assert len(run(waiting, trials=99).steps) == 2


@pytest.mark.thorough
def test_gaussian_process_reaches_half_of_the_optimum():
    assert run("gp", trials=12).steps[-1].fraction > 0.5
