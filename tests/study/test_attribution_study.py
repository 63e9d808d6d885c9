"""Attribution in the real study loop, on a program with known effects: one knob +30 %, one +5 %, three none."""

import shutil

import pytest

from autotune.compare.noise import BUSY_GPU_NOISE
from autotune.config.claim import read_claim
from autotune.export.formats import render
from autotune.records import Kind, Tier
from autotune.report.changes import missing_text
from autotune.study import resume_study
from tests.support.fake_launcher import OUT_OF_MEMORY, Failure, Surface
from tests.support.rows import more

GAINS = {"A": 1.30, "B": 1.05, "C": 1.0, "D": 1.0, "E": 1.0}
ALL = {f"env.{name}": "1" for name in GAINS}


def surface(noise_frac, **more):
    gains = {(f"env.{name}", "1"): gain for name, gain in GAINS.items()}
    return Surface(gains=gains, loader_per_s=1e9, noise_frac=noise_frac, start_s=2.0, window_s=3.0, **more)


class OnlyEverything:
    """A search that tries one configuration, with every knob changed. Noise can lead a real search to such a configuration."""

    wanted = ALL

    def __init__(self, session):
        self._session = session

    def run(self):
        space = self._session.resolved
        if len(self._session.searched) == 1:
            self._session.measure(space.active({**space.reference, **self.wanted}), "everything", origin="expert")
        return "found"


@pytest.fixture
def planted(bench, tmp_path, monkeypatch):
    (tmp_path / "planted.yaml").write_text("".join(f"env.{name}: ['0', '1']\n" for name in GAINS))

    """Returns a function that makes a study of the program. With `is_found`, the search is `OnlyEverything`."""

    def made(noise_frac, *overrides, is_found=True, failures=lambda _, __: None, **more):
        if is_found:
            monkeypatch.setattr("autotune.study.loop.Search", OnlyEverything)
        for name in GAINS:
            monkeypatch.setenv(name, "0")
        return bench(surface(noise_frac, failures=failures), f"search_space={tmp_path / 'planted.yaml'}", *overrides, **more)

    return made


def holds_truth(entry):
    return entry["ci"] and entry["ci"][0] <= GAINS[entry["knob"].removeprefix("env.")] <= entry["ci"][1]


def is_right(summary):
    named = [(entry["knob"], entry["verdict"]) for entry in summary["attribution"]]
    return (
        named == [("env.A", "faster"), ("env.B", "faster")]
        and all(map(holds_truth, summary["attribution"]))
        and summary["best"]["overrides"] == {"env.A": "1", "env.B": "1"}
    )


@pytest.mark.thorough
@pytest.mark.parametrize("noise_frac", [0.01, 0.02])
def test_nearly_all_studies_find_the_planted_effects_and_revert_the_rest(planted, noise_frac):
    summaries = [planted(noise_frac, seed=seed, minutes=12).run() for seed in range(40)]
    wrong = [[summary["attribution"], summary["best"]["overrides"]] for summary in summaries if not is_right(summary)]
    assert len(wrong) <= 7, wrong  # 8 of 100 with 2 % noise: intervals of 95 % hold for both effects in 90 of 100 studies


def attributed(study):
    return [trial for trial in study.trials if trial.kind is Kind.attribution]


def test_reporting_rounds_come_last_and_measure_the_exported_configuration(planted):
    study = planted(0.005, minutes=12, is_kept=True)
    summary = study.run()
    finals = [trial for trial in study.trials if trial.kind is Kind.final]
    best = summary["best"]["trial"]
    assert {trial.repeats for trial in finals} == {0, best}
    assert min(trial.number for trial in finals) > max(trial.number for trial in attributed(study))
    assert summary["best"]["overrides"] == {"env.A": "1", "env.B": "1"}
    assert summary["speedup"]["ratio"] == pytest.approx(1.365, rel=0.02)
    assert [entry["knob"] for entry in summary["minimality"]["dropped"]] != []
    assert "env.C" in study.folder.best_file.read_text()


def test_every_attribution_round_measures_the_winner_and_its_parts(planted):
    study = planted(0.01, minutes=8)
    study.run()
    rounds = {}
    for trial in attributed(study):
        rounds.setdefault(trial.round, []).append(trial.changed)
        assert trial.origin == "attribution 1"
    assert len(rounds) >= 3
    assert all(ALL in round_ and len(round_) > 1 for round_ in rounds.values())
    assert len(rounds[1]) == 6
    assert study.listener.named("attribution_started") == [(1, list(ALL))]


@pytest.mark.parametrize(("noise_frac", "minutes"), [(0.01, 1.2), (0.03, 1.6)])
def test_trials_of_one_round_are_measured_next_to_each_other_with_the_winner(planted, noise_frac, minutes):
    """Single trials, which make an effect more precise or leave out several changes, shared the number of a round."""
    study = planted(noise_frac, minutes=minutes)
    study.run()
    rounds = {}
    for trial in attributed(study):
        rounds.setdefault(trial.round, []).append(trial)
    assert any(len(measured) == 1 for measured in rounds.values())
    for measured in rounds.values():
        keys = [frozenset(trial.changed.items()) for trial in measured]
        assert len(set(keys)) == len(keys) == measured[-1].number - measured[0].number + 1
        assert len(keys) == 1 or frozenset(ALL.items()) in keys


def test_study_with_an_attribution_ends_in_time(bench):
    gains = {("precision.amp", "bf16"): 1.8, ("layout.channels_last", True): 1.3}
    study = bench(Surface(gains=gains, start_s=4.0, window_s=5.0), "compile.mode=off", minutes=8)
    summary = study.run()
    assert summary["seconds"]["total"] <= 8 * 60
    assert {"precision.amp", "layout.channels_last"} <= {e["knob"] for e in summary["attribution"] if e["verdict"] == "faster"}


def test_with_little_time_each_change_is_reverted_once_and_its_effect_estimated(planted):
    study = planted(0.01, minutes=1.2)
    summary = study.run()
    alone = [trial for trial in attributed(study) if len(trial.changed) == len(ALL) - 1]
    assert len({tuple(trial.changed) for trial in alone}) == 5
    assert len(attributed(study)) <= 6  # the sixth leaves out all knobs without effect
    assert {entry["basis"] for entry in summary["attribution"]} == {"estimated"}
    assert all(map(holds_truth, summary["attribution"]))
    assert summary["speedup"]["verdict"] == "faster"


RESNET_LIKE = {
    ("precision.amp", "bf16"): 1.9, ("layout.channels_last", True): 1.25, ("optimizer.implementation", "fused"): 1.03,
    ("compile.mode", "default"): 0.95,
}  # fmt: skip


@pytest.mark.parametrize("seed", [0, *more(1, 2, 3)])
def test_three_minutes_are_enough_for_a_verdict_and_the_effects_of_all_changes(bench, tmp_path, seed):
    space = tmp_path / "space.yaml"
    space.write_text(
        "loader.batch_size: [16, 32, 64, 128]\nprecision.amp: ['off', bf16]\nlayout.channels_last: [false, true]\n"
        "optimizer.implementation: [default, fused]\ncompile.mode: ['off', default]\nloader.num_workers: [0, 1, 2]\n"
    )
    slow = Surface(
        gains=RESNET_LIKE, base_per_s=21, loader_per_s=420, half_batch=0.5, noise_frac=0.02, start_s=5.0, window_s=12.0,
        losses=lambda *_: [1.0 - 0.01 * step for step in range(14)],
    )  # fmt: skip
    summary = bench(slow, f"search_space={space}", "search.sampler=rates", minutes=3, seed=seed).run()
    assert summary["speedup"]["verdict"] == "faster"
    assert summary["speedup"]["num_rounds"] >= 3
    small = [entry["knob"] for entry in summary["attribution"] if not entry["ci"]]
    assert not small or sorted(small) == sorted(summary["effects_together"]["knobs"])
    named = {entry["knob"] for entry in summary["attribution"] if entry["verdict"] == "faster"}
    assert named >= {"precision.amp", "layout.channels_last"}
    assert "loader.batch_size" not in summary["best"]["overrides"]  # its gain is at most 1.5 %


FEW = {"precision.amp": "bf16", "optimizer.implementation": "fused", "layout.channels_last": True, "loader.num_workers": 2}


@pytest.mark.parametrize(("rest", "is_dropped"), [(1.0, True), (1.2, False)])
def test_without_time_for_every_change_the_likeliest_is_reverted_alone_and_the_rest_together(
    bench, tmp_path, monkeypatch, rest, is_dropped
):
    monkeypatch.setattr("autotune.compare.noise.UNKNOWN_NOISE", BUSY_GPU_NOISE)
    monkeypatch.setattr(OnlyEverything, "wanted", FEW)
    monkeypatch.setattr("autotune.study.loop.Search", OnlyEverything)
    space = tmp_path / "space.yaml"
    space.write_text(
        "precision.amp: ['off', bf16]\nlayout.channels_last: [false, true]\noptimizer.implementation: [default, fused]\n"
        "loader.num_workers: [0, 2]\n"
    )
    gains = {("precision.amp", "bf16"): 1.8, ("layout.channels_last", True): rest}
    slow = Surface(
        gains=gains,
        loader_per_s=1e9,
        noise_frac=0.002,
        start_s=2.0,
        window_s=3.0,
        losses=lambda *_: [1.0 - 0.01 * n for n in range(40)],
    )
    study = bench(slow, f"search_space={space}", minutes=1.0)
    summary = study.run()
    missing = [FEW.keys() - trial.changed.keys() for trial in attributed(study)]
    assert missing[:2] == [{"precision.amp"}, FEW.keys() - {"precision.amp"}]
    assert set(summary["best"]["overrides"]) == ({"precision.amp"} if is_dropped else FEW.keys())
    (amp, *others) = summary["attribution"]
    assert amp["ci"][0] < 1.8 < amp["ci"][1]
    if not is_dropped:
        assert {entry["verdict"] for entry in others} == {"not measured"}
        assert summary["effects_together"]["ci"][0] < rest < summary["effects_together"]["ci"][1]
        assert "together 1.2" in missing_text(summary)


COMPILED = {
    "precision.amp": "bf16", "optimizer.implementation": "fused", "loader.num_workers": 2, "compile.mode": "default",
}  # fmt: skip
LITTLE = {"loader.num_workers", "optimizer.implementation"}


@pytest.mark.parametrize(
    ("minutes", "reverted"), [(1.1, [LITTLE]), (1.4, [{"precision.amp"}, {"compile.mode"}, LITTLE])], ids=["one-trial", "three"]
)
def test_changes_that_matter_little_and_need_no_compilation_are_reverted_together(
    bench, tmp_path, monkeypatch, minutes, reverted
):
    """An earlier version reverted them together with changes that matter, so nothing was known about any of them."""
    monkeypatch.setattr("autotune.compare.noise.UNKNOWN_NOISE", BUSY_GPU_NOISE)
    monkeypatch.setattr(OnlyEverything, "wanted", COMPILED)
    monkeypatch.setattr("autotune.study.loop.Search", OnlyEverything)
    space = tmp_path / "space.yaml"
    space.write_text(
        "precision.amp: ['off', bf16]\noptimizer.implementation: [default, fused]\nloader.num_workers: [0, 2]\n"
        "compile.mode: ['off', default]\n"
    )
    gains = {("precision.amp", "bf16"): 1.8, ("compile.mode", "default"): 1.3}
    slow = Surface(gains=gains, loader_per_s=1e9, noise_frac=0.002, start_s=2.0, window_s=3.0, compile_s=10.0)
    study = bench(slow, f"search_space={space}", minutes=minutes)
    summary = study.run()
    assert [COMPILED.keys() - trial.changed.keys() for trial in attributed(study)] == reverted
    assert summary["best"]["overrides"].keys() == COMPILED.keys() - LITTLE


def test_without_time_for_attribution_the_whole_winner_is_exported_with_a_notice(planted):
    study = planted(0.01, minutes=0.7)
    summary = study.run()
    assert "not measured" in {entry["verdict"] for entry in summary["attribution"]}
    assert summary["best"]["overrides"] == ALL
    assert summary["minimality"] is None
    assert any("No time to measure the effects" in line for line in study.listener.named("notice"))


def test_effect_of_a_single_change_equals_the_total_speedup(bench, tiny):
    study = bench(Surface(gains={("precision.amp", "bf16"): 1.5}, loader_per_s=1e9), *tiny)
    summary = study.run()
    (entry,) = summary["attribution"]
    assert (entry["knob"], entry["ratio"], entry["ci"]) == ("precision.amp", *map(summary["speedup"].get, ("ratio", "ci")))
    assert attributed(study) == []


def test_knob_is_needed_if_memory_runs_out_without_it(planted):
    def failures(_, knobs):
        return OUT_OF_MEMORY if knobs.get("env.A") == "1" and "env.D" not in knobs else None

    summary = planted(0.005, minutes=12, failures=failures).run()
    found = {entry["knob"]: entry for entry in summary["attribution"]}
    assert (found["env.D"]["verdict"], found["env.D"]["reason"]) == ("needed", "without it: device_oom")
    assert found["env.D"]["ratio"] is None
    assert set(summary["best"]["overrides"]) == {"env.A", "env.B", "env.D"}


@pytest.mark.thorough
def test_interrupted_study_keeps_its_results_and_resume_completes_it(planted):
    def failures(number, _):
        return Failure(raises=KeyboardInterrupt) if number == 12 and not study.seen else None

    study = planted(0.01, minutes=12, failures=failures)
    study.seen = []
    summary = study.run()
    assert summary["status"] == "interrupted"
    assert summary["best"]["overrides"] == ALL
    assert {entry["knob"] for entry in summary["attribution"]} == set(ALL)
    before = {trial.number: trial for trial in study.trials}
    study.seen.append(True)
    after = resume_study(study.inputs, study.folder, study.listener)
    assert after["status"] == "complete"
    assert all(study.trials[number] == trial for number, trial in before.items())
    assert is_right(after), after["attribution"]
    assert [trial.round for trial in attributed(study) if trial.changed == ALL].count(1) == 1


@pytest.mark.thorough
def test_study_killed_in_its_reporting_rounds_resumes_them_for_the_same_trial(planted, tmp_path):
    study = planted(0.01, minutes=12)
    whole = study.run()
    finals = [trial for trial in study.trials if trial.kind is Kind.final]
    for trial in finals[5:]:
        shutil.rmtree(study.folder.trial_path(trial.number))
    study.launcher.launches.clear()
    summary = resume_study(study.inputs, study.folder, study.listener)
    assert summary["best"]["trial"] == whole["best"]["trial"]
    assert summary["speedup"]["num_rounds"] == whole["speedup"]["num_rounds"]
    assert not any(trial.kind is Kind.attribution for trial in study.trials[finals[5].number :])
    assert summary["attribution"] == whole["attribution"]


def test_best_of_a_lower_tier_is_measured_in_the_finals_if_time_allows(bench, tmp_path):
    file = tmp_path / "tiers.yaml"
    file.write_text("threads.intra: [2, 4]\nprecision.amp: ['off', 'bf16']\n")
    gains = {("precision.amp", "bf16"): 1.5, ("threads.intra", 4): 1.3}
    study = bench(Surface(gains=gains, loader_per_s=1e9, start_s=2.0, window_s=3.0), f"search_space={file}", minutes=10)
    summary = study.run()
    tiers = summary["best_by_tier"]
    assert tiers["numerics"]["trial"] == tiers["training"]["trial"] == summary["best"]["trial"]
    exact = tiers["exact"]
    assert exact["overrides"] == {"threads.intra": 4}
    assert exact["measured_in"] == "finals"
    assert exact["speedup"]["verdict"] == "faster"
    low, high = exact["speedup"]["ci"]
    assert low <= 1.3 <= high
    text = render(summary, "yaml", Tier.exact).text
    assert "faster" in text
    assert "from the search" not in text
    (tmp_path / "exact.yaml").write_text(text)
    speedup = read_claim(tmp_path / "exact.yaml").speedup
    assert speedup.num_rounds == exact["speedup"]["num_rounds"] >= 2
    assert speedup.freedom == pytest.approx(exact["speedup"]["freedom"], rel=1e-4), "else `verify` reads the interval as normal"
    assert speedup.error == pytest.approx(exact["speedup"]["error"], rel=1e-4), "the interval may be one for two looks"


@pytest.mark.thorough
def test_attribution_also_runs_if_only_a_slower_winner_meets_the_constraints(planted):
    study = planted(0.01, "constraints.max_step_p95_s=0.2", minutes=20)
    study.surface.gains["env.A", "1"] = 0.6
    study.surface.step_s = lambda knobs: 0.1 if knobs.get("env.A") == "1" else 0.3
    assert study.run()["best"]["overrides"] == {"env.A": "1", "env.B": "1"}


@pytest.mark.thorough
def test_attribution_without_time_limit_takes_at_most_twice_as_long_as_the_search(planted):
    study = planted(0.02, "study.budget.minutes=null", "study.budget.trials=25", is_found=False)
    assert study.run()["status"] == "complete"
    searched_s = sum(trial.seconds for trial in study.trials if trial.kind is Kind.search)
    assert 0 < sum(trial.seconds for trial in attributed(study)) <= 2 * searched_s
