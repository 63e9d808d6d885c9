"""A program whose own loss diverges is still measured, and the study says that losses cannot be compared."""

import re

import pytest

from tests.faults.trial_studies import start

pytestmark = pytest.mark.thorough


def test_a_program_whose_loss_diverges_gets_a_verdict_and_a_note(tmp_path):
    study = start(tmp_path, "runaway.py", {"precision.amp": ["off", "bf16"]}, "study.budget.minutes=null")
    study.finish()
    summary = study.summary()
    assert summary["status"] == "complete"
    assert "nonfinite" not in summary["counts"]
    assert study.record(0)["losses"][-1] is None
    words = (
        r"program's own loss is not finite \(from step \d+ on, in the baseline itself\): losses cannot be compared, so changes"
    )
    assert re.search(rf"^note  The {words}", study.said, re.MULTILINE)
    assert re.search(rf"^not finite  the {words} of numerics are `not checked`", study.said, re.MULTILINE)
    best = next(tmp_path.glob("runs/*/best.yaml")).read_text()
    assert "program's own loss is not finite" in best
