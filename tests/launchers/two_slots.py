"""A study on two slots of an engine: its search runs on both at once, and its finals on one."""

from __future__ import annotations

from tests.faults.quick_study import QuickStudy

GIVEN = ("launch.slots=2", "study.budget.minutes=8", "study.budget.trials=20", "measure.quiet=false", "explain.auto=false")


def check_two_slots(study: QuickStudy, *overrides: str) -> None:
    """Runs a study on two slots, and checks where its trials ran.

    Args:
        study: the study, not started yet.
        overrides: keys that choose the engine.
    """
    out, err = study.start(*overrides, *GIVEN).communicate(timeout=500)
    assert "verdict" in out, err
    assert "trials run on nodes " in err
    assert "2 trials at a time: in parallel with 1 other, a trial ran at 1.000 of its rate alone" in out
    trials = study.folder.read_trials()
    by_kind = {
        kind: {trial.evidence["node"]["job"] for trial in trials if trial.kind.value == kind} for kind in ("search", "final")
    }
    assert len(by_kind["search"]) == 2
    assert len(by_kind["final"]) == 1
    assert {trial.neighbours for trial in trials if trial.kind.value == "search"} >= {1}
    assert study.none_is_left()
