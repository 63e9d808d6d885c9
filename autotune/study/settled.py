"""Records which configurations need no trial: those that were measured, that run now, or that another trial rules out."""

from __future__ import annotations

import re
from collections import Counter

from autotune.compare.parity import Parity
from autotune.errors import NothingWorked
from autotune.records import Knobs, KnobValue, TrialRecord
from autotune.study.culprits import Culprits
from autotune.study.initial import Proposal
from autotune.study.oom_frontier import Frontier
from autotune.study.resuming import was_stopped
from autotune.trials.configurations import ConfigurationKey, configuration_key
from autotune.trials.session import Session
from autotune.wording import log_lines

# The search gives up once at least this many trials have all failed for the same reason (other than memory), unless they share
# a change.
NUM_SAME_FAILURES = 4
MAX_CHANCES = 2  # attempts at a configuration whose trials are disturbed or cut off; a third would probably fare no better


class Settled:
    """The configurations of a search that need no trial.

    Attributes:
        pending: the proposals whose trials are running, by configuration.
    """

    def __init__(self, session: Session, parity: Parity, culprits: Culprits) -> None:
        self._session, self._space = session, session.resolved
        self._parity, self._culprits = parity, culprits
        self._is_grid = session.inputs.config.search.sampler == "grid"
        self.pending: dict[ConfigurationKey, Proposal] = {}
        self._known: dict[ConfigurationKey, TrialRecord] = {}
        self._chances: Counter[ConfigurationKey] = Counter()
        self._frontier = Frontier(session.about.warm_start.get("out_of_memory", []))

    def note(self, record: TrialRecord) -> None:
        """Marks a configuration as tried if its trial gave an answer, or if MAX_CHANCES trials were disturbed or cut off."""
        key = configuration_key(record.changed)
        if record.outcome.is_no_answer and not was_stopped(record):
            self._chances[key] += 1
        if not record.outcome.is_no_answer or self._chances[key] >= MAX_CHANCES:
            self._known[key] = record
        self._culprits.learn(record)

    def own_trial(self, changed: Knobs) -> TrialRecord | None:
        """Returns the trial after which a configuration counts as tried (see `note`); None if there is none."""
        return self._known.get(configuration_key(changed))

    def is_measured(self, key: str, value: KnobValue) -> bool:
        """Whether a configuration that counts as tried changes this knob to this value."""
        return any(record.changed.get(key) == value for record in self._known.values())

    def is_known(self, knobs: Knobs) -> bool:
        """Whether a configuration needs no trial: it was measured, it runs now, or another trial rules it out."""
        changed = self._space.changed(knobs)
        return configuration_key(changed) in self.pending or self.known_as(knobs, changed) is not None

    def known_as(self, knobs: Knobs, changed: Knobs) -> TrialRecord | None:
        """Returns the trial of this configuration, or a trial that rules it out; None if it has to be measured."""
        own = self.own_trial(changed) or self._parity.barring(changed) or self._frontier.beyond(knobs)
        return own or (None if self._is_grid else self._culprits.barring(changed))

    def check_failures(self) -> None:
        """Raises NothingWorked if at least NUM_SAME_FAILURES trials all failed for the same reason and share no change."""
        if self._session.tally.has_worked:
            return
        tried = [record for record in self._session.searched[1:] if not record.outcome.is_no_answer]
        if len(tried) < NUM_SAME_FAILURES:
            return
        if len({(record.outcome, re.sub(r"\d+", "#", record.reason)) for record in tried}) > 1:
            return
        if frozenset.intersection(*(configuration_key(record.changed) for record in tried)):
            return  # they share a change, which may be the cause
        last, path = tried[-1], self._session.folder.trial_path(tried[-1].number)
        failed = f"search: the first {len(tried)} configurations all failed for the same reason"
        lines = [f"{failed}, got {last.outcome}: {last.reason}."]
        lines += log_lines(last.evidence)
        lines.append(f"All measurements are kept. The output of the last trial is in {path}.")
        raise NothingWorked("\n".join(lines))
