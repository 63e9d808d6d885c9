"""A configuration that is faster because it computes something else cannot win: real programs with a planted error."""

import re

import pytest

from tests.faults.trial_studies import start

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def divergent(tmp_path_factory):
    """Returns a study of a program that is four times as fast in 16 bits but computes wrongly there, and its summary."""
    space = {"precision.amp": ["off", "bf16"], "env.PRECISION": ["", "fp16"]}
    study = start(tmp_path_factory.mktemp("divergent"), "divergent.py", space, "study.budget.minutes=null")
    study.finish()
    return study, study.summary()


def by_knobs(summary, amp, precision):
    """Returns the search trial with these two values."""
    return next(
        trial
        for trial in summary["trials"]
        if trial["kind"] in ("baseline", "search")
        and (trial["knobs"]["precision.amp"], trial["knobs"]["env.PRECISION"]) == (amp, precision)
    )


def test_faster_bf16_cannot_win_if_the_loss_diverges(divergent):
    _, summary = divergent
    bf16, baseline = by_knobs(summary, "bf16", ""), by_knobs(summary, "off", "")
    assert bf16["value"] > 1.5 * baseline["value"]
    assert bf16["outcome"] == "parity"
    assert re.match(r"bf16: loss \S+ against \S+ after 40 steps: .* worse, tolerance .* \(trial \d+\)", bf16["reason"])
    assert summary["best"]["overrides"] == {}
    assert summary["speedup"]["reason"].endswith("others were ruled out by their losses")
    assert summary["parity"]["failed"][0]["knobs"] == {"precision.amp": "bf16"}


def test_fp16_that_overflows_is_nonfinite(divergent):
    _, summary = divergent
    for amp in ("off", "bf16"):
        trial = by_knobs(summary, amp, "fp16")
        assert trial["outcome"] == "nonfinite"
        assert trial["reason"].startswith("the loss is not finite after")


def test_parity_runs_are_recorded_with_their_losses(divergent):
    study, summary = divergent
    runs = [trial for trial in summary["trials"] if trial["kind"] == "parity"]
    assert [run["changed"] for run in runs] == [{}, {"precision.amp": "bf16"}, {}]
    assert [run["outcome"] for run in runs] == ["ok", "parity", "ok"]
    curves = [study.record(run["number"])["losses"] for run in runs]
    assert [len(curve) for curve in curves] == [40, 40, 40]
    assert curves[0][-1] < curves[0][0] / 2
    assert curves[0] != curves[2]  # another seed


def test_terminal_names_rejected_settings_and_reasons(divergent):
    study, _ = divergent
    assert re.search(r"^note  Loss parity: bf16 fails \(loss .*\)\. Ruled out with it: trial \d+", study.said, re.MULTILINE)
    assert re.search(r"^rejected  bf16: loss \S+ against \S+ after 40 steps", study.said, re.MULTILINE)


@pytest.mark.thorough
def test_harmless_bf16_wins_and_the_loss_difference_is_reported(tmp_path):
    space = {"precision.amp": ["off", "bf16"]}
    study = start(tmp_path, "divergent.py", space, "study.budget.minutes=null", arguments=("harmless",))
    study.finish()
    summary = study.summary()
    assert summary["best"]["overrides"] == {"precision.amp": "bf16"}
    assert summary["parity"]["verdict"] == "passed"
    assert re.search(r"^parity  loss within \S+ % of the baseline's loss over 40 steps", study.said, re.MULTILINE)
    best = next(tmp_path.glob("runs/*/best.yaml")).read_text()
    assert re.search(r"^# Loss parity: within", best, re.MULTILINE)
