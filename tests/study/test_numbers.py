import dataclasses
import itertools

import pytest

from autotune.harness.protocol import APPLIED, NOT_APPLICABLE, KnobReport, RankResult, Window
from autotune.ranks import joined, rate_per_s
from autotune.records import TrialRecord
from autotune.trials.trial_metrics import interval, knob_reports, losses, metrics, numbers, why_no_interval
from tests.support.records import a_trial

BLOCKS = (98.0, 102.0, 99.0, 101.0, 100.0) * 8


def rank(number=0, rate=100.0, blocks=BLOCKS, **more):
    window = Window(steps=50, seconds=5.0, samples=500.0, rate_per_s=100.0, block_rates_per_s=list(blocks),
                    half_width_frac=0.02, is_steady=True, reason="")  # fmt: skip
    return RankResult(trial=0, nonce="n", rank=number, world_size=2, pid=1, status="measured", unit="samples",
                      throughput_per_s=rate, window=window, **more)  # fmt: skip


def test_rate_of_a_trial_is_all_samples_divided_by_the_time_of_the_slowest_rank():
    assert rate_per_s([rank(0, 100.0), rank(1, 80.0)]) == pytest.approx(160.0)


def test_samples_count_once_if_the_loader_of_rank_0_feeds_all_ranks():
    others = {"unit_source": "forward calls", "device_rate_per_s": 9.0}
    results = [rank(0, unit_source="loader", device_rate_per_s=300.0), rank(1, **others)]
    assert rate_per_s(results) == pytest.approx(100.0)
    assert numbers(results)["device_rate"] == 300.0
    results[1].unit_source = "loader"
    assert rate_per_s(results) == pytest.approx(200.0)


def test_trial_has_no_rate_if_one_rank_has_none():
    assert rate_per_s([rank(0, 100.0), rank(1, None)]) is None


def test_rank_without_a_window_is_measured_over_the_steps_of_rank_0():
    steps = {"end_s": [1.0, 2.0, *(2.0 + 0.1 * n for n in range(1, 60))], "samples": [10.0] * 61, "warmup": 2}
    first, second = rank(0, steps=steps), rank(1, None, steps={**steps, "warmup": 61})
    second.window = None
    assert rate_per_s([first, second]) == pytest.approx(200.0)
    assert interval([first, second]) is not None
    second.steps["end_s"] = steps["end_s"][:40]
    assert rate_per_s([first, second]) is None


def test_waiting_for_an_evaluation_of_rank_0_does_not_make_a_rank_slow():
    durations = [3.1 if number == 30 else 0.1 for number in range(80)]  # all ranks wait for an evaluation of 3 s
    steps = {"end_s": list(itertools.accumulate(durations)), "samples": [10.0] * 80, "warmup": 2}
    first, second = rank(0, steps=steps), rank(1, 62.5, (100.0,) * 39 + (4.0,), steps=steps)
    second.window = dataclasses.replace(second.window, seconds=8.0, rate_per_s=62.5)  # that of rank 0 leaves it out
    assert rate_per_s([first, second]) == pytest.approx(200.0)
    low, high = interval([first])
    assert interval([first, second]) == (pytest.approx(2 * low), pytest.approx(2 * high))
    assert metrics([first, second], {})["rank1.step_s"] == pytest.approx(0.1)
    first.device_rate_per_s, second.device_rate_per_s = 120.0, 70.0
    assert numbers([first, second])["device_rate"] == pytest.approx(240.0)
    second.window = None
    assert rate_per_s([first, second]) == pytest.approx(200.0)


def test_straggler_is_the_rank_with_the_longest_step_time_excluding_waiting():
    told = {"num_steps": 7, "gradient_bytes": 4_000_000, "bandwidth_bytes_per_s": 1e9}
    found = joined([
        rank(0, communication={**told, "exposed_s": 0.03}, memory={"peak_bytes": 5}),
        rank(1, communication={**told, "exposed_s": 0.01, "bandwidth_bytes_per_s": 0.8e9}, memory={"peak_bytes": 9}),
    ])  # fmt: skip
    assert (found["world_size"], found["stragglers"], found["skew_frac"]) == (2, [1], pytest.approx(0.2))
    assert [entry["own_s"] for entry in found["by_rank"]] == pytest.approx([0.07, 0.09])
    assert [entry["peak_memory_bytes"] for entry in found["by_rank"]] == [5, 9]
    assert found["communication"]["exposed_s"] == 0.01
    assert found["communication"]["exposed_frac"] == pytest.approx(0.1)
    assert found["communication"]["bound_s"] == pytest.approx(0.005)
    assert joined([rank(0)]) == {}


def test_rank_that_waits_long_itself_is_not_a_straggler():
    told = {"num_steps": 7, "gradient_bytes": 4_000_000}
    found = joined([rank(0, communication={**told, "exposed_s": 0.045}), rank(1, communication={**told, "exposed_s": 0.037})])
    assert found["skew_frac"] == pytest.approx(0.08)
    assert found["stragglers"] == []


def test_communication_and_stragglers_are_unknown_without_ddp():
    found = joined([rank(0), rank(1)])
    assert (found["communication"], found["skew_frac"], found["stragglers"]) == (None, None, [])
    assert metrics([rank(0), rank(1)], {})["rank1.step_s"] == pytest.approx(0.1)


def test_half_widths_of_ranks_add_up_because_ranks_wait_for_each_other():
    low, high = interval([rank()])
    assert interval([rank(0), rank(1)]) == (pytest.approx(2 * low), pytest.approx(2 * high))


def test_interval_is_scaled_to_a_rate_that_the_loader_limits():
    low, high = interval([rank(rate=50.0)])
    assert (low + high) / 2 == pytest.approx(50.0)
    assert (high - low) / 50.0 == pytest.approx((interval([rank()])[1] - interval([rank()])[0]) / 100.0)


def test_too_few_blocks_give_no_interval():
    few = [rank(), rank(blocks=(99.0, 100.0, 101.0, 100.0))]
    assert interval(few) is None
    assert why_no_interval(few) == "4 blocks of steps, 32 are needed"
    assert why_no_interval([rank()]) == ""


def test_memory_is_the_maximum_over_ranks_and_rates_are_sums():
    found = numbers([rank(0, memory={"peak_bytes": 5}, device_rate_per_s=10.0, loader_rate_per_s=7.0),
                     rank(1, memory={"peak_bytes": 9}, device_rate_per_s=12.0)])  # fmt: skip
    assert (found["peak_memory_bytes"], found["device_rate"], found["loader_rate"]) == (9, 22.0, None)


def test_knob_report_is_that_of_the_worst_rank():
    bad = KnobReport(status=NOT_APPLICABLE, reason="no loader here")
    reports = knob_reports([rank(0, knobs={"a.b": KnobReport(status=APPLIED)}), rank(1, knobs={"a.b": bad})])
    assert reports == {"a.b": {"status": NOT_APPLICABLE, "reason": "no loader here", "observed": None}}


def test_loader_knobs_of_ranks_that_fetch_nothing_are_not_reported():
    bad = {key: KnobReport(status=NOT_APPLICABLE, reason="no loader here") for key in ("loader.num_workers", "a.b")}
    good = {key: KnobReport(status=APPLIED) for key in bad}
    results = [rank(0, knobs=good, unit_source="loader"), rank(1, knobs=bad, unit_source="forward calls")]
    told = {key: report["status"] for key, report in knob_reports(results).items()}
    assert told == {"loader.num_workers": APPLIED, "a.b": NOT_APPLICABLE}
    results[1].unit_source = "loader"
    assert knob_reports(results)["loader.num_workers"]["status"] == NOT_APPLICABLE


def test_step_times_exclude_warm_up():
    ends = [0.0, 5.0, 10.0, 10.1, 10.2, 10.3]
    found = metrics([rank(steps={"end_s": ends, "warmup": 3}, compiled={"graphs": 2, "seconds": 7.5})], {"gpu.power_w": 9.0})
    assert found["step_p50_s"] == pytest.approx(0.1)
    assert (found["compiled_graphs"], found["compile_s"], found["gpu.power_w"]) == (2.0, 7.5, 9.0)


@pytest.mark.parametrize(
    ("uuids", "joules"),
    [([["GPU-1"], ["GPU-2"]], 2.0), ([["GPU-1"], ["GPU-1"]], 1.0), ([[], []], 2.0), ([["GPU-1", "GPU-2"]], 4.0)],
)
def test_energy_sums_over_gpus_and_is_shared_by_ranks_on_one_gpu(uuids, joules):
    ranks = [rank(number, facts={"device_uuids": used}) for number, used in enumerate(uuids)]
    found = metrics(ranks, {"gpu.energy_j": 800.0, "gpu.energy_s": 4.0})
    assert found["gpu.energy_per_sample_j"] == pytest.approx(joules)


def test_trial_without_results_has_no_numbers():
    assert numbers([]) == {}
    assert metrics([], {"power_w": 1.0}) == {"power_w": 1.0}


@pytest.mark.parametrize("loss", [None, {}, {"curve": None}, {"curve": []}])
def test_rank_without_losses_gives_an_empty_curve(loss):
    assert losses([rank(0, loss=loss)]) == []


def test_a_loss_too_large_for_a_record_counts_as_the_largest_that_fits():
    found = losses([rank(0, loss={"curve": [2.0, 3e37, -3e37, None]}), rank(1, loss={"curve": [4.0, 1e38, -1.0, 1.0]})])
    assert found == [3.0, 1e30, -1e30, None]
    assert TrialRecord.from_json(a_trial(losses=found).as_json()).losses == found
