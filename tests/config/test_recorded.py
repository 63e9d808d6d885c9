import dataclasses
import sys

import pytest

from autotune.config.compose import compose
from autotune.config.recorded import recorded
from autotune.errors import BadInput
from autotune.records import StudyRecord
from autotune.space import Choice, IntInterval, domain_from_json
from tests.corpus.documents import LAUGHS


@pytest.fixture
def kept(tmp_path):
    """Returns a function that composes a study, writes it as into a study's folder, and reads it back."""

    def keep(*overrides, command=("python", "-c", "pass", "{loader.batch_size=64}"), change=(), cwd="/somewhere"):
        composed = compose(list(overrides), command=list(command) if command else None)
        study = StudyRecord(
            name="s", title=composed.title, command=composed.command.parts, cwd=cwd,
            placeholders=composed.command.placeholders, is_recipe=composed.command.is_recipe, pinned=composed.space.pinned,
            asked={key: domain.as_json() if domain else {"auto": True} for key, domain in composed.space.domains.items()},
        )  # fmt: skip
        file = tmp_path / "config.yaml"
        file.write_text(composed.yaml)
        return composed, recorded(StudyRecord.from_json(study.as_json()), file, change)

    return keep


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("loader.num_workers=choice(0,4)", "loader.batch_size=tag(log,interval(8,128))"),
        ("precision.amp=bf16", "env.MALLOC_ARENA_MAX='2'", "tiers=numerics", "device.memory_limit=0.5"),
        ("study.budget.minutes=null", "study.budget.trials=30", "measure.finals.max_s=12", "search.sampler=random"),
    ],
)
def test_recorded_study_is_restored_unchanged_in_its_present_runs_folder(kept, overrides, tmp_path):
    before, after = kept(*overrides)
    assert after.config.runs_dir == str(tmp_path.parent)
    assert dataclasses.asdict(after.config) == {**dataclasses.asdict(before.config), "runs_dir": after.config.runs_dir}
    assert after.space == before.space
    assert (after.command.parts, after.command.placeholders) == (before.command.parts, before.command.placeholders)
    assert after.command.cwd == "/somewhere"
    assert after.yaml == before.yaml


def test_recorded_recipe_is_restored_as_a_recipe(kept):
    before, after = kept("model=resnet18", command=None)
    assert after.command.is_recipe
    assert after.command.argv({}) == before.command.argv({})


def test_study_of_an_earlier_checkout_with_secrets_as_settings_is_refused(tmp_path):
    study = StudyRecord(
        name="s", title="t", command=["x", "--api-key", "***"], cwd="/", pinned={"env.A_TOKEN": "***"},
        asked={"env.B_TOKEN": {"choice": ["***1", "***2"]}},
    )  # fmt: skip
    with pytest.raises(BadInput) as caught:
        recorded(study, tmp_path / "config.yaml")
    assert [problem.partition(": contains a secret")[0] for problem in caught.value.problems] == [
        *("COMMAND", "env.A_TOKEN", "env.B_TOKEN")
    ]


def test_recorded_reference_to_the_environment_is_resolved_again(kept, tmp_path, monkeypatch):
    monkeypatch.setenv("STORE", "http://one")
    _, after = kept("tracker.uri=${oc.env:STORE}")
    assert after.config.tracker.uri == "http://one"
    assert "http://one" not in after.yaml
    monkeypatch.delenv("STORE")
    with pytest.raises(BadInput, match=r"tracker\.uri: cannot be resolved, got .*oc\.env:STORE"):
        recorded(StudyRecord(name="s", title="", command=["python"], cwd="/"), tmp_path / "config.yaml")


def test_only_the_budget_can_be_changed_and_every_other_word_is_refused(kept):
    _, after = kept(change=["study.budget.minutes=16.5", "study.budget.trials=40"])
    assert (after.config.study.budget.minutes, after.config.study.budget.trials) == (16.5, 40)
    assert "minutes: 16.5" in after.yaml
    _, after = kept(change=["+study.budget.minutes=16.5", "++study.budget.trials=40"])
    assert (after.config.study.budget.minutes, after.config.study.budget.trials) == (16.5, 40)
    _, after = kept(change=["study.budget.minutes=null"])
    assert after.config.study.budget.minutes is None
    words = ["study.seed=3", "loader.num_workers=2", "study.budget.trials=[1]", "nonsense"]
    words += [f"study.budget.minutes={text}" for text in ("", "1:30", "choice(1,2)", "-1e", "[", "2001-13-45", "1" + "0" * 400)]
    with pytest.raises(BadInput) as refused:
        kept(change=words)
    assert len(refused.value.problems) == len(words)
    with pytest.raises(BadInput, match=r"too small, got -3\.0\. Allowed: above 0"):
        kept(change=["study.budget.minutes=-3"])


ANY = StudyRecord(name="s", title="", command=["python"], cwd="/")


def test_relative_paths_of_a_recipe_count_from_the_folder_that_its_trials_run_in(kept, tmp_path, monkeypatch):
    there = tmp_path / "there"
    (there / "photos" / "cat").mkdir(parents=True)
    (there / "photos" / "cat" / "1.png").touch()
    (there / "python").symlink_to(sys.executable)
    monkeypatch.chdir(there)
    kept("model=resnet18", "data=folder", "data.root=photos", "program.python=./python", command=None, cwd=str(there))
    monkeypatch.chdir(tmp_path)
    after = recorded(dataclasses.replace(ANY, is_recipe=True, cwd=str(there)), tmp_path / "config.yaml")
    assert (after.config.data.root, after.config.program.python) == ("photos", "./python")
    with pytest.raises(BadInput, match=r"program\.python: no such program, got '.*/python'"):
        recorded(dataclasses.replace(ANY, is_recipe=True, cwd=str(tmp_path)), tmp_path / "config.yaml")


def test_study_of_a_partition_is_resumed_inside_a_job_and_keeps_its_partition(kept, tmp_path, monkeypatch):
    asked = ("launcher=slurm", "launch.slurm.partition=gpu", "launch.slurm.minutes=60", "launch.slurm.gres=gpu:1")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    _, outside = kept(*asked)
    assert (outside.config.launch.slurm.partition, outside.config.launch.slurm.minutes) == ("gpu", 60.0)
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    inside = recorded(ANY, tmp_path / "config.yaml")
    options = inside.config.launch.slurm
    assert (options.partition, options.minutes, options.gres) == (None, None, "gpu:1")
    assert inside.yaml == outside.yaml


@pytest.mark.parametrize("option", ["launch.slurm.nodes=2", "launch.slots=2"])
def test_study_is_not_resumed_inside_a_job_that_cannot_hold_it(kept, tmp_path, monkeypatch, option):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    kept("launcher=slurm", option, command=("srun", "python", "-c", "pass"))
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    with pytest.raises(BadInput, match=r"job 12.* outside of a job"):  # none of the study's options can be changed
        recorded(ANY, tmp_path / "config.yaml")


def test_study_of_several_slots_continues_inside_a_job_if_its_trials_run_alone(kept, tmp_path, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    kept("launcher=slurm", "launch.slots=2")
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    assert recorded(ANY, tmp_path / "config.yaml", is_alone=True).config.launch.slots == 2  # which the study's folder keeps


@pytest.mark.parametrize("text", ["", "- a", "a: [", "study: {nosuch: 1}", "study: 3", "tiers: exakt", "\x00", LAUGHS])
def test_invalid_configuration_file_is_refused(tmp_path, text):
    (tmp_path / "config.yaml").write_text(text)
    study = StudyRecord(name="s", title="", command=["python"], cwd="/")
    with pytest.raises(BadInput, match=r"config\.yaml: not a configuration"):
        recorded(study, tmp_path / "config.yaml")


def test_nothing_is_executed_from_a_recorded_configuration(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").write_text("study: !!python/object/apply:os.mkdir [made]\n")
    with pytest.raises(BadInput):
        recorded(StudyRecord(name="s", title="", command=["python"], cwd="/"), tmp_path / "config.yaml")
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


@pytest.mark.parametrize(
    "domain", [Choice((1, 2)), Choice(("off", "bf16")), Choice((True, False)), IntInterval(2, 9, log=True)]
)
def test_domain_is_restored_from_its_document(domain):
    assert domain_from_json(domain.as_json()) == domain


@pytest.mark.parametrize("raw", [None, 3, {}, {"choice": []}, {"choice": [[1]]}, {"interval": [1]}, {"interval": [1, 2]}])
def test_invalid_domain_is_refused(raw):
    with pytest.raises(ValueError, match="not a domain"):
        domain_from_json(raw)
