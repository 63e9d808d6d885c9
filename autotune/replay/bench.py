"""Replays many studies: tables x strategies x seeds, in several processes."""

from __future__ import annotations

import functools
import multiprocessing
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from autotune.errors import BadInput
from autotune.replay.checks import usable
from autotune.replay.space import Grid
from autotune.replay.strategies import STRATEGIES, strategy
from autotune.replay.study import Limits, Replayed, replay
from autotune.replay.table import Table

# The strategies that run if --sampler is not given: all but the Gaussian process, which takes as long as the others together.
USUAL = tuple(name for name in STRATEGIES if name != "gp")


@dataclass(kw_only=True)
class Asked:
    """What to replay.

    Attributes:
        tables: files of tables.
        strategies: names of strategies, see `strategies.strategy`.
        num_seeds: number of studies of each strategy on each table.
        limits: when each study ends.
        num_jobs: number of processes.
    """

    tables: Sequence[Path]
    strategies: Sequence[str] = USUAL
    num_seeds: int = 50
    limits: Limits = field(default_factory=Limits)
    num_jobs: int = 1


@dataclass(kw_only=True)
class Result:
    """The replayed studies of one table.

    Attributes:
        path: the table's file.
        table: its content.
        grid: the part of the table that was searched.
        studies: a dict from each strategy's name to its studies, in the order of their seeds.
    """

    path: Path
    table: Table
    grid: Grid
    studies: dict[str, list[Replayed]] = field(default_factory=dict)


def run(asked: Asked, on_study: Callable[[], None] = lambda: None) -> list[Result]:
    """Returns the studies of every table; the results do not depend on the number of processes.

    Raises:
        BadInput: tables cannot be used or strategies do not exist; the error names them all.
    """
    results, problems = [], []
    for path in asked.tables:
        try:
            table, grid = usable(path)
            results.append(Result(path=path, table=table, grid=grid))
        except BadInput as error:
            problems += error.problems
    for name in asked.strategies:
        try:
            strategy(name)
        except BadInput as error:
            problems += error.problems
    if problems:
        raise BadInput(dict.fromkeys(problems))
    jobs = [(result.path, name, seed) for result in results for name in asked.strategies for seed in range(asked.num_seeds)]
    found = dict(zip(jobs, _studies(jobs, asked, on_study), strict=True))
    for result in results:
        for name in asked.strategies:
            result.studies[name] = [found[result.path, name, seed] for seed in range(asked.num_seeds)]
    return results


_Job = tuple[Path, str, int]


def _studies(jobs: Sequence[_Job], asked: Asked, on_study: Callable[[], None]) -> list[Replayed]:
    if asked.num_jobs == 1:
        return [_counted(_study(job, asked.limits), on_study) for job in jobs]
    # The workers are not forked, because torch and Optuna may hold locks and threads in this process.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=asked.num_jobs, mp_context=context, initializer=_end_with_parent) as pool:
        # Jobs are sent in chunks, to reduce overhead. Results keep the order of the jobs, so they do not depend on timing.
        chunk = max(1, min(10, len(jobs) // (4 * asked.num_jobs)))
        try:
            found = pool.map(functools.partial(_study, limits=asked.limits), jobs, chunksize=chunk)
            return [_counted(study, on_study) for study in found]
        except BaseException:  # such as Ctrl-C; otherwise the end of the pool's context would wait for all submitted studies
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in multiprocessing.active_children():
                worker.terminate()
            raise


def _end_with_parent() -> None:
    """Makes this process exit when its parent is killed. Otherwise it would run on for minutes."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True, name="end-with-parent").start()


def _counted(study: Replayed, on_study: Callable[[], None]) -> Replayed:
    on_study()
    return study


def _study(job: _Job, limits: Limits) -> Replayed:
    path, name, seed = job
    table, grid = _table(path)
    return replay(table, grid, strategy(name), seed=seed, limits=limits)


@functools.cache
def _table(path: Path) -> tuple[Table, Grid]:
    """Returns a table and its grid, read once per process."""
    return usable(path)
