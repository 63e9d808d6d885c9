"""Mirrors a study folder into MLflow: one parent run a study, one child run a trial. The only module that uses MLflow.

It runs in the process of `autotune sync`, beside the tuner: importing MLflow costs two seconds, a fresh SQLite store five,
and a server that is down blocks for minutes by default. What is already there is asked of MLflow itself, by tags, so the
mirror survives kills, lost state and a changed server, and a second sync writes nothing.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from autotune.errors import BadInput
from autotune.monitors import logs
from autotune.records import StudyRecord, Summary, TrialRecord
from autotune.run_dir import StudyFolder, read_json
from autotune.trackers import entries, store
from autotune.trackers.base import NullTracker, Synced, Tracker
from autotune.wording import masked

EXPERIMENT = "autotune"
# Short, because the study folder keeps everything: what does not get through now goes at the next sync.
CLIENT_ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "5",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
LOG_TAIL_BYTES = 64 * 1024
PARAMS_A_BATCH = 100
POLL_S = 1.0
LONGEST_PAUSE_S = 30.0


def sync(
    folder: StudyFolder, uri: str | None = None, *, follow: bool = False, report: Callable[[Synced], None] = lambda _: None
) -> Synced:
    """Mirrors a study folder into a tracking store, and returns where the mirror stands.

    Args:
        folder: the study.
        uri: tracking address; None for the study's `tracker.uri`, else MLFLOW_TRACKING_URI, else the embedded store.
        follow: go on as the study runs, until it is over or the process that started this one is gone.
        report: is told whenever something was written or could not be.

    Raises:
        BadInput: the folder is not a study, or the address cannot be meant.
    """
    parent = os.getppid()  # asked before the seconds that importing MLflow takes
    runs = folder.path.parent
    address = store.chosen_uri(runs, asked=uri, folder=folder)
    tracker = NullTracker() if address == store.NONE else MlflowTracker(address, runs)
    with store.only_writer(folder) as is_alone:
        if not is_alone:
            return Synced(problem="another `autotune sync` of this study is at work", uri=masked(address))
        return _follow(tracker, folder, report, parent) if follow else tracker.push(folder)


def _follow(tracker: Tracker, folder: StudyFolder, report: Callable[[Synced], None], parent: int) -> Synced:
    seen, state, pause_s, next_try = None, Synced(), POLL_S, 0.0
    while True:
        is_over = _is_over(folder) or os.getppid() != parent
        now, found = time.monotonic(), _signature(folder)
        if (found != seen or not state.is_complete) and (now >= next_try or is_over):
            state, seen = tracker.push(folder), found
            pause_s = POLL_S if state.is_complete else min(2 * pause_s, LONGEST_PAUSE_S)
            next_try = time.monotonic() + pause_s
            report(state)
        if is_over:  # read before the push: nothing can have come after it
            return state
        time.sleep(POLL_S)


def _is_over(folder: StudyFolder) -> bool:
    return bool(_summary(folder).get("status", "running") != "running")


def _signature(folder: StudyFolder) -> tuple[int, int]:
    try:
        changed = folder.summary_file.stat().st_mtime_ns
    except OSError:
        changed = 0
    return changed, sum(1 for _ in folder.path.glob("trials/[0-9]*/trial.json"))


class MlflowTracker(Tracker):
    """Writes to one MLflow store, embedded or a server."""

    def __init__(self, uri: str, runs: Path) -> None:
        for name, value in CLIENT_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        self.uri = uri
        self._runs = runs
        self._is_embedded = uri == store.embedded_uri(runs)
        self._client: Any = None
        self._experiment_id = ""
        self._known: dict[str, Any] | None = None  # autotune.trial -> run, "" -> the parent; None = ask MLflow

    def push(self, folder: StudyFolder) -> Synced:
        """Writes what the folder has and MLflow lacks; see `Tracker.push`."""
        study, summary, trials = _read(folder)
        state = Synced(uri=masked(self.uri))
        try:
            self._connect()
            parent_id = self._parent(study, summary)
            for trial in trials:
                state.pending.append(trial.number)
                if self._write_trial(folder, study, trial, parent_id):
                    state.written += 1
                else:
                    state.present += 1
                state.pending.pop()
            self._write_study(folder, study, summary, trials)
        except BadInput:
            raise
        except Exception as error:  # MLflow lets through what requests, SQLAlchemy and the file system raise
            self._known = None
            done = state.written + state.present
            state.pending = [trial.number for trial in trials[done:]]
            state.problem = masked(_problem(error))
        return state

    def _connect(self) -> None:
        if self._client is not None:
            return
        import mlflow
        from mlflow.exceptions import MlflowException

        logging.getLogger("alembic").setLevel(logging.WARNING)
        logging.getLogger("mlflow").setLevel(logging.ERROR)
        if self._is_embedded:
            store.ensure_store(self._runs, self._make_store)
        try:
            client = mlflow.MlflowClient(tracking_uri=self.uri)
            self._experiment_id = self._experiment(client)
        except MlflowException as error:
            if "://" not in self.uri or "unsupported uri" in str(error).lower():
                allowed = "Allowed: http://HOST:PORT, https://..., sqlite:///FILE, databricks, or none"
                raise BadInput(f"tracker.uri: not a tracking address, got {masked(self.uri)!r}. {allowed}.") from error
            raise
        self._client = client

    def _make_store(self, uri: str) -> None:
        from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

        open_store: Any = SqlAlchemyStore  # has no annotations
        made = open_store(uri, store.artifacts_path(self._runs).as_uri())
        made.engine.dispose()  # the file is renamed next: no connection may still hold the temporary name

    def _experiment(self, client: Any) -> str:
        found = client.get_experiment_by_name(EXPERIMENT)
        if found is not None:
            return str(found.experiment_id)
        location = store.artifacts_path(self._runs).as_uri() if self._is_embedded else None
        try:
            return str(client.create_experiment(EXPERIMENT, artifact_location=location, tags=entries.experiment_tags()))
        except Exception:  # another study's process was quicker
            if (found := client.get_experiment_by_name(EXPERIMENT)) is None:
                raise
            return str(found.experiment_id)

    def _parent(self, study: StudyRecord, summary: Summary) -> str:
        if self._known is None:
            self._known = self._ask(study)
        if "" not in self._known:
            self._known[""] = self._client.create_run(
                self._experiment_id,
                start_time=_milliseconds(study.started_at),
                tags=entries.study_tags(study, summary),
                run_name=study.name,
            )
        return str(self._known[""].info.run_id)

    def _ask(self, study: StudyRecord) -> dict[str, Any]:
        found: dict[str, Any] = {}
        words, token = f"tags.`{entries.STUDY_TAG}` = '{entries.study_id(study)}'", None
        while True:
            page = self._client.search_runs([self._experiment_id], words, max_results=500, page_token=token)
            found |= {run.data.tags.get(entries.TRIAL_TAG, ""): run for run in page}
            token = page.token
            if not token:
                return found

    def _write_trial(self, folder: StudyFolder, study: StudyRecord, trial: TrialRecord, parent_id: str) -> bool:
        """Writes one trial unless MLflow has it whole; its digest goes last but one, its end last."""
        tags = entries.trial_tags(trial, study, _nonce(folder, trial))
        content = entries.digest([trial.as_json(), entries.study_id(study)])
        known = self._known if self._known is not None else {}
        run = known.get(tags[entries.TRIAL_TAG])
        if run is not None and run.data.tags.get(entries.DIGEST_TAG) == content and run.info.status != "RUNNING":
            return False
        if run is None:
            run = self._client.create_run(
                self._experiment_id,
                start_time=_milliseconds(trial.started_at),
                tags=tags | {"mlflow.parentRunId": parent_id},
                run_name=entries.trial_name(trial),
            )
            known[tags[entries.TRIAL_TAG]] = run
        end = _milliseconds(trial.started_at + trial.seconds)
        self._upload_trial(run.info.run_id, folder.trial_path(trial.number))
        metrics, params = entries.trial_metrics(trial), entries.params(trial.knobs)
        self._log(run.info.run_id, metrics=metrics, params=params, tags=tags | {entries.DIGEST_TAG: content}, at=end)
        self._client.set_terminated(run.info.run_id, entries.trial_status(trial), end)
        known[tags[entries.TRIAL_TAG]] = self._client.get_run(run.info.run_id)
        return True

    def _upload_trial(self, run_id: str, path: Path) -> None:
        for file in sorted([path / "spec.json", path / "trial.json", *path.glob("result.rank*.json")]):
            if file.exists():
                self._client.log_artifact(run_id, str(file))
        for file in (path / "stdout.log", path / "stderr.log"):
            if file.exists() and (tail := _tail(file)):
                self._client.log_text(run_id, tail, f"{file.stem}.tail.txt")

    def _log(
        self, run_id: str, *, metrics: Mapping[str, float], params: Mapping[str, str], tags: Mapping[str, str], at: int
    ) -> None:
        from mlflow.entities import Metric, Param, RunTag

        pairs = [Param(key, value) for key, value in params.items()]
        for start in range(PARAMS_A_BATCH, len(pairs), PARAMS_A_BATCH):  # rare: a program with more than 100 knobs
            self._client.log_batch(run_id, params=pairs[start : start + PARAMS_A_BATCH])
        points = [Metric(key, value, at, 0) for key, value in metrics.items()]  # a fixed time: written twice it is one point
        marks = [RunTag(key, value) for key, value in tags.items()]
        self._client.log_batch(run_id, metrics=points, params=pairs[:PARAMS_A_BATCH], tags=marks)

    def _write_study(self, folder: StudyFolder, study: StudyRecord, summary: Summary, trials: list[TrialRecord]) -> None:
        known = self._known if self._known is not None else {}
        content, run = entries.digest([summary, len(trials)]), known[""]
        if run.data.tags.get(entries.DIGEST_TAG) == content:
            return
        run_id, status = run.info.run_id, entries.STUDY_STATUSES.get(summary.get("status", "running"), "FINISHED")
        end = _milliseconds(study.started_at + float((summary.get("seconds") or {}).get("total") or 0.0))
        self._log_curve(run_id, trials)
        files = (folder.study_file, folder.summary_file, folder.best_file, folder.config_file)
        if status == "RUNNING":
            self._client.update_run(run_id, status="RUNNING")  # resumed
        else:
            for file in files:
                if file.exists():
                    self._client.log_artifact(run_id, str(file))
        tags = entries.study_tags(study, summary) | {entries.DIGEST_TAG: content}
        self._log(run_id, metrics=entries.study_metrics(summary), params={}, tags=tags, at=end)
        if status != "RUNNING":
            self._client.set_terminated(run_id, status, end)
        known[""] = self._client.get_run(run_id)

    def _log_curve(self, run_id: str, trials: list[TrialRecord]) -> None:
        from mlflow.entities import Metric

        ends = {trial.number: _milliseconds(trial.started_at + trial.seconds) for trial in trials}
        points = [Metric("best_so_far_per_s", rate, ends[n], n) for n, rate in entries.best_so_far(trials)]
        if points:
            self._client.log_batch(run_id, metrics=points[-1000:])


def _read(folder: StudyFolder) -> tuple[StudyRecord, Summary, list[TrialRecord]]:
    try:
        return folder.read_study(), _summary(folder), folder.read_trials()
    except (OSError, ValueError) as error:
        problem = f"{folder.study_file}: not a study this version can read, got {_first_line(error)}."
        raise BadInput(f"{problem} Give a study's name; see `autotune list`.") from error


def _summary(folder: StudyFolder) -> Summary:
    try:
        return folder.read_summary()
    except (OSError, ValueError):  # none yet
        return {}


def _nonce(folder: StudyFolder, trial: TrialRecord) -> str:
    try:
        return str(read_json(folder.trial_path(trial.number) / "spec.json")["nonce"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _tail(file: Path) -> str:
    return logs.mask(logs.tail(file, LOG_TAIL_BYTES))


def _milliseconds(seconds: float) -> int:
    return int(seconds * 1000)


def _problem(error: Exception) -> str:
    text = str(error)
    if "Max retries exceeded" in text or "Connection" in text:
        return "no answer"
    return _first_line(error)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
