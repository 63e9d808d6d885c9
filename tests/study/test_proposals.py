import pytest

from autotune.errors import NothingWorked
from autotune.records import Kind, Outcome
from autotune.report.verdict import has_no_choice, more_time
from autotune.study.proposals import EXHAUSTED
from autotune.study.search_budget import OUT_OF_TIME, OUT_OF_TRIALS, TOO_DEAR
from tests.study.conftest import RATES
from tests.support.fake_launcher import Failure, Surface


def searched(study):
    return [trial for trial in study.trials if trial.kind in (Kind.baseline, Kind.search)]


def configurations(study):
    return [tuple(sorted(trial.changed.items())) for trial in searched(study)]


def test_no_configuration_is_measured_twice_in_the_search(bench):
    study = bench(Surface(), minutes=12)
    study.run()
    assert len(set(configurations(study))) == len(configurations(study)) > 20


def test_every_point_of_a_tiny_space_is_measured_then_the_search_ends(bench, tiny):
    study = bench(Surface(), *tiny, minutes=60)
    summary = study.run()
    assert summary["reason"] == EXHAUSTED
    assert len(searched(study)) == 4
    assert f"The search is over: {EXHAUSTED}." in study.listener.named("notice")
    assert summary["seconds"]["total"] < 30 * 60, "the study does not wait for the rest of the budget"


def test_study_with_nothing_to_search_is_not_told_to_take_more_time(bench, tmp_path):
    own = bench(Surface()).run()["baseline"]["knobs"]["loader.batch_size"]
    (tmp_path / "space.yaml").write_text(f"loader.batch_size: [{own}]\n")
    summary = bench(Surface(), f"search_space={tmp_path / 'space.yaml'}").run()
    assert (summary["reason"], len(summary["trials"])) == (EXHAUSTED, 1)
    assert has_no_choice(summary)
    assert more_time(summary) == ""


def test_every_point_of_a_small_space_is_found_before_it_counts_as_used_up(bench, tmp_path):
    (tmp_path / "space.yaml").write_text(f"loader.batch_size: {list(range(32, 96))}\nprecision.amp: ['off', 'bf16']\n")
    words = [f"search_space={tmp_path / 'space.yaml'}", "search.sampler=random", "study.budget.minutes=null"]
    study = bench(Surface(), *words)
    assert study.run()["reason"] == EXHAUSTED
    assert len(set(configurations(study))) == len(configurations(study)) == 128


def test_grid_visits_every_point_once(bench, tiny):
    study = bench(Surface(), *tiny, "search.sampler=grid", minutes=60)
    summary = study.run()
    assert summary["reason"] == EXHAUSTED
    assert len(configurations(study)) == len(set(configurations(study))) == 4
    assert all("grid" in trial.why for trial in searched(study)[1:])


def test_grid_whose_points_exceed_the_budget_is_not_reported_as_exhausted(bench, tiny):
    summary = bench(Surface(start_s=40.0), *tiny, "search.sampler=grid", minutes=2).run()
    assert summary["counts"] == {"ok": 1}
    assert "give study.budget.minutes=" in summary["reason"]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_grid_measures_the_points_that_fit_the_budget_and_states_why_it_ended(bench, tmp_path, seed):
    (tmp_path / "space.yaml").write_text("loader.batch_size: [32, 64, 1024]\nprecision.amp: ['off', 'bf16']\n")
    words = [f"search_space={tmp_path / 'space.yaml'}", "search.sampler=grid", f"study.seed={seed}"]
    study = bench(Surface(start_s=10.0), *words, minutes=2.6)
    assert study.run()["reason"] in (TOO_DEAR, OUT_OF_TIME)
    assert len(set(configurations(study))) >= 3
    assert {trial.knobs["loader.batch_size"] for trial in searched(study)} == {32, 64}


def test_search_says_whether_time_or_trials_ended_it(bench):
    assert bench(Surface(), minutes=4).run()["reason"] in (OUT_OF_TIME, TOO_DEAR)
    assert bench(Surface(), "study.budget.trials=2").run()["reason"] == OUT_OF_TRIALS


def test_search_may_use_the_time_of_the_finals_until_there_is_a_finalist(bench):
    surface = Surface(start_s=14.0, gains={("optimizer.implementation", "fused"): 1.2})
    surface.failures = lambda trial, knobs: Failure(signal="SIGSEGV", cause="exit") if trial in (1, 2, 3) else None
    study = bench(surface, minutes=3)
    summary = study.run()
    assert [trial.outcome for trial in searched(study)] == [Outcome.ok, *[Outcome.crash] * 3, Outcome.ok]
    assert summary["speedup"]["ratio"] == pytest.approx(1.2, abs=0.1)
    assert summary["seconds"]["total"] <= 180


@pytest.mark.parametrize(("factor", "least"), [(0.9, 13), (1.1, 0)])
def test_search_without_a_faster_configuration_uses_the_time_of_the_finals(bench, tmp_path, factor, least):
    (tmp_path / "space.yaml").write_text(f"loader.batch_size: {list(range(32, 80, 2))}\n")
    gains = {("loader.batch_size", size): factor for size in range(34, 80, 2)}
    words = [f"search_space={tmp_path / 'space.yaml'}", "search.stop=false", "measure.racing=false"]
    study = bench(Surface(start_s=4.0, half_batch=0.01, gains=gains, noise_frac=0.001), *words, minutes=3)
    assert study.run()["seconds"]["total"] <= 180
    assert least < len(searched(study)) < least + 12


@pytest.mark.parametrize("start_s", [40.0, 100.0])
def test_study_of_a_slow_program_runs_a_trial_that_fits_or_states_the_budget_needed(bench, start_s):
    study = bench(Surface(start_s=start_s), minutes=4)
    summary = study.run()
    spent = summary["seconds"]["total"] / 240
    if len(searched(study)) > 1:
        assert start_s == 40.0
        assert spent > 0.5
        return
    assert start_s == 100.0
    assert "give study.budget.minutes=" in summary["reason"]
    needed = float(summary["reason"].partition("minutes=")[2].split()[0])
    again = bench(Surface(start_s=start_s), minutes=needed)
    again.run()
    assert len(searched(again)) == 2


def test_expensive_values_are_tried_late_on_the_best_configuration_so_far(bench):
    surface = Surface(gains={("precision.amp", "bf16"): 1.8, ("compile.mode", "default"): 1.3})
    study = bench(surface, "search.sampler=tpe", minutes=8)
    study.run()
    trials = searched(study)
    first = next(trial.number for trial in trials if "compile.mode" in trial.changed)
    assert first >= 0.5 * len(trials)
    best_before = max(trials[:first], key=lambda trial: trial.value or 0.0)
    assert {**best_before.changed, "compile.mode": trials[first].changed["compile.mode"]} == trials[first].changed


def test_lower_tiers_of_the_best_are_tried_with_the_expensive_value_that_made_it_the_best(bench):
    gains = {("precision.amp", "bf16"): 1.8, ("compile.mode", "default"): 1.5}
    study = bench(Surface(gains=gains, compile_s=10.0), "search.sampler=tpe", minutes=12)
    study.run()
    lower = [trial for trial in searched(study) if "as far as tier" in trial.why]
    assert lower
    before = [trial for trial in searched(study) if trial.number < lower[0].number and "no effect" not in trial.why]
    best = max(before, key=lambda trial: trial.value or 0.0)
    assert "compile.mode" in best.changed
    assert {trial.why.partition("(")[2].partition(")")[0] for trial in lower} == {f"trial {best.number}"}


def test_compilation_that_does_not_fit_the_budget_is_left_out_and_named(bench):
    study = bench(Surface(start_s=6.0, window_s=12.0, compile_s=60.0), minutes=3)
    study.run()
    assert not any("compile.mode" in trial.changed for trial in study.trials)
    assert any("does not fit the budget: compile.mode=" in line for line in study.listener.named("notice"))


def test_optuna_knows_every_search_trial_and_no_final(bench):
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    study = bench(Surface(gains={("precision.amp", "bf16"): 1.8}, max_batch=64), minutes=6)
    study.run()
    storage = JournalStorage(JournalFileBackend(str(study.folder.journal_file)))
    known = optuna.load_study(study_name=study.folder.name, storage=storage).get_trials()
    assert {trial.user_attrs["trial"] for trial in known if trial.state.is_finished() and "trial" in trial.user_attrs} == {
        trial.number for trial in searched(study)
    }
    too_big = [trial.number for trial in searched(study) if trial.outcome is Outcome.device_oom]
    assert too_big
    told = {trial.user_attrs.get("trial"): trial for trial in known}
    assert all(told[number].constraints["memory"] > 0 for number in too_big)


def test_study_ends_if_its_first_trials_all_fail_for_the_same_reason(bench):
    def failures(trial, knobs):
        traceback = f"Traceback\n  train.py, line 3\nRuntimeError: no {trial} of them"
        return (
            Failure(error={"type": "RuntimeError", "message": f"no {trial} of them", "traceback": traceback}) if trial else None
        )

    study = bench(Surface(failures=failures), minutes=30)
    with pytest.raises(
        NothingWorked, match=r"(?s)the first (\d) configurations all failed for the same reason, got error: .*\| RuntimeErr"
    ) as raised:
        study.run()
    assert raised.value.exit_code == 3
    summary = study.folder.read_summary()
    assert summary["status"] == "failed"
    assert 4 <= summary["counts"]["error"] <= 7
    assert summary["baseline"]["value"], "what was measured is kept"
    assert summary["speedup"] is None


@pytest.mark.thorough
@pytest.mark.parametrize("message", ["CUDA out of memory", "differs"])
def test_study_continues_if_its_first_trials_run_out_of_memory_or_fail_differently(bench, message):
    def failures(trial, knobs):
        if not trial or trial > 8:
            return None
        text = message if message != "differs" else "abcdefghij"[trial]
        kind = "torch.OutOfMemoryError" if message != "differs" else "RuntimeError"
        return Failure(error={"type": kind, "message": text, "traceback": ""})

    assert bench(Surface(failures=failures), minutes=10).run()["status"] == "complete"


@pytest.mark.thorough
def test_study_tries_other_changes_if_all_failed_configurations_share_one_change(bench):
    def failures(trial, knobs):
        failure = Failure(error={"type": "RuntimeError", "message": "no bf16 here", "traceback": ""})
        return failure if knobs["precision.amp"] == "bf16" else None

    study = bench(Surface(gains={("layout.channels_last", True): 1.5}, failures=failures), RATES, minutes=10)
    summary = study.run()
    assert 2 <= summary["counts"]["error"] <= 4, "once the other changes have worked, the remaining one is the cause"
    assert summary["best"]["overrides"]["layout.channels_last"] is True


def test_reason_of_a_trial_names_its_sampler(bench):
    study = bench(Surface(), "search.sampler=random", minutes=4)
    study.run()
    whys = [trial.why for trial in searched(study)]
    assert any("sampler (random)" in why for why in whys)
    assert not any("alone on the best" in why for why in whys)


@pytest.mark.thorough
def test_expert_value_that_was_clearly_slower_is_not_repeated_at_every_batch_size(bench):
    def num_expert_trials_with_bf16(factor):
        study = bench(
            Surface(gains={("precision.amp", "bf16"): factor}), RATES, "study.budget.trials=6", "compile.mode=off", minutes=30
        )
        study.run()
        return sum("expert" in trial.why and trial.changed.get("precision.amp") == "bf16" for trial in searched(study))

    assert num_expert_trials_with_bf16(0.3) == 1
    assert num_expert_trials_with_bf16(2.0) == 2
