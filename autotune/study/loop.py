"""Runs a study: baseline, search, finals; after every trial the summary is on disk."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
import subprocess
from typing import Any

import optuna

import autotune
from autotune.errors import NothingWorked
from autotune.export import export
from autotune.harness.protocol import RankResult
from autotune.machine import circumstances, fingerprint
from autotune.monitors.sealing import seal_leftovers
from autotune.records import StudyRecord, Summary, TrialRecord
from autotune.run_dir import StudyFolder
from autotune.space import resolve
from autotune.study.budget import Budget, Costs
from autotune.study.finals import Decision, Finals
from autotune.study.interrupts import Interrupts
from autotune.study.plan import Listener, Plan, Tracking
from autotune.study.proposals import Search
from autotune.study.session import Ending, Session
from autotune.study.settings import capacity_bytes, memory_cap_bytes
from autotune.study.summary import Standing, summarise
from autotune.study.trial import TrialRunner
from autotune.trackers.sync import incomplete

LOG_TAIL_LINES = 15
QUIET_DRAIN_S = 5.0  # the tracker may catch up without a word for this long


def run_study(plan: Plan, folder: StudyFolder, listener: Listener) -> Summary:
    """Runs a study to its verdict and returns its summary; everything in it is on disk by then.

    An interrupt is no exception here: the summary's status is "interrupted" and holds what there is.

    Args:
        plan: what to do.
        folder: the study's folder, as `run_dir.create` made it.
        listener: whom to tell.

    Raises:
        NothingWorked: the program does not train as it is run today; says why, with the end of its log.
    """
    with Interrupts(listener.notice) as interrupts:
        return _Study(plan, folder, listener, interrupts).run()


class _Study:
    """One run from start to end; the parts do the work, this holds their order."""

    def __init__(self, plan: Plan, folder: StudyFolder, listener: Listener, interrupts: Interrupts) -> None:
        budget = plan.config.study.budget
        self._plan, self._folder, self._listener = plan, folder, listener
        self._budget = Budget(
            clock=plan.clock,
            total_s=None if budget.minutes is None else budget.minutes * 60,
            max_trials=budget.trials,
        )
        self._session = Session(
            plan=plan,
            folder=folder,
            listener=listener,
            interrupts=interrupts,
            runner=TrialRunner(plan, folder, listener),
            budget=self._budget,
            about=_about(plan, folder, self._budget.total_s),
            after_trial=self._note_progress,
        )
        self._decision: Decision | None = None
        self._finals: Finals | None = None

    def run(self) -> Summary:
        tracking = self._open()
        try:
            status, reason = self._trials()
        except (Ending, KeyboardInterrupt):
            status, reason = "interrupted", "stopped by the user"
        except NothingWorked as failure:
            self._close(self._write("failed", str(failure).partition("\n")[0]), tracking)
            raise
        except BaseException as fault:  # a fault of ours: say so on disk, then let it be seen
            self._write("failed", self._plan.secrets.text(f"internal error: {fault!r}"))
            if tracking:
                tracking.terminate()
            raise
        if self._finals and self._decision is None:  # ended by the user in the middle of the finals
            self._decision = self._finals.decision if self._finals.decision.finalist else None
        return self._close(self._write(status, reason), tracking)

    def _open(self) -> Tracking | None:
        self._folder.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._folder.config_file.write_text(self._plan.yaml, encoding="utf-8")
        self._folder.write_study(self._session.about)
        self._write("running")
        for line in self._plan.launcher.sweep(self._folder.path):
            self._listener.notice(self._plan.secrets.text(line))
        seal_leftovers(self._folder.path, self._plan.secrets)
        self._listener.started(self._session.about)
        try:
            return self._plan.start_tracking(self._folder) if self._plan.start_tracking else None
        except OSError as error:  # no process to be had, a full disk
            self._listener.notice(incomplete(self._folder, f"it could not be started ({error.strerror})"))
            return None

    def _trials(self) -> tuple[str, str]:
        self._baseline()
        ended_because = Search(self._session).run()
        self._finals = Finals(self._session)
        self._decision = self._finals.run()
        return "complete", ended_because

    def _baseline(self) -> None:
        session, plan = self._session, self._plan
        results = session.measure_baseline()
        record = session.baseline
        if not record.outcome.has_value or record.value is None:
            raise NothingWorked(_why_nothing(record, self._folder))
        first = results[0]
        session.circumstances = circumstances(plan.machine, first, is_recipe=plan.command.is_recipe)
        session.target = first.target
        session.space = resolve(plan.space, session.circumstances, passed=plan.command.placeholders)
        session.costs = Costs(frozenset(key for _, key, _ in session.space.costly()))
        session.costs.learn(record)
        session.memory_capacity_bytes = _capacity_bytes(plan, first)
        session.about = _about(plan, self._folder, self._budget.total_s, session=session, first=first)
        record.knobs = session.space.baseline  # what the program does by itself is known only now
        self._budget.reserve(record)
        self._folder.write_trial(record)
        self._folder.write_study(session.about)
        self._write("running")
        self._listener.started(session.about)

    def _write(self, status: str, reason: str = "") -> Summary:
        standing = Standing(status=status, reason=reason, seconds=self._budget.spent_s, decision=self._decision)
        # Through JSON, so that the document handed over is the one on disk, tuples and all.
        summary: Summary = json.loads(json.dumps(summarise(self._session.about, self._session.records, standing)))
        self._folder.write_summary(summary)
        if summary["best"]:
            self._folder.best_file.write_text(export(summary, "yaml", None), encoding="utf-8")
        return summary

    def _note_progress(self) -> None:
        self._write("running")

    def _close(self, summary: Summary, tracking: Tracking | None) -> Summary:
        self._plan.launcher.close()
        self._session.runner.close()
        self._listener.finished(summary)
        if tracking and (why := self._drain(tracking)):
            self._listener.notice(incomplete(self._folder, why))
        return summary

    def _drain(self, tracking: Tracking) -> str:
        """Waits for the tracker to catch up, and returns why it did not; it reads the summary's status and ends by itself."""
        quiet_s, total_s = min(QUIET_DRAIN_S, self._plan.tracking_drain_s), self._plan.tracking_drain_s
        try:
            try:
                code = tracking.wait(timeout=quiet_s)
            except subprocess.TimeoutExpired:
                self._listener.notice(f"Waiting for the tracker to catch up, {total_s:.0f} s at most; Ctrl-C skips it.")
                code = tracking.wait(timeout=total_s - quiet_s)
        except subprocess.TimeoutExpired:
            tracking.terminate()
            return f"not done after {total_s:.0f} s"
        except KeyboardInterrupt:
            tracking.terminate()
            return "skipped"
        return f"see {self._folder.path / 'tracking.log'}" if code else ""


def _about(
    plan: Plan, folder: StudyFolder, budget_s: float | None, *, session: Session | None = None, first: RankResult | None = None
) -> StudyRecord:
    """Returns study.json: before the baseline with the space as asked for, after it with the space as it is searched."""
    facts = {**plan.machine, **(first.facts if first else {})}
    asked = {key: domain.as_json() if domain else {"auto": True} for key, domain in plan.space.domains.items()}
    space = session.space.as_json() if session and session.space else asked
    versions = {"autotune": autotune.__version__, "optuna": optuna.__version__, "python": platform.python_version()}
    versions |= plan.versions
    if first and first.facts.get("torch"):
        versions["torch"] = str(first.facts["torch"])
    return StudyRecord(
        name=folder.name,
        title=plan.title,
        command=plan.secrets.words(plan.command.parts),
        cwd=plan.command.cwd,
        objective=plan.config.objective,
        fingerprint=_fingerprint(plan, facts, space),
        space=space,
        pinned=plan.space.pinned,
        machine=facts,
        versions=versions,
        started_at=session.about.started_at if session else plan.clock.time(),
        budget_s=budget_s,
        budget_trials=plan.config.study.budget.trials,
    )


def _fingerprint(plan: Plan, facts: dict[str, Any], space: dict[str, Any]) -> str:
    """Returns a hash over program, space, objective and machine: only results under one hash may be compared."""
    parts = {
        "machine": fingerprint(facts),
        "command": plan.secrets.words(plan.command.parts),
        "pinned": plan.space.pinned,
        "space": space,
        "objective": plan.config.objective,
        "device": dataclasses.asdict(plan.config.device),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _capacity_bytes(plan: Plan, first: RankResult) -> int | None:
    limit = memory_cap_bytes(plan.config.device, plan.machine)
    known = first.memory.get("capacity_bytes") or first.facts.get("device_memory_bytes")
    return limit or (int(known) if known else capacity_bytes(plan.machine))


def _why_nothing(record: TrialRecord, folder: StudyFolder) -> str:
    error = record.evidence.get("error") or {}
    tail = str(error.get("traceback") or record.evidence.get("log_tail") or "").rstrip().splitlines()[-LOG_TAIL_LINES:]
    lines = [f"baseline: the program does not train as it is run today, got {record.outcome}: {record.reason}."]
    lines += [f"  | {line}" for line in tail]
    lines.append(f"Make it train for a few steps first; its output is in {folder.trial_path(0)}.")
    return "\n".join(lines)
