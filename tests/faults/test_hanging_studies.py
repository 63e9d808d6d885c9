"""Trials hang in every possible place, and their studies continue. No trial ends by itself."""

import re

import pytest

from tests.faults.trial_studies import start

pytestmark = pytest.mark.thorough

TORCHRUN = ("-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone", "--max-restarts=0")
# What hangs -> (kind of hang, part of the reason). There is one group for each study; the studies run in parallel.
AT_THE_START = {
    "hangs before import": ("user code", r"^start: .*phase: spawn\) within 30 s; user code at faulty\.py:\d+ in <mod"),
    "never steps": ("user code", r"^start: .*phase: first_batch\) within 30 s; user code at faulty\.py:\d+ in train"),
}
IN_A_STEP = {
    "hangs in collate": ("loader", r"^step: .*within 4 s; in the loader at faulty\.py:\d+ in collate"),
    "hangs in a worker": ("loader", r"^step: .*waiting .*, whose worker process \d+ is at faulty\.py:\d+ in collate"),
    "is stopped": ("stopped", r"^step: .*within 4 s; process \d+ of the program is stopped \(by SIGSTOP"),
    "hangs in a step": ("user code", r"^step: .*within 4 s; user code at faulty\.py:\d+ in hang"),
}
BETWEEN_RANKS = {
    "waits for a rank": (
        "collective",
        r"^step: .*; rank 0 waits .* at ranks\.py:\d+ in <mod.* while rank 1 is at ranks\.py:\d+ in think",
    ),
}
HANGS = {**AT_THE_START, **IN_A_STEP, **BETWEEN_RANKS}


@pytest.fixture(scope="module")
def studies(tmp_path_factory):
    """Runs studies that contain all the hangs; returns them, and {fault: (study, trial of `show --json`)}."""
    running = []
    for faults, program, starter, start_s in (
        (AT_THE_START, "faulty.py", (), 30),
        (IN_A_STEP, "faulty.py", (), 120),
        (BETWEEN_RANKS, "ranks.py", TORCHRUN, 120),
    ):
        limits = ("study.budget.minutes=null", f"measure.start_s={start_s}")
        cwd = tmp_path_factory.mktemp("hangs")
        running.append(start(cwd, program, {"env.FAULT": [*faults, "healthy"]}, *limits, starter=starter))
    try:
        for study in running:
            study.finish()
    finally:
        for study in running:
            study.process.terminate()
            study.process.wait()
    trials = {}
    for study in running:
        for trial in study.summary()["trials"][1:]:
            trials.setdefault(trial["knobs"]["env.FAULT"], (study, trial))
    return running, trials


@pytest.mark.parametrize("fault", HANGS)
def test_a_hang_is_a_timeout_whose_reason_names_the_place(studies, fault):
    study, trial = studies[1][fault]
    kind, reason = HANGS[fault]
    assert trial["outcome"] == "timeout", trial["reason"]
    assert re.search(reason, trial["reason"]), trial["reason"]
    assert study.record(trial["number"])["evidence"]["hang"]["kind"] == kind


def test_a_study_with_hanging_trials_measures_the_others_and_reaches_a_verdict(studies):
    for study in studies[0]:
        summary = study.summary()
        assert summary["status"] == "complete"
        assert summary["speedup"]["verdict"]  # usually "same", since these ranks do not differ in speed
        outcomes = {trial["knobs"].get("env.FAULT"): trial["outcome"] for trial in summary["trials"]}
        assert (outcomes[""], outcomes["healthy"]) == ("ok", "ok")


def test_hanging_trials_leave_no_process(studies):
    for study in studies[0]:
        assert study.left_running() == []
