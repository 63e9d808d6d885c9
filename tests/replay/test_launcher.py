from pathlib import Path

import pytest

from autotune.clock import VirtualClock
from autotune.harness.protocol import MeasureRules, Spec
from autotune.launchers.base import Deadlines, Launch
from autotune.replay.launcher import ReplayLauncher
from autotune.replay.world import World
from tests.replay.tables import BEST, OK_S, OOM_S, WINDOW_S, make_table, rate_of

SLOW = {"loader.batch_size": 8}


@pytest.fixture
def launched():
    """Returns a function that launches a configuration and returns how the trial ended."""
    table, clock = make_table(), VirtualClock(start_s=0.0)
    launcher = ReplayLauncher(table, World(table, table.by_configuration().keys(), seed=0), clock)

    def launch(knobs, *, total_s=900.0, **spec):
        before_s = clock.now_s
        asked = Spec(trial=3, nonce="n", folder="/", knobs=knobs, rules=MeasureRules(), **spec)
        how = Launch(argv=["x"], cwd="/", folder=Path("/"), spec=asked, deadlines=Deadlines(total_s=total_s))
        ended = launcher.start(how).poll()
        assert ended.seconds == pytest.approx(clock.now_s - before_s)
        return ended

    return launch


def test_trial_gets_a_recorded_result_and_takes_the_recorded_seconds(launched):
    ended = launched(BEST)
    (result,) = ended.results
    assert ended.seconds == OK_S
    assert (result.trial, result.nonce) == (3, "n")
    assert result.throughput_per_s == pytest.approx(rate_of(BEST))
    assert result.facts["torch"] == "2.14.1", "the facts are those of the baseline"


def test_recorded_out_of_memory_error_is_replayed(launched):
    ended = launched({"loader.batch_size": 128})
    assert ended.seconds == OOM_S
    assert ended.results[0].error["type"] == "MemoryError"


def test_knob_with_the_baseline_value_gives_the_baseline_rate(launched):
    assert launched({"loader.num_workers": 0}).results[0].throughput_per_s == pytest.approx(rate_of({**BEST, **BASE}))


BASE = {"loader.batch_size": 32, "loader.num_workers": 0, "precision.amp": "off", "layout.channels_last": False}


def test_raced_trial_ends_early_and_saves_the_rest_of_its_window(launched):
    ended = launched(SLOW, race_below_per_s=2 * rate_of({**BASE, **SLOW}))
    window = ended.results[0].window
    assert window.is_raced
    assert len(window.block_rates_per_s) == len(window.block_s) >= 5
    assert MeasureRules().race_min_s <= window.seconds < WINDOW_S
    assert ended.seconds == pytest.approx(OK_S - WINDOW_S + window.seconds)
    assert ended.results[0].throughput_per_s == pytest.approx(rate_of({**BASE, **SLOW}), rel=0.01)


def test_trial_above_the_race_threshold_is_not_raced(launched):
    ended = launched(SLOW, race_below_per_s=0.8 * rate_of({**BASE, **SLOW}))
    assert not ended.results[0].window.is_raced
    assert ended.seconds == OK_S


def test_parity_trial_has_the_recorded_losses_and_costs_its_start_and_steps(launched):
    ended = launched(BEST, mode="parity", seed=0, max_steps=20, max_s=20.0)
    assert ended.results[0].loss["curve"] == [1.0, 0.8, 0.5]
    assert ended.seconds == pytest.approx(5.1 + 20 * WINDOW_S / 40)


def test_trial_ends_at_its_time_limit(launched):
    ended = launched(BEST, total_s=4.0)
    assert (ended.cause, ended.results, ended.seconds) == ("deadline", [], 4.0)


def test_unrecorded_configuration_fails_without_costing_time(launched):
    ended = launched({"loader.batch_size": 7})
    assert (ended.cause, ended.exit_code, ended.seconds) == ("exit", 1, 0.0)


def test_derived_accumulation_in_the_command_is_not_part_of_the_configuration(launched):
    larger = {"loader.batch_size": 128, "precision.amp": "bf16"}
    ended = launched({}, passed={**larger, "step.accumulation": 2}, global_batch=256)
    assert ended.results[0].throughput_per_s == pytest.approx(rate_of({**BASE, **larger}))
