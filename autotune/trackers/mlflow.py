"""Mirrors a study folder into MLflow: one parent run per study, one child run per trial. The only module that uses MLflow.

It runs in the process of `autotune sync`, not in the tuner, because importing MLflow takes two seconds, and creating a SQLite
store takes five. It queries MLflow for existing runs by their tags, so a later call can complete the mirror after a kill or a
change of server. If the answer to a request is lost, the server may still have carried out the request. So duplicates are
deleted afterwards, and the mirror counts as complete only after MLflow has been queried once more.
"""

from __future__ import annotations

import logging
import math
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from autotune.documents import read_bytes
from autotune.errors import BadInput
from autotune.masking import Secrets
from autotune.monitors import logs
from autotune.plain_text import shell_word
from autotune.records import TrialRecord
from autotune.run_dir import StudyFolder
from autotune.trackers import entries, metrics, probe, store, views
from autotune.trackers.base import Synced, Tracker
from autotune.trackers.contents import Cache, Contents, first_line
from autotune.trackers.known import PARENT, KnownRuns

# MLflow makes no retries: they may repeat a request that was carried out. They are not needed, because the study folder keeps
# everything for the next attempt.
CLIENT_ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
TIMEOUT_VARIABLE = "MLFLOW_HTTP_REQUEST_TIMEOUT"
LOG_TAIL_BYTES = 64 * 1024
PARAMS_A_BATCH, METRICS_A_BATCH = 100, 1000
# The check whether a store answers (probe.py) takes at most PROBE_S seconds, or KNOWN_DOWN_S if the last attempt failed. The
# last push of a study is skipped if an attempt failed less than KNOWN_DOWN_S ago.
PROBE_S, KNOWN_DOWN_S = 5.0, 2.0
# Seconds between a failed attempt and the next query: until then, MLflow may still carry out a request that got no answer.
SETTLE_S = 3.0

_STATUS = re.compile(r"too many (\d{3}) error responses|failed with error code (\d{3})")
_DRIVER = re.compile(r"\((?:\w+\.)+\w*Error\) ([^\n]+)")


class MlflowTracker(Tracker):
    """Writes to one MLflow store, either the embedded one or a server.

    Args:
        uri: tracking address, including credentials.
        runs: the runs folder, which contains the embedded store.
        experiment: name of the experiment.
        secrets: values that must not be uploaded.
        timeout_s: seconds that a server may take to answer a request.
    """

    def __init__(
        self,
        uri: str,
        runs: Path,
        *,
        experiment: str = store.EXPERIMENT,
        secrets: Secrets | None = None,
        timeout_s: float = 10.0,
    ) -> None:
        os.environ.update({**CLIENT_ENVIRONMENT, TIMEOUT_VARIABLE: str(int(timeout_s))})
        self.uri = uri
        self._runs, self._name, self._secrets = runs, experiment, secrets or Secrets.known()
        self._is_embedded = uri == store.embedded_uri(runs)
        self._client: Any = None
        self._known, self._must_query = KnownRuns([], {}), True
        self._cache, self._has_failed = Cache(), False
        self._failed_at, self._problem = -math.inf, ""

    def push(self, folder: StudyFolder, *, is_last: bool = False) -> Synced:
        """Writes what MLflow lacks; see `Tracker.push`."""
        contents = Contents.read(folder, self._cache)
        state = Synced(uri=self._secrets.text(self.uri), pending=[trial.number for trial in contents.trials])
        since_s = time.monotonic() - self._failed_at
        if is_last and since_s < KNOWN_DOWN_S:
            state.problem = self._problem
            self._count(contents, state)
            return state
        try:
            problem = probe.problem_of(self.uri, PROBE_S if since_s == math.inf else KNOWN_DOWN_S)
            if problem:
                raise _Unreachable(problem)
            self._connect()
            self._write(contents, state)
            self._failed_at = -math.inf
        except BadInput:
            raise
        except Exception as error:  # MLflow passes on errors of requests, SQLAlchemy and the file system
            self._must_query, self._failed_at, self._has_failed = True, time.monotonic(), True
            state.problem = self._problem = self._secrets.text(_problem(error))
            self._count(contents, state)
        return state

    def _count(self, contents: Contents, state: Synced) -> None:
        """Counts the trials that MLflow has, as far as its last answers show, and notes those that it lacks."""
        state.pending = [trial.number for trial in contents.trials if not self._is_there(contents, trial)]
        there = len(contents.trials) - len(state.pending)
        state.written = min(state.written, there)
        state.present = there - state.written

    def _write(self, contents: Contents, state: Synced) -> None:
        if is_first := self._must_query:
            time.sleep(max(0.0, self._failed_at + SETTLE_S - time.monotonic()))
            self._known, self._must_query = self._query_runs(contents), False
        parent_id, written = self._parent(contents), list[TrialRecord]()
        for trial in contents.trials:
            is_new = self._write_trial(contents, trial, parent_id)
            written += [trial] if is_new else []
            state.written, state.present = state.written + is_new, state.present + (not is_new)
            state.pending.remove(trial.number)
        is_new = self._write_study(contents)
        if written or is_new:
            if is_first or self._has_failed:  # requests that got no answer may have created runs as well
                self._known = self._query_runs(contents)
            else:
                self._query_written_runs(contents, written, parent_id)
            state.pending = [trial.number for trial in contents.trials if not self._is_there(contents, trial)]
            if state.pending or not self._is_study_there(contents):
                raise _Unreachable("MLflow lacks some of what was written")

    def make_store(self) -> None:
        """Makes the embedded store unless it exists, so that MLflow's pages can be shown before the first study.

        Raises:
            BadInput: it cannot be made.
        """
        try:
            self._ensure_store()
        except Exception as error:  # of SQLAlchemy, or of the file system
            problem = f"tracker.uri: the store cannot be made ({_problem(error)}), got {self.uri!r}"
            raise BadInput(f"{problem}. Make its folder writable, or give another address: --uri URI.") from error

    def _ensure_store(self) -> None:
        if self._is_embedded:
            store.ensure_store(self._runs, self._make_store)

    def _connect(self) -> None:
        if self._client is not None:
            return
        import mlflow
        from mlflow.exceptions import MlflowException

        _quiet()
        self._ensure_store()
        try:
            client = mlflow.MlflowClient(tracking_uri=self.uri)
            self._experiment_id = self._experiment(client)
        except MlflowException as error:
            if "unsupported uri" in str(error).lower():
                allowed = "Allowed: http://HOST:PORT, https://..., sqlite:///FILE, databricks, or none"
                shown = self._secrets.text(self.uri)
                raise BadInput(f"tracker.uri: not a tracking address, got {shown!r}. {allowed}.") from error
            raise
        self._client = client

    def _make_store(self, uri: str) -> None:
        from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore
        from sqlalchemy import Engine, event

        _quiet()
        # Each of fifty migrations would wait for the disk, perhaps while a trial is measured. The file has a temporary name and
        # is of no use until it is complete. So it is flushed only once, at the end, by `store.ensure_store`.
        event.listen(Engine, "connect", _do_not_wait_for_disk)
        try:
            open_store: Any = SqlAlchemyStore  # it has no type annotations
            made = open_store(uri, store.artifacts_path(self._runs).as_uri())
            made.engine.dispose()  # the file is renamed next, so no connection may stay open
        finally:
            event.remove(Engine, "connect", _do_not_wait_for_disk)

    def _experiment(self, client: Any) -> str:
        found = client.get_experiment_by_name(self._name)
        if found is None:
            location = store.artifacts_place(self.uri)
            try:
                return str(client.create_experiment(self._name, artifact_location=location, tags=dict([views.KIND])))
            except Exception:  # another study's process created it first
                if (found := client.get_experiment_by_name(self._name)) is None:
                    raise
        if found.lifecycle_stage != "active":
            place = f"{store.URI_VARIABLE}={shell_word(self._secrets.text(self.uri))}"  # otherwise MLflow uses another store
            restore = f"{place} mlflow experiments restore --experiment-id {found.experiment_id}"
            raise _Unreachable(f"the experiment {self._name!r} was deleted there; `{restore}` brings it back")
        self._check_place(found.artifact_location)
        return str(found.experiment_id)

    def _check_place(self, uri: str) -> None:
        """Checks that the embedded store keeps files in its own folder: a stranger's store may name any of the user's folders.

        Raises:
            _Unreachable: the store names another folder.
        """
        if self._is_embedded and not store.is_own_place(self._runs, uri):
            raise _Unreachable(
                f"this store keeps its files outside of the runs folder, in {uri}: the folder was moved, or another user made "
                f"the store. Remove or rename {store.store_file(self._runs)}: the next `autotune sync` makes a new one"
            )

    def _query_runs(self, contents: Contents, *, since: float | None = None) -> KnownRuns:
        """Returns the study's runs in MLflow; deletes superfluous runs there and gives orphans their parent.

        Args:
            contents: the study.
            since: only the runs of trials that began then or later, in seconds since the epoch; None for all runs.
        """
        found: list[Any] = []
        words, token = entries.search(contents.study), None
        words += "" if since is None else f" AND attributes.start_time >= {_milliseconds(since)}"
        while True:
            page = self._client.search_runs([self._experiment_id], words, max_results=500, page_token=token)
            found, token = [*found, *page], page.token
            if not token:
                break
        for run in found:
            self._check_place(run.info.artifact_uri)
        known = KnownRuns(found, {trial.number: contents.mark(trial) for trial in contents.trials})
        for run_id in known.superfluous:
            self._client.delete_run(run_id)
        for run_id in known.orphans:
            self._client.set_tag(run_id, entries.PARENT_TAG, known.run_id(PARENT))
        return known

    def _query_written_runs(self, contents: Contents, written: Sequence[TrialRecord], parent_id: str) -> None:
        """Queries MLflow for the study's own run and the trials that were just written. Other trials have not changed."""
        for trial in written:
            self._known.forget(contents.mark(trial))
        if written:
            self._known.update(self._query_runs(contents, since=min(trial.started_at for trial in written)))
        self._known.add(PARENT, self._client.get_run(parent_id))

    def _parent(self, contents: Contents) -> str:
        if PARENT not in self._known:
            study = contents.study
            tags, start = entries.study_tags(study, contents.summary), _milliseconds(study.started_at)
            self._known.add(PARENT, self._client.create_run(self._experiment_id, start, tags, tags["study"]))
        return self._known.run_id(PARENT)

    def _is_there(self, contents: Contents, trial: TrialRecord) -> bool:
        return self._known.is_done(contents.mark(trial), contents.digest(trial))

    def _write_trial(self, contents: Contents, trial: TrialRecord, parent_id: str) -> bool:
        """Writes one trial unless MLflow has it completely; returns whether it was written.

        The digest and the end of the run are written last, so a run that has both is complete.
        """
        if self._is_there(contents, trial):
            return False
        mark, params, numbers = contents.mark(trial), contents.params(trial), contents.metrics(trial)
        tags, digest = contents.tags(trial), contents.digest(trial)
        # A run whose values have changed is deleted and made anew: MLflow does not allow params to change. And of two values of
        # a metric with the same time and step, it shows the larger.
        if self._known.contradicts(mark, params, numbers):
            self._client.delete_run(self._known.run_id(mark))
            self._known.forget(mark)
        if mark not in self._known:
            made = self._client.create_run(
                self._experiment_id,
                _milliseconds(trial.started_at),
                {**tags, entries.PARENT_TAG: parent_id},
                entries.trial_name(trial),
            )
            self._known.add(mark, made)
            tags = {}  # the new run has them
        run_id, end = self._known.run_id(mark), _milliseconds(trial.started_at + trial.seconds)
        self._upload_trial(run_id, contents, contents.folder.trial_path(trial.number))
        tags[entries.DIGEST_TAG] = digest
        self._log(run_id, metrics=numbers, params=params, tags=tags, at=end)
        self._client.set_terminated(run_id, entries.trial_status(trial), end)
        self._known.done(mark, digest)
        return True

    def _upload_trial(self, run_id: str, contents: Contents, path: Path) -> None:
        for file in sorted([path / "spec.json", path / "trial.json", *path.glob("result.rank*.json")]):
            if contents.has(file):
                self._upload(run_id, file)
        for file in (path / "stdout.log", path / "stderr.log"):
            if contents.has(file) and (tail := logs.tail(file, LOG_TAIL_BYTES)):
                self._client.log_text(run_id, self._secrets.text(tail), f"{file.stem}.tail.txt")

    def _upload(self, run_id: str, file: Path, name: str = "") -> None:
        try:
            text = read_bytes(file).decode("utf-8", "replace")
        except (FileNotFoundError, ValueError):  # ValueError: a pipe or a huge file in a stranger's study
            return
        # `stored` masks only known values and credentials in URLs, so that JSON stays valid.
        self._client.log_text(run_id, self._secrets.stored(text), name or file.name)

    def _log(
        self,
        run_id: str,
        *,
        metrics: Mapping[str, float],
        params: Mapping[str, str],
        tags: Mapping[str, str],
        at: int,
    ) -> None:
        from mlflow.entities import Metric, Param, RunTag

        pairs = [Param(key, value) for key, value in params.items()]
        for start in range(PARAMS_A_BATCH, len(pairs), PARAMS_A_BATCH):  # rare: only programs with more than 100 knobs
            self._client.log_batch(run_id, params=pairs[start : start + PARAMS_A_BATCH])
        # With a fixed time, writing again adds no point. With a step above 0, MLflow would draw a curve of one point.
        points = [Metric(key, value, at, 0) for key, value in metrics.items()]
        marks = [RunTag(key, value) for key, value in tags.items()]
        self._client.log_batch(run_id, metrics=points, params=pairs[:PARAMS_A_BATCH], tags=marks)

    def _write_study(self, contents: Contents) -> bool:
        if self._is_study_there(contents):
            return False
        run_id, content = self._known.run_id(PARENT), contents.study_digest
        self._show(contents)
        self._log_curves(run_id, contents)
        if not contents.is_over:
            self._client.update_run(run_id, status="RUNNING")  # it may be a resumed study, whose run had ended
        for file, name in contents.files():
            self._upload(run_id, file, name)
        tags = entries.study_tags(contents.study, contents.summary, self._known.tags(PARENT)) | {entries.DIGEST_TAG: content}
        numbers = metrics.study_metrics(contents.summary)
        self._log(run_id, metrics=numbers, params={}, tags=tags, at=_milliseconds(contents.written_at))
        if contents.is_over:
            self._client.set_terminated(run_id, contents.status, _milliseconds(contents.ended_at))
        self._known.done(PARENT, content, is_over=contents.is_over)
        return True

    def _is_study_there(self, contents: Contents) -> bool:
        return self._known.is_done(PARENT, contents.study_digest, is_over=contents.is_over)

    def _show(self, contents: Contents) -> None:
        """Brings the experiment's pages up to date with a study's program."""
        present = self._client.get_experiment(self._experiment_id).tags
        first = next(iter(contents.trials), None)
        for key, value in views.tags(contents.study, first, self._experiment_id, present).items():
            self._client.set_experiment_tag(self._experiment_id, key, value)

    def _log_curves(self, run_id: str, contents: Contents) -> None:
        from mlflow.entities import Metric

        ends = {trial.number: _milliseconds(trial.started_at + trial.seconds) for trial in contents.trials}
        for name, points in metrics.curves(contents.trials).items():
            entities = [Metric(name, score, ends[number], number) for number, score in points]
            # While the study runs, earlier calls have already written all but the newest points.
            first = 0 if contents.is_over else max(0, len(entities) - METRICS_A_BATCH)
            for start in range(first, len(entities), METRICS_A_BATCH):
                self._client.log_batch(run_id, metrics=entities[start : start + METRICS_A_BATCH])


def _quiet() -> None:
    """Silences MLflow, because `push` returns every problem itself, without credentials. Called after MLflow's import."""
    logging.getLogger("alembic").setLevel(logging.WARNING)
    logging.getLogger("mlflow").setLevel(logging.CRITICAL)


def _do_not_wait_for_disk(connection: Any, _: Any) -> None:
    connection.execute("PRAGMA synchronous = OFF")


class _Unreachable(Exception):
    """Raised when the store does not do what was requested; the message says why."""


def _milliseconds(seconds: float) -> int:
    return int(seconds * 1000)


def _problem(error: Exception) -> str:
    text = str(error)
    if isinstance(error, _Unreachable):
        return text  # autotune's own advice is never cut
    if status := _STATUS.search(text):
        return f"the server answers with an error (HTTP {status[1] or status[2]})"
    if driver := _DRIVER.search(text):  # SQLAlchemy's first line is about SQLAlchemy itself
        return f"the store cannot be written ({driver[1].strip()})"
    if isinstance(error, ModuleNotFoundError):
        return f"MLflow needs the Python module {error.name!r} for this kind of store, and it is not installed here"
    if "maintenance mode" in text:
        return "MLflow writes to a folder of files only with MLFLOW_ALLOW_FILE_STORE=true in the environment"
    if "not in a valid JSON format" in text:
        return "what answers is not MLflow: the address is that of a page, or a proxy asks for a login first"
    if "timeout" in text.lower() or "timed out" in text:
        return "no answer in time"
    if "Connection" in text or "Max retries exceeded" in text:
        return "no answer (connection lost)"
    return first_line(error)
