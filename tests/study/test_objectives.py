"""Objectives and constraints in the real loop, and the time after which an expensive start pays off."""

import pytest

from autotune.compare.break_even import break_even
from autotune.compare.pareto import FRONT, front
from autotune.errors import BadInput
from autotune.export.formats import render
from autotune.harness.protocol import RankResult
from autotune.records import Kind, Outcome, Tier, TrialRecord
from autotune.study import resume_study
from autotune.trials.objective import ColdCompiles, Goal, fixed_s
from tests.study.conftest import MACHINE
from tests.support.fake_launcher import Failure, FakeLauncher, Surface
from tests.support.records import a_trial

GPU = {**MACHINE, "gpus": [{"name": "Fake GPU", "uuid": "GPU-1", "memory_bytes": 8 * 2**30, "has_energy_counter": True,
                            "has_power_reading": True}]}  # fmt: skip
MODES = "env.MODE=choice(fast,frugal,early)"
WATTS = {"fast": 400.0, "frugal": 120.0}
SLOW_START_S = 25.0


@pytest.fixture
def only_modes(tmp_path):
    file = tmp_path / "modes.yaml"
    file.write_text("loader.num_workers: [0]\n")
    return [f"search_space={file}", MODES]


def surface(**more):
    """Returns a program with three modes: fast but slow to start and power-hungry, frugal, and quick to start."""
    return Surface(
        gains={("env.MODE", "fast"): 2.0, ("env.MODE", "frugal"): 1.2, ("env.MODE", "early"): 1.5},
        extra_start_s={("env.MODE", "fast"): SLOW_START_S},
        power_w=lambda knobs: WATTS.get(knobs.get("env.MODE"), 300.0),
        loader_per_s=1e6,
        noise_frac=0.002,
        num_samples=1000,
        **more,
    )


@pytest.mark.parametrize(
    ("asked", "winner", "said"),
    [
        (["objective=throughput"], "fast", "faster: 2."),
        (["objective=time_for_samples", "study.samples=2000"], "early", "less time for 2,000 samples"),
        (["objective=time_for_samples", "study.samples=200000"], "fast", "less time for 200,000 samples"),
        (["objective=energy_per_sample"], "frugal", "better: 3."),
        (["objective=cost_per_epoch", "machine.price_per_hour=3.6"], "fast", "cheaper: 2."),
    ],
)
def test_each_objective_picks_its_own_winner(bench, only_modes, asked, winner, said):
    from autotune.wording import headline

    study = bench(surface(), *only_modes, *asked, machine=GPU, minutes=20)
    summary = study.run()
    assert summary["best"]["overrides"] == {"env.MODE": winner}
    assert summary["speedup"]["verdict"] == "faster"
    assert said in headline(summary)


def test_values_are_in_the_units_of_the_objective(bench, only_modes):
    asked = [
        "objective=[energy_per_sample,cost_per_epoch,time_for_samples]",
        "machine.price_per_hour=3.6",
        "study.samples=60000",
    ]
    summary = bench(surface(), *only_modes, *asked, machine=GPU, minutes=20).run()
    base = summary["baseline"]
    rate = base["value"]
    assert base["objectives"]["energy_per_sample"] == pytest.approx(300 / rate, rel=0.01)
    assert base["objectives"]["cost_per_epoch"] == pytest.approx(3.6 / 3600 * 1000 / rate, rel=0.01)
    assert base["objectives"]["time_for_samples"] == pytest.approx(4 + 60000 / rate, rel=0.01)
    assert summary["trials"][0]["score"] == pytest.approx(1 / summary["trials"][0]["objectives"]["energy_per_sample"])
    assert summary["terms"] == {"samples": 60000, "epoch_samples": 1000, "price_per_hour": 3.6}


def test_best_yaml_names_the_quantity_of_the_ratio(bench, only_modes):
    study = bench(surface(), *only_modes, "objective=energy_per_sample", machine=GPU, minutes=20, is_kept=True)
    study.run()
    text = study.folder.best_file.read_text()
    assert " x less energy per sample, 95 % interval " in text
    assert "J/sample at " in text


def test_several_objectives_give_a_pareto_front(bench, only_modes):
    study = bench(surface(), *only_modes, "objective=[throughput,energy_per_sample]", machine=GPU, minutes=20)
    summary = study.run()
    points = {point["overrides"].get("env.MODE"): point["objectives"] for point in summary["front"]}
    assert set(points) == {"fast", "frugal"}, "early and the baseline are worse at both"
    assert summary["best"]["overrides"] == {"env.MODE": "fast"}, "the first objective decides"
    assert summary["objective"] == ["throughput", "energy_per_sample"]
    assert points["frugal"]["energy_per_sample"] < points["fast"]["energy_per_sample"]
    assert [point["measured_in"] for point in summary["front"]] == ["finals", "finals"], "there was time to measure both again"
    again = [trial for trial in study.trials if trial.why == FRONT]
    assert [trial.changed["env.MODE"] for trial in again] == ["frugal"] * 3
    (frugal,) = [point for point in summary["front"] if point["overrides"] == {"env.MODE": "frugal"}]
    assert frugal["objectives_ci"]["energy_per_sample"]


@pytest.mark.thorough
def test_two_objectives_in_a_large_space_give_a_winner_and_a_front(bench):
    gains = {("precision.amp", "bf16"): 1.8, ("layout.channels_last", True): 1.3}
    power_w = {True: 600.0, False: 200.0}
    made = Surface(gains=gains, power_w=lambda knobs: power_w[bool(knobs.get("layout.channels_last"))])
    study = bench(made, "objective=[throughput,energy_per_sample]", machine=GPU, minutes=15)
    summary = study.run()
    assert summary["status"] == "complete"
    assert summary["best"]["overrides"]["layout.channels_last"] is True
    front_points = [point["overrides"] for point in summary["front"]]
    assert any(point.get("precision.amp") == "bf16" and not point.get("layout.channels_last") for point in front_points)


@pytest.mark.parametrize(
    ("constraint", "words"),
    [
        ("constraints.max_power_w=350", "constraints.max_power_w: 400 W, allowed 350 W"),
        ("constraints.max_step_p95_s=0.3", "constraints.max_step_p95_s: 0.500 s, allowed 0.3 s"),
        (
            "constraints.memory_free_frac=0.5",
            "constraints.memory_free_frac: leaves 36.0% of the memory free, wanted 50.0%",
        ),
    ],
)
def test_configuration_that_violates_a_constraint_cannot_win_and_states_why(bench, tmp_path, constraint, words):
    file = tmp_path / "batch.yaml"
    file.write_text("loader.batch_size: [32, 64, 640]\n")
    made = Surface(
        power_w=lambda knobs: 400.0 if knobs["loader.batch_size"] == 640 else 300.0,
        step_s=lambda knobs: 0.5 if knobs["loader.batch_size"] == 640 else 0.1,
        loader_per_s=1e6,
        half_batch=30.0,
    )
    # The memory model is off because it would not let the search violate the constraint.
    study = bench(made, f"search_space={file}", constraint, "search.memory_model=false", machine=GPU, minutes=10)
    summary = study.run()
    broken = [trial for trial in study.trials if trial.outcome is Outcome.infeasible]
    assert {trial.knobs["loader.batch_size"] for trial in broken} == {640}
    assert words in broken[0].reason
    assert broken[0].violations[constraint.partition("=")[0]] > 0
    assert broken[0].value, "what was measured is kept"
    assert summary["best"]["overrides"] == {"loader.batch_size": 64}
    assert all(trial.knobs["loader.batch_size"] != 640 for trial in study.trials if trial.kind is Kind.final)


@pytest.mark.parametrize("is_unsteady", [False, True])
def test_slower_configuration_wins_if_the_baseline_violates_a_constraint(bench, tmp_path, is_unsteady):
    file = tmp_path / "batch.yaml"
    file.write_text("loader.batch_size: [8, 32]\n")
    made = Surface(step_s=lambda knobs: 0.01 * knobs["loader.batch_size"], loader_per_s=1e6)
    made.failures = lambda number, knobs: Failure(is_unsteady=True) if is_unsteady and number == 0 else None
    study = bench(made, f"search_space={file}", "constraints.max_step_p95_s=0.2", minutes=10)
    summary = study.run()
    assert summary["best"]["overrides"] == {"loader.batch_size": 8}
    assert summary["speedup"]["ratio"] < 1
    assert summary["best_by_tier"]["training"]["overrides"] == {"loader.batch_size": 8}
    assert "batch_size: 8" in render(summary, "yaml", Tier.training).text
    assert "cannot be chosen: " in "\n".join(_lines(summary, study))


def test_verdict_says_if_no_configuration_satisfies_the_constraints(bench, tiny):
    made = Surface(step_s=lambda knobs: 1.0)
    summary = bench(made, *tiny, "constraints.max_step_p95_s=0.2").run()
    assert summary["best"]["overrides"] == {}
    assert "satisfies the constraints" in summary["speedup"]["reason"]


def _lines(summary, study):
    from autotune.cli.verdict import lines

    return lines(summary, study.folder.path)


def test_verdict_states_when_a_compilation_pays_off(bench, tmp_path):
    file = tmp_path / "compile.yaml"
    file.write_text("compile.mode: ['off', default]\n")
    made = Surface(gains={("compile.mode", "default"): 2.0}, loader_per_s=1e9, noise_frac=0.001, batches_per_step=4.03)
    study = bench(made, f"search_space={file}", minutes=20)
    summary = study.run()
    paying = summary["break_even"]
    assert paying["compile_s"] == 50.0, "cold, as in the search; the finals compiled from the study's cache"
    assert paying["dearer_s"] == pytest.approx(50.0, abs=0.5)
    # 4 + N/60 = 54 + N/120
    assert paying["samples"] == pytest.approx(6000, rel=0.03)
    assert paying["steps"] == pytest.approx(6000 / (4 * 32), rel=0.03)
    assert paying["seconds"] == pytest.approx(104, rel=0.03)
    assert any(line.startswith("note  compilation pays off after 4") for line in _lines(summary, study))


def test_cost_per_epoch_is_refused_after_the_baseline_if_the_epoch_is_unknown(bench, tiny):
    with pytest.raises(BadInput, match=r"study\.samples: objective=cost_per_epoch needs the length of an epoch"):
        bench(Surface(), *tiny, "objective=cost_per_epoch", "machine.price_per_hour=2").run()


def test_an_objective_in_samples_is_refused_for_a_program_whose_tokens_are_counted():
    with pytest.raises(BadInput, match=r"whose rate is in tokens/s, got time_for_samples.* which counts tokens"):
        Goal(names=("time_for_samples",), samples=1e6).check_baseline(a_trial(0, unit="tokens"))


def test_resumed_study_keeps_its_scores(bench, only_modes):
    study = bench(surface(), *only_modes, "objective=energy_per_sample", "study.budget.trials=1", machine=GPU, minutes=20)
    study.run()
    before = [(trial.number, trial.score) for trial in study.trials]
    study.inputs.config.study.budget.trials = 10
    study.inputs.launcher = FakeLauncher(study.surface, study.clock)
    study.inputs.device._launcher = study.inputs.launcher
    summary = resume_study(study.inputs, study.folder, study.listener)
    assert summary["best"]["overrides"] == {"env.MODE": "frugal"}
    assert [(trial.number, trial.score) for trial in study.trials][: len(before)] == before


# The arithmetic ----------------------------------------------------------------------------------------------------------


def trial(number, value=100.0, *, kind=Kind.search, phases_s=None, mode="off", **more):
    knobs = {"loader.batch_size": 10, "compile.mode": mode}
    return a_trial(number, kind=kind, knobs=knobs, value=value, phases_s=phases_s or {}, **more)


def test_break_even_is_where_both_take_equally_long():
    base = trial(0, 100.0, phases_s={"import": 4.0, "init": 1.0})
    own = trial(1, 200.0, phases_s={"import": 4.0, "init": 1.0, "compile": 30.0}, mode="default")
    found = break_even([base, own], [own], [base])
    assert found == {"samples": 6000.0, "steps": 600.0, "seconds": 65.0, "dearer_s": 30.0, "compile_s": 30.0}
    assert 5 + found["samples"] / 100 == 35 + found["samples"] / 200


def test_steps_of_a_break_even_use_the_samples_of_all_ranks():
    ranks = {"world_size": 2, "by_rank": [{"step_s": 0.1}, {"step_s": None}]}
    base = trial(0, 100.0, phases_s={"import": 5.0})
    own = trial(1, 200.0, phases_s={"import": 35.0}, ranks=ranks)
    found = break_even([base, own], [own], [base])
    assert (found["samples"], found["steps"]) == (6000.0, 300.0)  # a step of 0.1 s has 2 x 10 samples


@pytest.mark.parametrize(("knobs", "steps"), [({}, 150.0), ({"step.accumulation": 2}, 75.0)])
def test_steps_of_a_break_even_use_all_batches_that_the_program_accumulates(knobs, steps):
    base = trial(0, 100.0, phases_s={"import": 5.0})
    own = trial(1, 200.0, phases_s={"import": 35.0})
    own.knobs |= knobs
    found = break_even([base, own], [own], [base], batches_per_step=4.2)  # a loader that is one batch ahead
    assert (found["samples"], found["steps"]) == (6000.0, steps)


def test_there_is_no_break_even_if_the_start_is_slower_only_by_noise():
    base, own = trial(0, 100.0, phases_s={"import": 20.0}), trial(1, 150.0, phases_s={"import": 23.0})
    assert break_even([base, own], [own], [base]) is None


def test_slower_start_without_a_gain_never_pays_off():
    base, own = trial(0, 100.0, phases_s={"import": 4.0}), trial(1, 90.0, phases_s={"import": 34.0})
    assert break_even([base, own], [own], [base])["samples"] is None


def test_compilation_counts_with_its_time_without_a_cache():
    cold = trial(1, mode="default", phases_s={"compile": 40.0})
    cached = trial(2, mode="default", phases_s={"compile": 6.0})
    final = trial(3, mode="default", kind=Kind.final, phases_s={"import": 2.0, "compile": 5.0})
    assert ColdCompiles([cold, cached, final]).seconds(final.knobs) == 40.0
    assert fixed_s(final, 40.0) == 42.0
    assert ColdCompiles([cold]).seconds({"compile.mode": "off"}) == 0.0


def test_records_without_scores_fall_back_to_the_throughput():
    assert trial(1, 55.0).score == 55.0
    assert trial(1, None, scores={"throughput": 5.0}).score is None
    again = TrialRecord.from_json(trial(1, 55.0, scores={"energy_per_sample": 3.0, "throughput": 55.0}).as_json())
    assert again.score == 3.0


def test_energy_of_several_ranks_covers_all_devices():
    record = trial(1, 400.0, metrics={"gpu.power_w": 300.0})
    Goal(names=("energy_per_sample",)).judge(record, [object(), object()])
    assert record.objectives == {"energy_per_sample": 1.5}


@pytest.mark.parametrize(("kind", "limit", "is_kept"), [("cpu", None, False), ("cpu", 10**9, True), ("cuda", 10**9, True)])
def test_ranks_on_a_cpu_share_its_memory_unless_each_has_a_limit(kind, limit, is_kept):
    memory = {"kind": kind, "peak_bytes": 400_000_000, "peak_reserved_bytes": None, "capacity_bytes": limit}
    ranks = [RankResult(trial=1, nonce="", rank=rank, world_size=2, pid=1, status="measured") for rank in (0, 1)]
    for result in ranks:
        result.memory = memory
    record = trial(1, peak_memory_bytes=400_000_000)
    Goal(limits={"constraints.memory_free_frac": 0.3}, capacity_bytes=10**9).judge(record, ranks)
    assert (record.outcome is Outcome.ok) is is_kept


@pytest.mark.parametrize(("uuids", "is_kept"), [(("GPU-1", "GPU-1"), False), (("GPU-1", "GPU-2"), True)])
def test_ranks_on_one_gpu_share_its_memory(uuids, is_kept):
    ranks = [RankResult(trial=1, nonce="", rank=rank, world_size=2, pid=1, status="measured") for rank in (0, 1)]
    for result, uuid in zip(ranks, uuids, strict=True):
        result.memory = {"kind": "cuda", "peak_bytes": 300_000_000, "peak_reserved_bytes": 400_000_000, "capacity_bytes": 10**9}
        result.facts = {"device_uuids": [uuid]}
    record = trial(1, peak_memory_bytes=300_000_000)
    Goal(limits={"constraints.memory_free_frac": 0.3}, capacity_bytes=10**9).judge(record, ranks)
    assert (record.outcome is Outcome.ok) is is_kept


def test_racing_is_allowed_only_for_objectives_that_depend_on_the_rate_alone():
    assert Goal(names=("throughput",)).follows_rate
    assert Goal(names=("cost_per_epoch",)).follows_rate
    assert not Goal(names=("time_for_samples",)).follows_rate
    assert not Goal(names=("throughput", "energy_per_sample")).follows_rate


def test_study_ends_in_time_if_the_front_cannot_be_measured_again(bench, only_modes):
    study = bench(surface(), *only_modes, "objective=[throughput,energy_per_sample]", machine=GPU, minutes=4.5)
    summary = study.run()
    assert summary["status"] == "complete"
    assert study.clock.now_s - 1000 <= 4.5 * 60
    assert not [trial for trial in study.trials if trial.why == FRONT]
    assert [point["measured_in"] for point in summary["front"]] == ["finals", "search"]


def test_front_excludes_points_that_are_dominated_or_equal_within_noise():
    def scored(number, fast, frugal, outcome=Outcome.ok):
        record = trial(number, fast, scores={"throughput": fast, "energy_per_sample": frugal})
        record.outcome = outcome
        return record

    records = [scored(0, 100, 1.0), scored(1, 200, 0.8), scored(2, 150, 2.0), scored(3, 199, 0.801), scored(4, 140, 1.9),
               scored(5, 500, 9.0, Outcome.infeasible)]  # fmt: skip
    assert [record.number for record in front(records, ("throughput", "energy_per_sample"))] == [1, 2]
