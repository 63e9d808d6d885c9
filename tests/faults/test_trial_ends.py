"""Every fault of a trial happens once, for real and between healthy trials, and the studies continue."""

import re

import pytest

from tests.faults.trial_studies import start

pytestmark = pytest.mark.thorough

# What goes wrong -> (outcome of the trial, part of its reason).
ENDS = {  # the faults alternate between two studies, so that both take about as long
    "hangs in a step": ("timeout", r"^step: nothing moved in phase \w+ within 4 s; user code at faulty\.py:\d+ in hang"),
    "worker is killed": ("crash", r"^a loader worker died: .*DataLoader worker \(pid \d+\) is killed by signal: Killed"),
    "prints a gigabyte": ("ok", ""),
    "is killed": ("crash", r"ended by SIGKILL in phase \w+ .*ended from outside"),
    "model raises": ("error", r"^ValueError: bad shape$"),
    "segfaults": ("crash", r"ended by SIGSEGV in phase"),
    "dataset raises": ("error", r"^KeyError: 'no such image'$"),
    "worker raises": ("error", r"^KeyError: 'no such image'$"),
    "opens files": ("error", r"^OSError: \[Errno 24\] Too many open files: '/dev/null' .*raise the hard limit"),
    "loss is no number": ("nonfinite", r"^the loss is not finite after \d+ steps"),
    "overflows in fp16": (
        "nonfinite",
        r"^the loss scale fell to .*: the gradients overflow; .* skipped \d+ of \d+ opt",
    ),
    "does not train": ("error", r"^no optimizer step was seen: the program imported torch"),
    "imports no torch": ("error", r"^no Python process of the program imported torch"),
    "ends after three steps": ("error", r"^the program ended after 3 optimizer steps, too few to measure\. Let it train"),
    "corrupts its result": ("error", r"^result\.rank0\.json cannot be used: "),
    "catches everything": ("ok", ""),
    "leaves a daemon": ("ok", ""),
    "closes its output": ("ok", ""),
    "saves checkpoints": ("ok", ""),
}
RETRIED = ("worker is killed", "is killed", "segfaults")
NUM_STUDIES = 2  # run in parallel, one per core
PRECIOUS = b"precious\0" * 1000


@pytest.fixture(scope="module")
def studies(tmp_path_factory):
    """Runs studies that contain all the faults; returns them, and {fault: (study, trial of `show --json`)}."""
    running = []
    for part in range(NUM_STUDIES):
        cwd = tmp_path_factory.mktemp(f"faults{part}")
        for name in ("model.pt", "best.ckpt"):
            (cwd / name).write_bytes(PRECIOUS)
        space = {"env.FAULT": [*list(ENDS)[part::NUM_STUDIES], "healthy"]}
        running.append(start(cwd, "faulty.py", space, "study.budget.minutes=null", arguments=("--output=model.pt",)))
    for study in running:
        study.finish()
    trials = {}
    for study in running:
        for trial in study.summary()["trials"][1:]:
            trials.setdefault(trial["knobs"]["env.FAULT"], (study, trial))
    return running, trials


@pytest.mark.parametrize("fault", ENDS)
def test_each_fault_has_the_expected_outcome_and_reason(studies, fault):
    _, trial = studies[1][fault]
    outcome, reason = ENDS[fault]
    assert trial["outcome"] == outcome, trial["reason"]
    assert re.search(reason, trial["reason"]), trial["reason"]
    assert ("second attempt" in trial["reason"]) == (fault in RETRIED)


def test_a_study_with_faulty_trials_measures_the_others_and_reaches_a_verdict(studies):
    for study in studies[0]:
        summary = study.summary()
        assert summary["status"] == "complete"
        assert summary["speedup"]["verdict"] == "same"
        outcomes = {trial["knobs"].get("env.FAULT"): trial["outcome"] for trial in summary["trials"]}
        assert outcomes[""] == "ok"
        assert outcomes["healthy"] == "ok"


def test_faulty_trials_leave_no_process(studies):
    for study in studies[0]:
        assert study.left_running() == []


def test_evidence_of_an_exception_contains_its_traceback(studies):
    for fault, line in (
        ("model raises", 'raise ValueError("bad shape")'),
        ("worker raises", 'raise KeyError("no such image")'),
    ):
        study, trial = studies[1][fault]
        evidence = study.record(trial["number"])["evidence"]
        assert line in evidence["error"]["traceback"]
        assert line in evidence["log_tail"]


def test_evidence_of_a_hang_contains_the_stacks_of_its_processes(studies):
    study, trial = studies[1]["hangs in a step"]
    hang = study.record(trial["number"])["evidence"]["hang"]
    assert hang["kind"] == "user code"
    assert hang["processes"][0]["stack"][0].endswith("in hang")


def test_a_flood_of_output_fills_neither_disk_nor_memory(studies):
    study, trial = studies[1]["prints a gigabyte"]
    assert int((study.cwd / "largest").read_text()) < 512 << 20
    log = study.folder(trial["number"]) / "stdout.log"
    assert log.stat().st_size < 16 << 20
    said = log.read_text()
    assert said.startswith("yyyy")
    assert "bytes left out here]" in said
    assert "the last line" in said
    assert study.num_peak_bytes < 512 << 20


def test_existing_checkpoints_are_unchanged(studies):
    study, trial = studies[1]["saves checkpoints"]
    assert (study.cwd / "model.pt").read_bytes() == PRECIOUS
    assert (study.cwd / "best.ckpt").read_bytes() == PRECIOUS
    summary, number = study.summary(), trial["number"]
    kept = {entry["path"]: entry["trials"] for entry in summary["files"]["kept"]}
    assert kept == {str(study.cwd / name): [number] for name in ("model.pt", "best.ckpt")}
    assert f"kept  {study.cwd / 'model.pt'}: trial {number} would have changed it; it is unchanged" in study.said


def test_checkpoints_left_by_a_trial_are_listed_with_their_size(studies):
    study, trial = studies[1]["saves checkpoints"]
    files = study.summary()["files"]
    left = next(entry for entry in files["left"] + files["new"] if entry["name"] == "checkpoint.pt")
    assert left == {"name": "checkpoint.pt", "bytes": (study.cwd / "checkpoint.pt").stat().st_size, "trial": trial["number"]}
    assert re.search(r"(left|new)  .*checkpoint\.pt \([\d.]+ KiB", study.said)
