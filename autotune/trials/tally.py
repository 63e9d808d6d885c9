"""Keeps statistics of a study's search trials, so that the time of a look-up does not grow with the number of trials."""

from __future__ import annotations

import bisect
from collections.abc import Iterable

from autotune.records import Kind, Outcome, Tier, TrialRecord


class Tally:
    """Statistics of a study's search trials and baseline.

    A record must not change after it was added. If loss parity rules out a trial, a new tally is needed.

    Attributes:
        num_over: number of trials that were not interrupted, including the baseline.
        seconds: durations of the search trials that were not interrupted, ascending.
        has_worked: whether a search trial was measured or ran out of memory.
        best_changed: highest score of a search trial that changes something and may win; None without one.

    Args:
        records: the trials so far.
    """

    def __init__(self, records: Iterable[TrialRecord] = ()) -> None:
        self.num_over, self.seconds, self.has_worked = 0, list[float](), False
        self.best_changed: float | None = None
        self._best: list[TrialRecord] = []  # the best trial for each objective
        self._worst: dict[int, list[float]] = {}  # n -> the lowest score for each objective, of trials with n scores
        self._proven_per_s: dict[tuple[Tier, bool], float] = {}
        for record in records:
            self.add(record)

    def add(self, record: TrialRecord) -> None:
        """Adds a finished trial."""
        if record.outcome is not Outcome.interrupted:
            self.num_over += 1
            if record.kind is Kind.search:
                bisect.insort(self.seconds, record.seconds)
        self.has_worked |= record.kind is Kind.search and (record.outcome.has_value or record.outcome.is_memory)
        self._add_scores(record)
        if record.outcome.may_win and record.ci:
            key = record.tier, bool(record.neighbours)
            self._proven_per_s[key] = max(record.ci[0], self._proven_per_s.get(key, record.ci[0]))

    def _add_scores(self, record: TrialRecord) -> None:
        scores = list(record.scores.values()) or [record.value]
        known = [score for score in scores if score is not None]
        if known:
            self._worst[len(known)] = list(map(min, known, self._worst.get(len(known), known)))
        if not record.outcome.may_win or record.score is None:
            return
        if record.kind is Kind.search and record.changed and (self.best_changed is None or record.score > self.best_changed):
            self.best_changed = record.score
        for turn in range(len(scores)):
            if turn == len(self._best):
                self._best.append(record)
            elif _rank(record, turn) > _rank(self._best[turn], turn):
                self._best[turn] = record

    def best(self, turn: int) -> TrialRecord | None:
        """Returns the trial with the highest score for objective number `turn`, from 0; None if no trial has a score."""
        return self._best[turn] if turn < len(self._best) else None

    def worst(self, num: int) -> list[float]:
        """Returns the lowest score of any trial for each of `num` objectives; [] if no trial has all `num` scores."""
        return list(self._worst.get(num, []))

    def proven_per_s(self, tier: Tier, *, has_neighbours: bool) -> float | None:
        """Returns the highest lower end of the rates' intervals: 85 for [85, 95] and [84, 100]; None without intervals.

        Args:
            tier: the highest tier that counts.
            has_neighbours: True for the trials that ran in parallel with others, False for those that ran alone.
        """
        found = [
            rate for (own, beside), rate in self._proven_per_s.items() if beside == has_neighbours and own.rank <= tier.rank
        ]
        return max(found, default=None)


def _rank(record: TrialRecord, turn: int) -> tuple[float, int]:
    """Returns a sort key that is larger for a better trial. Of trials with equal scores, the first counts as better."""
    scores = list(record.scores.values()) or [record.value]
    return scores[turn] or 0.0, -record.number
