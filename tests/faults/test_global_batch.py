"""With a fixed global batch, other batch sizes make the same steps, their losses are compared, and one of them wins."""

import pytest

from tests.faults.trial_studies import start

pytestmark = pytest.mark.thorough


def test_a_batch_size_wins_with_a_fixed_global_batch_and_passes_loss_parity(tmp_path):
    space = {"loader.batch_size": [8, 24, 32]}
    study = start(tmp_path, "fixed_cost.py", space, "study.budget.minutes=null", "train.global_batch=32")
    study.finish()
    summary = study.summary()
    searched = [trial for trial in summary["trials"] if trial["kind"] in ("baseline", "search")]
    assert [(trial["knobs"]["loader.batch_size"], trial["knobs"]["step.accumulation"]) for trial in searched] == [
        (8, 4),
        (32, 1),
    ]
    assert summary["best"]["overrides"] == {"loader.batch_size": 32}
    assert summary["best_by_tier"]["numerics"]["trial"] == summary["best"]["trial"]
    assert summary["parity"]["verdict"] == "passed"
    runs = [study.record(trial["number"]) for trial in summary["trials"] if trial["kind"] == "parity"]
    assert [len(run["losses"]) for run in runs] == [40, 40]
    assert runs[0]["losses"] == pytest.approx(runs[1]["losses"], rel=1e-3)
    best = next(tmp_path.glob("runs/*/best.yaml")).read_text()
    assert "batch_size: 32" in best
    assert "accumulation:" not in best  # one batch is the whole global batch
