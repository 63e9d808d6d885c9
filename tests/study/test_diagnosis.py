import pytest

from autotune.study.diagnosis import diagnose, free_loader_gain_frac
from tests.support.records import a_trial


def trial(**more):
    fields = {"value": 100.0, "device_rate": 150.0, "loader_rate": 110.0, "data_wait_frac": 0.33, **more}
    return a_trial(3, **fields)


def test_gain_of_an_infinitely_fast_loader_is_device_rate_over_throughput():
    assert free_loader_gain_frac(trial()) == pytest.approx(0.5)
    assert free_loader_gain_frac(trial(device_rate=90.0)) == 0.0
    assert free_loader_gain_frac(trial(device_rate=None)) is None


@pytest.mark.parametrize(("wait", "finding"), [(0.33, "input-bound"), (0.1, "partly input-bound"), (0.01, "device-bound")])
def test_bottleneck_is_derived_from_the_time_spent_waiting_for_data(wait, finding):
    (found,) = diagnose(trial(data_wait_frac=wait))
    assert found["finding"] == finding
    assert "at most +50 %" in found["advice"]
    assert "loader 110" in found["evidence"]


def test_waiting_for_input_while_the_gpu_computes_is_device_bound():
    (found,) = diagnose(trial(data_wait_frac=0.6, device_rate=101.0), device="cuda")
    assert found["finding"] == "device-bound"
    assert found["advice"] == "The step waits for its input, yet an infinitely fast loader would give at most +1 %."


def test_gpu_that_runs_kernels_only_part_of_the_time_is_host_bound():
    def of(busy_frac, device="cuda", wait_frac=0.01):
        metrics = {} if busy_frac is None else {"gpu.utilisation_frac": busy_frac}
        return diagnose(trial(data_wait_frac=wait_frac, device_rate=104.0, metrics=metrics), device=device)[0]

    assert of(0.31)["finding"] == "host-bound"
    assert of(0.31)["evidence"].endswith("waits for input 1 % of a step's time, a kernel runs on the GPU 31 % of the time")
    assert [of(busy_frac)["finding"] for busy_frac in (0.95, None)] == ["device-bound", "device-bound"]
    assert of(0.31, device="cpu")["finding"] == "device-bound"
    assert of(0.31, wait_frac=0.3)["finding"] == "input-bound"


def test_missing_measurements_give_no_diagnosis():
    assert diagnose(trial(device_rate=None)) == []
    assert diagnose(trial(data_wait_frac=None)) == []


def test_waiting_is_inconclusive_if_workers_and_step_share_the_cores():
    (found,) = diagnose(shared(num_workers=2), device="cpu")
    assert found["finding"] == "shared cores"
    assert diagnose(shared(num_workers=0), device="cpu")[0]["finding"] == "input-bound"
    assert diagnose(shared(num_workers=2), device="cuda")[0]["finding"] == "input-bound"


def test_measured_regime_overrides_the_regime_suggested_by_num_workers():
    record = shared(num_workers=2)
    record.regime = "separate"
    assert diagnose(record, device="cpu")[0]["finding"] == "input-bound"
    record.regime, record.device_rate = "shared", None
    (found,) = diagnose(record, device="cuda")
    assert (found["finding"], "device alone" in found["evidence"]) == ("shared cores", False)
    assert "at most" not in found["advice"]


def shared(*, num_workers):
    record = trial()
    record.knobs = {"loader.num_workers": num_workers}
    return record


def two_ranks(exposed_frac, stragglers=()):
    """Returns `TrialRecord.ranks` of a trial with two ranks."""
    by_rank = [{"rank": rank, "step_s": 1.0} for rank in range(2)]
    communication = {"exposed_s": exposed_frac, "exposed_frac": exposed_frac, "bound_s": None}
    return {"communication": communication, "stragglers": list(stragglers), "skew_frac": 0.1, "by_rank": by_rank}


def test_first_diagnosis_is_not_contradicted_by_the_others():
    names = [found["finding"] for found in diagnose(trial(data_wait_frac=0.01, device_rate=104.0, ranks=two_ranks(0.37, [1])))]
    assert names == ["communication-bound", "ranks out of step"]
    names = [found["finding"] for found in diagnose(trial(data_wait_frac=0.06, device_rate=101.0, ranks=two_ranks(0.37)))]
    assert names == ["communication-bound"], "a gain of at most +1 % is not a bottleneck"


def test_advice_about_a_straggler_names_its_gpu_only_if_there_is_one():
    record = trial(data_wait_frac=0.01, ranks=two_ranks(0.0, [1]))
    assert ["GPU" in diagnose(record, device=device)[0]["advice"] for device in ("cpu", "cuda")] == [False, True]
