"""The rate that the loader can sustain with empty queues, from the counters of a simulated queue of known rates."""

import dataclasses
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils.data._utils import fetch

from autotune.harness import process, report, supply, worker
from autotune.harness.cores import num_cores
from autotune.harness.loader import Loader
from autotune.harness.meter import WARMUP, Meter
from autotune.harness.protocol import SEPARATE, SHARED, MeasureRules, RankResult
from autotune.harness.supply import Reading, Supply
from autotune.harness.worker import Counters
from autotune.harness.worker_starts import WorkerStarts
from tests.harness.contexts import context

BATCH = 8
ITERATED: dict[str, Any] = {"mark_iterators": lambda: None, "num_at_once": 1}  # of a `Loader` with a single iteration


class Queue:
    """A queue that holds `full` batches at first. Workers fill it, and steps drain it. `at` returns its counters."""

    def __init__(self, *, workers: int, make_per_s: float, take_per_s: float, full: float, **cpu: float) -> None:
        self.workers, self.make_per_s, self.take_per_s, self.full = workers, make_per_s, take_per_s, full
        self.step_cpu_s, self.batch_cpu_s = cpu.get("step_cpu_s", 0.0), cpu.get("batch_cpu_s", 0.0)
        self.batch_delay_s = cpu.get("batch_delay_s", 0.0)

    def at(self, now_s: float) -> Reading:
        made = self.full + self.make_per_s * now_s
        taken = self.take_per_s * now_s
        if taken > made:
            taken = made
        each = made / self.workers
        busy_s, delay_s = each * self.workers / self.make_per_s, each * self.batch_delay_s
        counters = Counters(each, busy_s, each * self.batch_cpu_s, delay_s, 0.0)
        return Reading(now_s, taken, taken * self.step_cpu_s, [counters] * self.workers)


def followed(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> tuple[Supply, SimpleNamespace]:
    """Returns a Supply that reads the queue at `clock.now_s`."""
    training = SimpleNamespace(num_workers=queue.workers, counters_file="x", total_samples=BATCH, total_batches=1, **ITERATED)
    found, clock = Supply(SimpleNamespace(training=training)), SimpleNamespace(now_s=0.0)
    monkeypatch.setattr(Supply, "read", lambda self: queue.at(clock.now_s))
    monkeypatch.setattr(supply, "GLANCE_S", 0.0)
    monkeypatch.setattr(supply, "num_cores", lambda: 2)
    return found, clock


def window(queue: Queue, monkeypatch: pytest.MonkeyPatch, *, begin_s: float = 1.0, end_s: float = 3.0) -> tuple[Supply, float]:
    """Measures a window; returns the Supply, and the samples consumed per second of the window."""
    found, clock = followed(queue, monkeypatch)
    clock.now_s = begin_s
    found.open_window()
    clock.now_s = end_s
    found.close_window()
    return found, BATCH * (queue.at(end_s).taken - queue.at(begin_s).taken) / (end_s - begin_s)


def test_the_measured_rate_is_sustained_if_the_queue_keeps_its_length(monkeypatch: pytest.MonkeyPatch) -> None:
    found, rate = window(Queue(workers=2, make_per_s=50, take_per_s=50, full=8), monkeypatch)
    assert found.fall_frac == pytest.approx(0.0)
    assert found.lasting_per_s(rate, found.capacity_per_s()) == rate == pytest.approx(50 * BATCH)


def test_while_the_queue_shrinks_the_sustained_rate_is_that_of_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    found, rate = window(Queue(workers=2, make_per_s=40, take_per_s=100, full=1000), monkeypatch)
    assert found.is_falling
    assert rate == pytest.approx(100 * BATCH)
    assert found.regime(1) == SEPARATE
    assert found.lasting_per_s(rate, found.capacity_per_s()) == pytest.approx(40 * BATCH)


def test_with_shared_cores_a_step_waits_for_the_missing_part_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    # The step's two threads and a worker share two cores, so 30 ms of processor time take 22.5 ms. The worker needs 20 ms of
    # processor time for a batch and makes 33.3 batches per second.
    queue = Queue(workers=1, make_per_s=100 / 3, take_per_s=1 / 0.0225, full=1000, step_cpu_s=0.03, batch_cpu_s=0.02)
    found, rate = window(queue, monkeypatch)
    assert found.regime(2) == SHARED
    assert found.lasting_per_s(rate, 50.0 * BATCH) == pytest.approx(BATCH / 0.0275)  # and 5 ms for the missing 1/4 batch


def test_capacity_is_limited_by_what_all_cores_can_produce(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = Queue(workers=8, make_per_s=1000, take_per_s=50, full=8, batch_cpu_s=0.01)
    found, _ = window(queue, monkeypatch)
    assert found.capacity_per_s() == pytest.approx(2 / 0.01 * BATCH)


def test_many_workers_that_mostly_sleep_do_not_count_as_sharing_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = Queue(workers=8, make_per_s=100, take_per_s=100, full=8, step_cpu_s=0.02, batch_cpu_s=0.0002)
    found, _ = window(queue, monkeypatch)
    assert found.regime(2) == SEPARATE
    assert found.regime(None) == SEPARATE


def test_workers_that_wait_for_a_core_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    # The step's thread and two workers use just the two cores that there are; each worker waits a third of its time for a core.
    cpu = {"step_cpu_s": 0.009, "batch_cpu_s": 0.0145}
    queue = Queue(workers=2, make_per_s=70, take_per_s=70, full=8, **cpu, batch_delay_s=0.0075)
    assert window(queue, monkeypatch)[0].regime(1) == SHARED
    alone = Queue(workers=2, make_per_s=70, take_per_s=70, full=8, **cpu)
    assert window(alone, monkeypatch)[0].regime(1) == SEPARATE


def test_waits_for_cores_that_other_programs_use_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = {"step_cpu_s": 0.002, "batch_cpu_s": 0.001, "batch_delay_s": 0.02}
    queue = Queue(workers=2, make_per_s=70, take_per_s=70, full=8, **cpu)
    assert window(queue, monkeypatch)[0].regime(1) == SEPARATE


@pytest.mark.parametrize(
    ("full", "take_per_s", "is_waited_for"),
    [(100, 60, True), (1000, 60, False), (100, 40.5, False), (1, 60, False)],  # empty in 5 s, in 50 s, practically never, now
)
def test_measurement_waits_for_a_queue_that_will_soon_be_empty(
    full: float, take_per_s: float, is_waited_for: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, clock = followed(Queue(workers=2, make_per_s=40, take_per_s=take_per_s, full=full), monkeypatch)
    assert not found.drains_within(5.0)
    clock.now_s = 1.0
    assert found.drains_within(5.0) is is_waited_for


def test_rate_is_not_corrected_without_workers() -> None:
    training = SimpleNamespace(num_workers=0, counters_file="", total_samples=80.0, total_batches=10, total_wait_s=2.0)
    found = Supply(SimpleNamespace(training=training))
    found.open_window()
    found.close_window()
    assert found.regime(2) is None
    assert found.lasting_per_s(123.0, found.capacity_per_s()) == 123.0
    assert found.capacity_per_s() == 40.0
    assert Supply(SimpleNamespace(training=None)).capacity_per_s() is None


TORCHRUN = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "4"}
ALONE = {"LOCAL_RANK": "1", "WORLD_SIZE": "4"}  # from a launcher that does not tell how many ranks the host has


@pytest.mark.parametrize(
    ("is_child", "variables", "num"), [(True, {}, 4), (False, {}, 1), (False, TORCHRUN, 2), (False, ALONE, 4)]
)
def test_ranks_that_the_program_starts_itself_share_the_cores(
    monkeypatch: pytest.MonkeyPatch, is_child: bool, variables: dict[str, str], num: int
) -> None:
    for name in (*TORCHRUN, *process.LOCAL_SIZES, "SLURM_STEP_NUM_NODES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    here = context(is_child=is_child, world_size=4)
    assert process.num_local_ranks(here) == num
    found = Supply(SimpleNamespace(training=None), num_ranks=lambda: process.num_local_ranks(here))
    assert found._num_cores() == num_cores() / num


@pytest.mark.parametrize(("num", "rate_per_s"), [(2, 12 * 8 / 3.02), (3, 800.0), (100, 800.0)])
def test_wait_before_the_window_counts_only_if_the_window_has_few_batches(num: int, rate_per_s: float) -> None:
    training = SimpleNamespace(num_workers=0, counters_file="", total_samples=80.0, total_batches=10, total_wait_s=3.0)
    found = Supply(SimpleNamespace(training=training))
    found.open_window()
    training.total_samples, training.total_batches = training.total_samples + 8.0 * num, training.total_batches + num
    training.total_wait_s += 0.01 * num
    found.close_window()
    assert found.capacity_per_s() == pytest.approx(rate_per_s)


def test_batch_counter_of_a_worker_continues_in_the_next_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "loader0.bin")
    worker.create(path, 2)
    fetcher: Any = fetch._MapDatasetFetcher(list(range(100)), True, lambda items: time.sleep(0.02), False)
    own, iterable = fetch._MapDatasetFetcher.fetch, fetch._IterableDatasetFetcher.fetch
    for _ in range(2):  # two epochs; for each, torch starts a process with unpatched fetchers
        monkeypatch.setattr(fetch._MapDatasetFetcher, "fetch", own)
        monkeypatch.setattr(fetch._IterableDatasetFetcher, "fetch", iterable)
        worker.WorkerInit(path, None)(1)
        for number in range(3):
            fetcher.fetch([number])
        with pytest.raises(IndexError):
            fetcher.fetch([100])  # a data set's own error does not count as a batch
    idle, counters = worker.read(path)
    assert idle == Counters(0.0, 0.0, 0.0, 0.0, 0.0)
    assert counters.batches == 6
    assert counters.busy_s >= 6 * 0.02
    assert 0 <= counters.cpu_s < counters.busy_s
    assert 0 <= counters.delay_s < counters.busy_s
    assert counters.began_s == 0.0


def test_batches_of_two_iterations_over_a_loader_at_the_same_time_all_count(tmp_path: Path) -> None:
    path = str(tmp_path / "loader0.bin")
    worker.create(path, 1)
    slots = worker._map(path)  # zip(loader, loader): the workers of both iterations have the same numbers
    one, other = (worker._counted(slots, 0, lambda fetcher, index: time.sleep(0.01)) for _ in range(2))
    for number in range(3):
        one(None, number)
        other(None, number)
    (counters,) = worker.read(path)
    assert counters.batches == 6
    assert counters.busy_s >= 6 * 0.01


def test_workers_of_two_iterations_over_a_loader_at_the_same_time_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = Loader(0, {"dataset": [1, 2]})
    idle, over, one, other = (SimpleNamespace(_num_yielded=num, _shutdown=num == 5) for num in (1, 5, 3, 3))
    for each in (idle, over, one, other):
        loader.begins(each)
    loader.mark_iterators()
    for each in (over, one, other):
        each._num_yielded += 2
    assert loader.num_at_once == 2  # not the first, whose workers wait, nor the one whose workers have ended
    queue = Queue(workers=2, make_per_s=50, take_per_s=50, full=8)
    found, clock = followed(queue, monkeypatch)
    found._loaders.training.num_at_once = 2
    found.open_window()
    clock.now_s = 2.0
    found.close_window()
    assert found.capacity_per_s() == pytest.approx(2 * 50 * BATCH)


def test_a_forked_process_counts_in_another_file_than_its_parent(tmp_path: Path) -> None:
    starts: Any = SimpleNamespace(_spec=SimpleNamespace(folder=str(tmp_path)))
    loader: Any = SimpleNamespace(number=0, counters_file=str(tmp_path / "loader0.1.bin"))  # the parent's, whose id is 1
    assert WorkerStarts._has_counters(starts, loader, 2)
    assert loader.counters_file == str(tmp_path / f"loader0.{os.getpid()}.bin")


def test_a_loader_that_takes_over_in_the_window_is_judged_by_its_own_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    training = SimpleNamespace(num_workers=1, counters_file="b", total_samples=50.0 * BATCH, total_batches=50.0, **ITERATED)
    found = Supply(SimpleNamespace(training=training))
    before = Reading(1.0, 990.0, 5.0, [Counters(1000.0, 100.0, 10.0, 0.0, 0.0)], "a")
    after = Reading(3.0, 40.0, 6.0, [Counters(50.0, 10.0, 20.0, 0.0, 0.0)], "b")
    readings = iter([before, after])
    monkeypatch.setattr(Supply, "read", lambda self: next(readings))
    monkeypatch.setattr(supply, "num_cores", lambda: 4)
    found.open_window()
    found.close_window()
    assert found.capacity_per_s() == pytest.approx(5 * BATCH)  # 50 batches in 10 s; the difference to 1000 would be negative
    assert found.fall_frac == 0.0


def test_unfinished_batch_counts_by_its_finished_part() -> None:
    assert Reading(10.0, 0, 0, [Counters(4.0, 8.0, 0.0, 0.0, 9.0)]).made == 4.5
    assert Reading(10.0, 0, 0, [Counters(4.0, 8.0, 0.0, 0.0, 1.0)]).made == 5.0  # an overdue batch counts as at most one
    assert Reading(10.0, 0, 0, [Counters(0.0, 0.0, 0.0, 0.0, 9.0)]).made == 0.0


def test_cores_are_counted_within_the_quota(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("150000 100000")
    own = tmp_path / "own"
    own.write_text("0::/a/b")
    assert num_cores(str(tmp_path), str(own)) == min(2, len(os.sched_getaffinity(0)))
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "cpu.max").write_text("50000 100000")
    assert num_cores(str(tmp_path), str(own)) == 1
    (tmp_path / "cpu.max").write_text("max 100000")
    (tmp_path / "a" / "b" / "cpu.max").unlink()
    assert num_cores(str(tmp_path), str(own)) == len(os.sched_getaffinity(0))


def test_rate_of_the_device_is_at_least_that_of_a_window_that_leaves_out_its_last_step() -> None:
    meter = Meter(dataclasses.replace(MeasureRules(), slow_max_s=5.0), width=2)
    while meter.phase == WARMUP:
        meter.feed(0.9, 32.0)
    steps_s = [0.9, 0.9, 0.8, 0.9, 2.0]  # the last one does not fill a block of two
    meter.feed_window(steps_s, [32.0] * 5)
    measured = SimpleNamespace(meter=meter, steps={"samples": []}, step_s=sum(steps_s), busy_s=sum(steps_s) - 0.4, wait_s=0.4)
    context: Any = SimpleNamespace(
        window=measured,
        loaders=SimpleNamespace(unit="samples", unit_source="forward calls"),
        peers=SimpleNamespace(is_joint=False),
        clock=SimpleNamespace(gap_frac=None),
        sharing=SimpleNamespace(ranks_per_batch=lambda: 1),
    )
    found = RankResult(trial=0, nonce="", rank=0, world_size=1, pid=0, status="measured")
    report._add_rates(found, context)
    assert found.window is not None
    assert found.window.steps == 4
    assert found.device_rate_per_s == pytest.approx(found.window.rate_per_s * 5.5 / 5.1)
