"""What a study reuses from earlier studies."""

import functools
import json
import math
import os
import shutil

import pytest

from autotune.errors import BadInput
from autotune.records import Kind, Outcome, StudyRecord, TrialRecord
from autotune.study import resume_study
from autotune.study.earlier_studies import MAX_SOURCES, Source, _out_of_memory, check_named, foreseen
from autotune.study.initial import EARLIER, NUM_EARLIER_SEEDS
from autotune.study.oom_frontier import dominates
from autotune.wording import warm_start_text
from tests.study.conftest import MACHINE
from tests.support.fake_launcher import Failure, Surface

FAST = {("precision.amp", "bf16"): 1.8, ("layout.channels_last", True): 1.3}
ROOMY = {"loader.batch_size": 32, "precision.amp": "off"}
AUTO = "search.warm_start=auto"


@pytest.fixture
def bench(bench):
    return functools.partial(bench, is_kept=True)


@pytest.fixture
def filled(tmp_path):
    """A fake program that runs out of memory with large batches, and a search space with such batches."""
    file = tmp_path / "filled.yaml"
    file.write_text("loader.batch_size: [32, 64, 128, 256]\nprecision.amp: ['off', 'bf16']\nthreads.intra: [1, 2]\n")
    return Surface(gains=FAST, half_batch=40.0, max_batch=64), f"search_space={file}"


def searched(study):
    return [trial for trial in study.trials if trial.kind is Kind.search]


def taken(study):
    return [trial for trial in searched(study) if trial.origin == EARLIER]


def test_best_configurations_of_an_earlier_study_are_measured_first(bench):
    first = bench(Surface(gains=FAST), "study.budget.trials=8")
    best = first.run()["best"]["overrides"]
    second = bench(Surface(gains=FAST), AUTO, "study.budget.trials=8", seed=1)
    summary = second.run()
    earlier = searched(second)[: len(taken(second))]
    assert earlier == taken(second), "before anything else"
    assert 1 <= len(earlier) <= NUM_EARLIER_SEEDS
    assert earlier[0].changed == best
    assert all(trial.value for trial in earlier), "each was measured in this study"
    assert earlier[0].why.startswith(f"the best of s, trial {first.folder.read_summary()['best']['trial']} there: ")
    assert len(searched(second)) <= 8, "they count as trials"
    assert summary["warm_start"]["sources"] == [{"study": "s", "is_same": True, "differs": []}]
    assert warm_start_text(summary["warm_start"]) == "s (the same program and machine): its best configurations are tried first"


@pytest.mark.parametrize(
    "other",
    [
        pytest.param({"command": ("python", "-c", "other")}, marks=pytest.mark.thorough),
        {"machine": {**MACHINE, "cpu_model": "Another CPU"}},
        pytest.param({"surface": Surface(facts={**Surface().facts, "torch": "2.15.0"})}, marks=pytest.mark.thorough),
        pytest.param({"overrides": ["search.warm_start=off"]}, marks=pytest.mark.thorough),
    ],
)
def test_nothing_is_reused_for_another_program_or_machine_or_if_switched_off(bench, other):
    bench(Surface(gains=FAST), "study.budget.trials=3").run()
    told = {"surface": Surface(gains=FAST), "overrides": [], **other}
    surface, more = told.pop("surface"), told.pop("overrides")
    study = bench(surface, AUTO, "study.budget.trials=2", *more, **told)
    assert study.run()["warm_start"] == {}
    assert not taken(study)


def test_noise_of_this_machine_is_known_though_later_studies_are_of_other_machines(bench):
    first = bench(Surface(gains=FAST), "study.budget.trials=4")
    first.run()
    own = first.folder.path
    for number in range(MAX_SOURCES):
        other = shutil.copytree(own, own.with_name(f"other{number}"))
        about = json.loads((other / "study.json").read_text())
        about["identity"]["machine.cpu_model"], about["sequence"] = "Another CPU", about["sequence"] + 1 + number
        (other / "study.json").write_text(json.dumps(about))
    second = bench(Surface(gains=FAST), "study.budget.trials=1")
    second.run()
    assert second.folder.read_study().noise["freedom"] > 0


def test_named_study_of_another_program_gives_its_best_within_the_search_space(bench, tiny, filled):
    surface, space = filled
    bench(surface, space, command=("python", "-c", "other")).run()
    study = bench(Surface(gains=FAST), *tiny, "search.warm_start=s")
    summary = study.run()
    assert [trial.changed for trial in taken(study)] == [{"precision.amp": "bf16"}], "the batch is not searched here"
    assert summary["warm_start"]["out_of_memory"] == [], "another program's use of memory does not count"
    assert summary["warm_start"]["sources"][0]["differs"] == ["program.command"]
    assert "another program.command" in warm_start_text(summary["warm_start"])


def test_study_of_an_edited_script_is_not_reused_and_a_notice_says_so(bench, tmp_path):
    script = tmp_path / "train.py"
    script.write_text("pass")
    command = ("python", str(script))
    bench(Surface(gains=FAST), "study.budget.trials=2", command=command).run()
    script.write_text("pass  # edited")
    study = bench(Surface(gains=FAST), AUTO, "study.budget.trials=2", command=command)
    study.run()
    assert not taken(study)
    said = study.listener.named("notice")
    (word,) = (notice.rpartition("search.warm_start=")[2] for notice in said if "another version of the script" in notice)
    third = bench(Surface(gains=FAST), f"search.warm_start={word}", "study.budget.trials=2", command=command)
    assert [source["study"] for source in third.run()["warm_start"]["sources"]] == ["s"], "`s` now means the second study"


def test_named_study_with_nothing_to_reuse_is_reported(bench, tiny):
    bench(Surface(gains={("precision.amp", "bf16"): 0.5, ("loader.num_workers", 2): 0.5}), *tiny).run()
    study = bench(Surface(gains=FAST), *tiny, "search.warm_start=s")
    assert study.run()["warm_start"] == {}
    assert any("nothing was reused from s: " in notice for notice in study.listener.named("notice"))


@pytest.mark.thorough
def test_winner_for_another_objective_does_not_count_as_proven(bench, tiny):
    bench(Surface(gains=FAST), *tiny).run()
    terms = ("objective=time_for_samples", "study.samples=1e6")
    seeds = bench(Surface(gains=FAST), *tiny, AUTO, *terms).run()["warm_start"]["seeds"]
    assert seeds
    assert not any(seed["is_proven"] for seed in seeds)


@pytest.mark.parametrize("sampler", ["rates", *(pytest.param(s, marks=pytest.mark.thorough) for s in ("tpe", "random"))])
def test_configurations_that_ran_out_of_memory_earlier_are_not_tried_again(bench, filled, sampler):
    surface, space = filled
    first = bench(surface, space, "search.sampler=random", "search.seeds=false", "study.budget.trials=14", minutes=60)
    counts = first.run()["counts"]
    assert counts.get("device_oom", 0) + counts.get("host_oom", 0) > 0
    out = [trial.knobs for trial in searched(first) if trial.outcome.is_memory]
    second = bench(surface, space, AUTO, f"search.sampler={sampler}", "study.budget.trials=10", minutes=60, seed=3)
    summary = second.run()
    kept = summary["warm_start"]["out_of_memory"]
    assert kept
    assert "out of memory there" in warm_start_text(summary["warm_start"])
    for trial in searched(second):
        assert not any(dominates(trial.knobs, knobs, is_host=False) for knobs in out)
    assert summary["best"]["overrides"]["precision.amp"] == "bf16"


@pytest.mark.thorough
def test_configurations_that_ran_out_of_memory_are_allowed_again_with_more_memory(bench, filled):
    surface, space = filled
    bench(surface, space, "search.sampler=grid", "device.memory_limit=1GiB", minutes=60).run()
    less = bench(surface, space, AUTO, "device.memory_limit=900MiB", "study.budget.trials=2")
    assert less.run()["warm_start"]["out_of_memory"]
    more = bench(surface, space, AUTO, "device.memory_limit=2GiB", "study.budget.trials=2")
    assert more.run()["warm_start"]["out_of_memory"] == []


@pytest.mark.thorough
def test_out_of_memory_is_ignored_if_another_study_measured_the_configuration(bench, filled):
    surface, space = filled
    bench(surface, space, "search.sampler=grid", minutes=60).run()
    surface.max_batch = 10_000  # another process had held the memory
    bench(surface, space, "search.sampler=grid", minutes=60).run()
    assert bench(surface, space, AUTO, "study.budget.trials=2").run()["warm_start"]["out_of_memory"] == []


def test_resume_keeps_what_was_reused_even_if_the_source_study_was_deleted(bench):
    first = bench(Surface(gains=FAST), "study.budget.trials=8")
    first.run()
    interrupting = Surface(gains=FAST, failures=lambda trial, _: Failure(raises=KeyboardInterrupt) if trial == 2 else None)
    study = bench(interrupting, AUTO, "study.budget.trials=6", seed=1)
    assert study.run()["status"] == "interrupted"
    taken_over = study.folder.read_study().warm_start
    shutil.rmtree(first.folder.path)
    study.surface.failures = lambda *_: None
    study.launcher.is_closed = False
    summary = resume_study(study.inputs, study.folder, study.listener)
    assert summary["warm_start"] == taken_over
    settled = [tuple(sorted(trial.changed.items())) for trial in taken(study) if trial.outcome.has_value]
    assert 2 <= len(settled) == len(set(settled)) <= NUM_EARLIER_SEEDS


def test_earlier_study_with_an_edited_summary_does_not_prevent_a_search(bench, tiny):
    first = bench(Surface(gains=FAST), *tiny)
    first.run()
    summary = first.folder.read_summary()
    first.folder.write_summary({**summary, "best": {**summary["best"], "trial": "none"}})
    summary = bench(Surface(gains=FAST), *tiny, AUTO).run()
    assert summary["status"] == "complete"
    assert [source["study"] for source in summary["warm_start"]["sources"]] == ["s"]  # its trials are still readable


@pytest.mark.thorough
def test_damaged_earlier_study_does_not_prevent_a_search_even_if_it_is_named(bench, tiny):
    first = bench(Surface(gains=FAST), *tiny)
    first.run()
    trial = first.folder.trial_path(1) / "trial.json"
    record = json.loads(trial.read_text())
    for damage in ({"ci": []}, {"peak_memory_bytes": "much"}, {"value": math.nan, "scores": {"throughput": math.nan}}):
        trial.write_text(json.dumps({**record, **damage}))
        assert bench(Surface(gains=FAST), *tiny, AUTO, "study.budget.trials=1").run()["status"] == "complete"
    named = bench(Surface(gains=FAST), *tiny, f"search.warm_start={first.folder.path}", "study.budget.trials=1")
    first.folder.study_file.write_text("{")  # damaged after the study was set up
    assert named.run()["status"] == "complete"


@pytest.mark.thorough
def test_recordings_reuse_nothing_from_earlier_studies(bench, tiny):
    bench(Surface(gains=FAST), *tiny).run()
    study = bench(Surface(gains=FAST), *tiny, AUTO, "record.repeats=1", is_recording=True)
    assert study.run()["warm_start"] == {}
    assert all(left.search_s is None for left in study.listener.named("time_left")), "nothing is searched"


def test_named_studies_must_exist(tmp_path, bench):
    study = bench(Surface(gains=FAST), "study.budget.trials=2")
    study.run()
    runs = study.folder.path.parent
    check_named("s", runs)
    check_named([str(study.folder.path)], runs)
    check_named("auto", runs)
    with pytest.raises(BadInput, match=r"search\.warm_start: no such study"):
        check_named("nosuch", runs)
    with pytest.raises(BadInput, match=r"search\.warm_start: no such study"):
        check_named("../nosuch", runs)


def test_study_to_start_from_in_a_private_folder_of_another_user_is_bad_input(tmp_path, monkeypatch):
    usual = os.stat

    def stat(path, *arguments, **named):
        if str(path).startswith(f"{tmp_path}/s"):
            raise PermissionError(13, "Permission denied", path)
        return usual(path, *arguments, **named)

    monkeypatch.setattr(os, "stat", stat)
    with pytest.raises(BadInput, match=r"search\.warm_start: no such study"):
        check_named(f"{tmp_path}/s", tmp_path)


def test_earlier_study_gives_the_expected_trial_time_before_any_measurement(bench):
    study = bench(Surface(gains=FAST), "study.budget.trials=3")
    assert foreseen(study.inputs, study.folder.path.parent) is None
    study.run()
    name, seconds = foreseen(bench(Surface(), "study.budget.minutes=7").inputs, study.folder.path.parent)
    assert name == "s"
    assert 5 < seconds < 30


@pytest.mark.parametrize(
    ("knobs", "is_out"),
    [
        ({"loader.batch_size": 64, "precision.amp": "off"}, True),
        ({"loader.batch_size": 32}, True),
        ({"loader.batch_size": 16, "precision.amp": "off"}, False),
        ({"loader.batch_size": 64, "precision.amp": "bf16"}, False),
        ({"loader.batch_size": 64, "precision.amp": "off", "memory.activation_checkpointing": True}, False),
        ({"loader.batch_size": 64, "precision.amp": "off", "threads.intra": 1}, True),
        ({"loader.batch_size": 64, "precision.amp": "off", "backend.sdpa": "flash"}, False),
        ({"precision.amp": "off"}, False),
    ],
)
def test_larger_batch_needs_at_least_as_much_memory_with_the_same_computation(knobs, is_out):
    assert dominates(knobs, ROOMY, is_host=False) is is_out


def test_different_environment_variables_make_memory_use_incomparable():
    large = {**ROOMY, "env.WIDTH": "4096"}
    assert not dominates({**ROOMY, "env.WIDTH": "128"}, large, is_host=False)
    assert not dominates(ROOMY, large, is_host=False)
    assert dominates(large, large, is_host=False)


def test_batch_size_that_the_baseline_fits_is_not_excluded_by_an_earlier_study(bench, filled):
    surface, space = filled
    bench(surface, space, "search.sampler=grid", minutes=60).run()
    surface.max_batch = 10_000  # another process had held the memory
    here = bench(surface, space, AUTO, "loader.batch_size=256", "study.budget.trials=2")
    out = here.run()["warm_start"]["out_of_memory"]
    assert not any(entry["knobs"]["precision.amp"] == "off" for entry in out)
    assert any(trial.outcome.has_value for trial in searched(here))


@pytest.mark.parametrize(("own_bytes", "is_left_out"), [(2**34, True), (2**35, False)])
def test_host_out_of_memory_is_compared_by_host_memory_even_with_a_gpu(own_bytes, is_left_out):
    def study(memory_bytes):
        machine = {"gpus": [{"memory_bytes": 2**36}], "memory_bytes": memory_bytes}
        return StudyRecord(name="s", title="s", command=["python"], cwd="/", machine=machine)

    records = [
        TrialRecord(number=0, kind=Kind.baseline, knobs={"loader.batch_size": 8}, changed={}, outcome=Outcome.ok, value=1.0),
        TrialRecord(number=1, kind=Kind.search, knobs=ROOMY, changed=ROOMY, outcome=Outcome.host_oom),
    ]
    source = Source(name="s", about=study(2**34), records=records, summary=None, differs=[])
    assert bool(_out_of_memory([source], study(own_bytes), records[0])) is is_left_out


def test_text_about_host_out_of_memory_names_the_number_of_workers():
    source = {"study": "s", "is_same": True, "differs": []}
    knobs = {"loader.batch_size": 64, "loader.num_workers": 16, "precision.amp": "off"}

    def text(outcome, knobs):
        out = [{"study": "s", "trial": 3, "knobs": knobs, "outcome": outcome}]
        return warm_start_text({"asked": "auto", "sources": [source], "seeds": [], "out_of_memory": out})

    assert "workers 16" in text("host_oom", knobs)
    assert "workers" not in text("device_oom", knobs)
    assert "unchanged" not in text("device_oom", {"layout.channels_last": True}), "it changes a knob"


def test_host_memory_use_depends_on_the_number_of_workers():
    out = {**ROOMY, "loader.num_workers": 8}
    assert not dominates({**ROOMY, "loader.num_workers": 2}, out, is_host=True)
    assert dominates({**ROOMY, "loader.num_workers": 2}, out, is_host=False)
    assert dominates({**ROOMY, "loader.num_workers": 8}, out, is_host=True)
