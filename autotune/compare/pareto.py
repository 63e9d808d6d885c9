"""Finds the Pareto front of a study with several objectives: trials that no other trial beats at every objective."""

from __future__ import annotations

from collections.abc import Sequence

from autotune.records import Outcome, TrialRecord
from autotune.stats import MARGIN_FRAC
from autotune.trials.session import Session

FRONT = "Pareto front"  # the `why` of a trial that measures a point of the front again
MAX_POINTS, ROUNDS = 3, 3  # maximum number of points to measure again, and how often to measure each


def front(records: Sequence[TrialRecord], names: Sequence[str]) -> list[TrialRecord]:
    """Returns the first measurements of the trials on the front, best at the deciding objective first.

    A trial is added only if it beats each trial already on the front by more than the margin at some objective, since a single
    measurement is noisy.

    Args:
        records: trials, by number. Trials that violated a constraint in any measurement are left out.
        names: objectives, the deciding one first.
    """
    barred = {record.repeats for record in records if record.outcome is Outcome.infeasible}
    able = [r for r in records if r.repeats is None and r.outcome.may_win and r.number not in barred]
    able = [r for r in able if all(r.scores.get(name) for name in names)]
    found: list[TrialRecord] = []
    for record in sorted(able, key=lambda r: (-(r.score or 0.0), len(r.changed))):
        if all(_is_better_somewhere(record, other, names) for other in found):
            found.append(record)
    return found


def _is_better_somewhere(record: TrialRecord, other: TrialRecord, names: Sequence[str]) -> bool:
    return any((record.scores[name] or 0.0) > (other.scores[name] or 0.0) * (1 + MARGIN_FRAC) for name in names)


def measured_again(point: TrialRecord, records: Sequence[TrialRecord]) -> list[TrialRecord]:
    """Returns the trials that measured a point of the front again."""
    return [r for r in records if r.why == FRONT and r.repeats == point.number and r.score is not None]


def confirm_front(session: Session, reported: set[int]) -> None:
    """Measures points of the front again while there is time, since a rate that was measured only once may be too high.

    Leaves out trials whose numbers are in `reported`, since the finals measured them again already.
    """
    names = session.runner.goal.names
    found = [point for point in front(session.records, names) if point.changed and point.number not in reported]
    points = _most_informative(found, names[1:])
    for index in range(ROUNDS):
        for point in points:
            if len([r for r in session.records if r.why == FRONT and r.repeats == point.number]) > index:
                continue  # measured by an earlier run of the study
            if min(point.seconds + point.spared_s, session.costs.again_s(point.knobs, point.changed)) > session.budget.left_s:
                return
            session.measure_again(point, round_number=index + 1, rules=session.inputs.config.measure.finals, why=FRONT)


def _most_informative(points: Sequence[TrialRecord], names: Sequence[str]) -> list[TrialRecord]:
    """Returns up to MAX_POINTS points: first the best at each secondary objective, then the others.

    Of the others, those that are worst at the deciding objective come first, because they differ most from the winner.
    """
    best = [max(points, key=lambda point: point.scores[name] or 0.0) for name in names] if points else []
    distinct = {point.number: point for point in [*best, *reversed(points)]}
    return list(distinct.values())[:MAX_POINTS]
