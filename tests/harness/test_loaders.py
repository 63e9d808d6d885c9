"""Which loader feeds the training, what its knobs do, and what rate its workers can sustain."""

import dataclasses
import json
import operator
import os
import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, default_collate

from autotune.harness.batches import BatchSizeProbe
from autotune.harness.collating import takes_only_first
from autotune.harness.knobs.loader import ANOTHER_ORDER, FIRST_ONLY, TOO_FEW, UNPACKED, applicability
from autotune.harness.loader import Loader
from autotune.harness.protocol import APPLIED, NOT_APPLICABLE, OVERRIDDEN, SEPARATE, SHARED
from tests.harness.conftest import RULES, Trial, baseline_then

KNOBS = {"loader.batch_size": 6, "loader.num_workers": 1}


def test_indices_are_watched_while_any_iterator_needs_them():
    loader = Loader(0, {"dataset": [1, 2]})
    outer, inner = BatchSizeProbe(), BatchSizeProbe()
    assert loader.needs_indices_of(outer)
    assert loader.needs_indices_of(inner)
    del inner
    assert loader.needs_indices, "the program goes on with the outer one"
    del outer
    assert not loader.needs_indices


def test_a_loader_of_a_notebook_has_the_same_site_in_each_process():
    places = []
    for process in (12, 345):
        names = {"Loader": Loader}
        exec(compile("made = Loader(0, {'dataset': [1, 2]})", f"/tmp/ipykernel_{process}/99.py", "exec"), names)
        places.append(names["made"].site)
    assert places == ["/tmp/99.py:1"] * 2


def test_knobs_change_only_the_training_loader_and_keep_its_worker_init_fn(trial: Trial) -> None:
    baseline = trial("loaders.py", "validated", mode="inspect").result()
    knobs = {**KNOBS, "loader.prefetch_factor": 4, "loader.persistent_workers": True}
    run = trial("loaders.py", "validated", knobs=knobs, target=baseline.target)
    found = run.result()
    assert {key: report.status for key, report in found.knobs.items()} == dict.fromkeys(knobs, APPLIED)
    assert set(found.steps["samples"][3:]) <= {6}
    assert set(re.findall("held out: .*", run.stdout)) == {"held out: 0 30"}
    assert (run.folder / "init0.txt").read_text() == "ran\n"
    assert found.loader_rate_per_s is not None


@pytest.mark.parametrize(
    ("words", "is_free"),
    [("", False), ("full", False), ("whole", False), ("weighted", False), ("fixed", True), ("fixed whole", True)],
)
def test_a_data_set_that_the_program_changes_between_batches_gets_no_workers(trial: Trial, words: str, is_free: bool) -> None:
    found = trial("replay.py", *words.split(), mode="inspect").result()
    assert ("loader.num_workers" not in found.applicability) == is_free
    assert is_free or "changes its data set or sampler between batches" in found.applicability["loader.num_workers"]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("numpy", "draws from a random generator of its own"),
        ("legacy", "draws from a random generator of its own"),
        ("python", "draws from a random generator of its own"),
        ("torch", "draws from a random generator of its own"),
        ("module", "draws from a random generator of its own"),
        ("collate", "draws from a random generator of its own"),
        ("made", ""),
        ("numpy seeded", ""),
        ("global", ""),  # torch seeds these in each worker
        ("file", "holds an open file"),
        ("files", "holds an open file"),
        ("file seeded", ""),
        ("buffer", "writes each batch into the tensors of the last one"),
        ("late", ""),
    ],
)
def test_workers_are_refused_if_they_would_yield_other_samples(trial: Trial, words: str, reason: str) -> None:
    found = trial("alone.py", *words.split(), mode="inspect").result()
    assert found.error is None
    assert reason in found.applicability.get("loader.num_workers", "")
    assert ("loader.num_workers" in found.applicability) == bool(reason)


@pytest.mark.parametrize("share", ["1", "3"])
def test_all_steps_count_if_loaders_take_turns(trial: Trial, share: str) -> None:
    found = trial("kinds.py", "alternating", share).result()
    assert set(found.steps["samples"]) == {12}
    assert found.window is not None
    begin, ends_s = int(found.steps["warmup"]), found.steps["end_s"]
    seconds = ends_s[begin + found.window.steps - 1] - ends_s[begin - 1]
    assert found.window.seconds == pytest.approx(seconds, rel=0.01)  # no step is left out
    assert found.window.samples == 12 * found.window.steps


def test_batches_per_step_are_those_of_the_loader_that_trains_now(trial: Trial) -> None:
    found = trial("kinds.py", "stages").result()
    assert found.observed["loader.batch_size"] == 6
    assert found.detected["batches_per_step"] == 4  # with the steps of the first loader, it would be less


def test_loader_without_workers_is_not_judged_by_its_cold_start(trial: Trial) -> None:
    found = trial("kinds.py", "cold").result()
    assert found.loader_rate_per_s is not None
    assert found.loader_rate_per_s > (sum(found.steps["samples"]) + 12) / 0.8  # 0.8 s to open the data set


def test_batches_that_another_thread_fetches_during_the_steps_are_not_waited_for(trial: Trial) -> None:
    found = trial("threaded.py").result()
    assert (found.status, found.unit_source, found.data_wait_frac) == ("measured", "loader", 0.0)
    assert found.window is not None
    assert found.device_rate_per_s == pytest.approx(found.window.rate_per_s)
    assert found.loader_rate_per_s is not None


def test_whether_steps_wait_for_a_thread_that_fetches_slowly_is_unknown(trial: Trial) -> None:
    found = trial("threaded.py", "slow").result()
    assert (found.status, found.unit_source) == ("measured", "loader")
    assert (found.data_wait_frac, found.device_rate_per_s) == (None, None)


def test_loader_is_followed_if_a_step_ends_while_another_thread_counts_a_batch(trial: Trial) -> None:
    run = trial("threaded.py", "torn", rules=dataclasses.replace(RULES, min_s=0.6))
    assert "interrupted" in run.stdout, run.stderr
    found = run.result()
    assert (found.status, found.unit_source) == ("measured", "loader")
    later = found.steps["samples"][40:]
    assert sum(map(bool, later)) > len(later) / 2


@pytest.mark.parametrize("words", [(), ("persistent",)])
def test_steps_on_batches_that_the_program_has_kept_count_like_those_of_the_first_pass(
    trial: Trial, words: tuple[str, ...]
) -> None:
    rules = dataclasses.replace(RULES, min_s=1.5, max_s=2.0, cycles_max_s=20.0)
    found = trial("kinds.py", "kept_batches", *words, rules=rules).result()
    assert (found.status, found.unit, found.unit_source) == ("measured", "samples", "loader")
    assert sum(found.steps["samples"]) == pytest.approx(12 * len(found.steps["samples"]), abs=12 * 50)
    assert found.window is not None
    assert found.window.is_steady
    assert found.window.samples == pytest.approx(12 * found.window.steps)


def test_knobs_apply_to_loaders_of_all_epochs_if_their_data_sets_differ_in_length(trial: Trial) -> None:
    baseline = trial("kinds.py", "growing").result()
    assert (baseline.detected["num_loaders"], baseline.detected["num_steps"] > 21) == (2, True)  # one is not used
    found = trial("kinds.py", "growing", knobs={"loader.batch_size": 6}, target=baseline.target).result()
    assert found.knobs["loader.batch_size"].status == APPLIED
    assert set(found.steps["samples"]) == {6}


def test_batches_of_the_training_loader_that_are_read_without_gradients_are_not_counted(trial: Trial) -> None:
    found = trial("kinds.py", "statistics").result()
    assert (found.status, set(found.steps["samples"])) == ("measured", {12})


@pytest.mark.parametrize("every", ["1", "4"])
def test_steps_that_also_take_a_batch_of_another_loader_count_and_keep_its_batch_size(trial: Trial, every: str) -> None:
    found = trial("kinds.py", "beside", every).result()
    assert set(found.steps["samples"]) <= {4, 12}  # either loader may count as the one that trains
    assert found.window is not None
    begin, ends_s = int(found.steps["warmup"]), found.steps["end_s"]
    seconds = ends_s[begin + found.window.steps - 1] - ends_s[begin - 1]
    assert found.window.seconds == pytest.approx(seconds, rel=0.01)  # no step is left out
    assert "kinds.py" in found.applicability["loader.batch_size"]


@pytest.mark.parametrize(("words", "reason"), [((), ""), (("first",), FIRST_ONLY), (("row",), UNPACKED)])
def test_batch_size_is_not_applicable_to_a_program_that_uses_the_first_sample_of_a_batch(
    trial: Trial, words: tuple[str, ...], reason: str
) -> None:
    found = trial("kinds.py", "bags", *words, mode="inspect").result()
    assert found.applicability.get("loader.batch_size", "") == reason
    if words == ("first",):
        knobs = {"loader.batch_size": 4}
        report = trial("kinds.py", "bags", *words, knobs=knobs, mode="inspect").result().knobs["loader.batch_size"]
        assert (report.status, report.reason, report.observed) == (NOT_APPLICABLE, reason, 1)


def test_loader_of_torchdata_is_counted_and_gets_knobs_that_keep_its_order(trial: Trial) -> None:
    pytest.importorskip("torchdata.stateful_dataloader")
    asked = {"loader.batch_size": 6, "loader.num_workers": 2}
    baseline, found = baseline_then(trial, "kinds.py", "stateful", knobs=asked)
    assert (found.unit_source, set(found.steps["samples"])) == ("loader", {6})
    reports = {key: (report.status, report.reason) for key, report in found.knobs.items()}
    assert reports == {"loader.batch_size": (APPLIED, ""), "loader.num_workers": (NOT_APPLICABLE, ANOTHER_ORDER)}
    assert baseline.applicability["loader.num_workers"] == ANOTHER_ORDER
    _, found = baseline_then(trial, "kinds.py", "stateful", "workers", knobs=asked)
    assert (set(found.steps["samples"]), {report.status for report in found.knobs.values()}) == ({6}, {APPLIED})
    assert found.loader_rate_per_s is not None


@pytest.mark.parametrize("flags", [(), ("sampler",)])
def test_batch_size_is_not_applicable_above_the_samples_of_an_epoch(trial: Trial, flags: tuple[str, ...]) -> None:
    baseline, found = baseline_then(trial, "kinds.py", "few", *flags, knobs={"loader.batch_size": 24})
    report = found.knobs["loader.batch_size"]
    assert baseline.applicability["loader.batch_size=24"] == report.reason == TOO_FEW.format(20)
    assert (report.status, report.observed, set(found.steps["samples"])) == (NOT_APPLICABLE, 12, {12})


@pytest.mark.parametrize("flags", [("first",), ()])
def test_rows_are_counted_if_each_item_of_a_data_set_is_a_whole_batch(trial: Trial, flags: tuple[str, ...]) -> None:
    found = trial("kinds.py", "whole_batches", *flags).result()
    assert (found.status, found.unit, found.unit_source) == ("measured", "samples", "loader")
    assert set(found.steps["samples"][3:]) == {14}
    assert (found.observed["loader.batch_size"], found.detected["loader"]["num_samples"]) == (14, 30 * 14)
    assert "{loader.batch_size=14} in the command" in found.applicability["loader.batch_size"]


@pytest.mark.parametrize(("size", "status"), [(14, APPLIED), (12, OVERRIDDEN)])
def test_batch_size_on_the_command_line_is_that_of_items_that_are_whole_batches(trial: Trial, size: int, status: str) -> None:
    found = trial("kinds.py", "whole_batches", "first", passed={"loader.batch_size": size}, mode="inspect").result()
    assert found.knobs["loader.batch_size"].status == status
    run = trial("kinds.py", "whole_batches", "first", "short", passed={"loader.batch_size": size}, mode="apply")
    assert (f"the command line asks for {size}" in run.stderr) == (status == OVERRIDDEN)


class First:
    def collate(self, batch: Any) -> Any:
        return batch[0]

    def __call__(self, batch: Any) -> Any:
        images, *others = batch[0]
        return [images], others, batch[0][1]


@pytest.mark.parametrize(
    ("collate", "is_first_only"),
    [
        (lambda batch: batch[0], True),
        (lambda batch: tuple(batch[0]), True),
        (operator.itemgetter(0), True),
        (First().collate, True),
        (First(), True),
        (None, False),
        (default_collate, False),
        (operator.itemgetter(1), False),
        (lambda batch: batch[1], False),
        (lambda batch: batch[0] + batch[1], False),
        (lambda batch: (len(batch), batch[0]), False),
        (lambda batch: [each[0] for each in batch], False),
        (lambda batch: (lambda: batch)(), False),
        (lambda *batch: batch[0], False),
    ],
)
def test_a_collate_function_that_uses_only_the_first_sample_is_recognised(collate: Any, is_first_only: bool) -> None:
    assert takes_only_first(collate) == is_first_only


def test_program_sees_the_position_of_its_sampler_as_without_the_harness(trial: Trial) -> None:
    run = trial("position.py")
    assert json.loads(run.stdout) == [*range(1, 9)] * 3, run.stderr
    assert set(run.result().steps["samples"]) == {8}


@pytest.mark.thorough
def test_evaluation_between_steps_is_excluded_from_the_measured_window(trial: Trial) -> None:
    found = trial("loaders.py", "validated", "samples=2400", "pause=0.4").result()
    assert set(found.steps["samples"]) == {12}
    assert found.window is not None
    rates = found.window.block_rates_per_s
    assert min(rates) > 0.08 * max(rates)  # with the evaluation, a block of 20 ms would have 5 %


@pytest.mark.thorough
@pytest.mark.parametrize(
    "words", [("validated",), ("validated", "workers=1"), ("validated", "workers=1", "patched=1"), ("on_itself",)]
)
def test_short_epochs_count_every_step_and_exclude_evaluations_between_them(trial: Trial, words: tuple[str, ...]) -> None:
    window = trial("loaders.py", *words, "samples=18", "slow=1", "pause=0.4").result().window
    assert window is not None
    assert window.samples == pytest.approx(9 * window.steps, rel=0.1)  # batches of 12 and 6
    assert window.seconds / window.steps < 0.15  # 0.04 to prepare a batch; with the evaluation, it would be 0.25


def test_a_single_batch_read_without_gradients_between_steps_is_an_evaluation(trial: Trial) -> None:
    found = trial("loaders.py", "copy_validated", "samples=108").result()
    assert "loader.batch_size" not in found.applicability


def test_an_evaluation_after_the_first_step_is_no_part_of_the_second(trial: Trial) -> None:
    found = trial("kinds.py", "tested_first").result()
    assert set(found.steps["samples"]) == {12}
    assert found.steps["wait_s"][0] < 0.5  # of the second step; with the evaluation, it would be 1


def test_evaluated_batches_of_the_training_loader_are_not_counted_as_trained(trial: Trial) -> None:
    found = trial("loaders.py", "on_itself", "samples=48").result()
    assert set(found.steps["samples"]) == {12}
    assert found.detected["batches_per_step"] == 1


def test_the_first_steps_batches_count_if_an_evaluation_came_before_that_step(trial: Trial) -> None:
    assert trial("loaders.py", "evaluated_first").result().detected["batches_per_step"] == 1


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["rebuilt", "sampler"])
def test_knobs_apply_to_rebuilt_loaders_and_to_loaders_with_a_sampler(trial: Trial, kind: str) -> None:
    baseline, found = baseline_then(trial, "loaders.py", kind, knobs=KNOBS)
    assert baseline.observed["loader.batch_size"] == 12
    assert len(baseline.target) == 1
    assert {key: report.status for key, report in found.knobs.items()} == dict.fromkeys(KNOBS, APPLIED)
    assert set(found.steps["samples"][5:]) == {6}
    assert found.unit_source == "loader"
    assert found.window.samples == pytest.approx(6 * found.window.steps, rel=0.1)


@pytest.mark.thorough
def test_sampler_with_precomputed_batches_overrides_the_batch_size(trial: Trial) -> None:
    _, found = baseline_then(trial, "loaders.py", "own_sampler", knobs={"loader.batch_size": 6})
    report = found.knobs["loader.batch_size"]
    assert (report.status, report.observed) == (OVERRIDDEN, 12)


def test_batch_size_is_not_applicable_to_a_sampler_that_counts_tokens(trial: Trial) -> None:
    baseline = trial("loaders.py", "own_sampler", "tokens=4", mode="inspect").result()
    assert "has batch_size=48, but the largest of its batches has 12 samples" in baseline.applicability["loader.batch_size"]
    assert "loader.batch_size" not in {**baseline.observed, **baseline.detected["loader"]}


@pytest.mark.parametrize(("words", "samples"), [((), 6), (("single=1",), 1)])
def test_samples_that_the_program_batches_itself_are_counted(trial: Trial, words: tuple[str, ...], samples: int) -> None:
    found = trial("loaders.py", "unbatched", *words).result()
    assert (found.unit_source, set(found.steps["samples"])) == ("loader", {samples})


@pytest.mark.thorough
def test_batch_size_is_not_applicable_to_a_loader_without_one(trial: Trial) -> None:
    baseline, found = baseline_then(trial, "loaders.py", "unbatched", knobs={"loader.batch_size": 6})
    assert "loader.batch_size" in baseline.applicability
    assert found.knobs["loader.batch_size"].status == NOT_APPLICABLE
    assert set(found.steps["samples"]) == {6}


@pytest.mark.parametrize(("kind", "is_applicable"), [("iterable_asks", True), ("iterable", False)])
def test_stream_that_does_not_call_get_worker_info_gets_no_workers(trial: Trial, kind: str, is_applicable: bool) -> None:
    found = trial("loaders.py", kind, mode="inspect").result()
    assert ("loader.num_workers" not in found.applicability) is is_applicable


def test_loader_whose_single_batch_is_reused_is_not_the_training_loader(trial: Trial) -> None:
    found = trial("loaders.py", "once", mode="inspect").result()
    assert (found.detected["loader"], found.target, found.unit_source) == (None, None, "forward calls")
    assert "loader.num_workers" in found.applicability


def test_pinned_knobs_apply_in_the_baseline_before_the_training_loader_is_known(trial: Trial) -> None:
    found = trial("loaders.py", "sampler", knobs=KNOBS, mode="inspect").result()
    assert {key: report.status for key, report in found.knobs.items()} == dict.fromkeys(KNOBS, APPLIED)


def test_target_loader_that_is_not_found_is_reported(trial: Trial) -> None:
    run = trial("loaders.py", "plain", knobs=KNOBS, target=[{"site": "elsewhere.py:1", "ordinal": 0}], mode="inspect")
    report = run.result().knobs["loader.num_workers"]
    assert report.status == OVERRIDDEN
    assert "not the loader that trained in the baseline" in report.reason


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["slow", "slow_epochs"])
def test_full_queues_do_not_make_a_slow_loader_look_fast(trial: Trial, kind: str) -> None:
    rules = dataclasses.replace(RULES, warmup_min_device_s=0.0, min_steps=6, min_s=0.4 if kind == "slow" else 1.5)
    found = trial("loaders.py", kind, rules=rules).result()
    truth_per_s = 2 * 8 / 0.04
    assert found.loader_rate_per_s == pytest.approx(truth_per_s, rel=0.1)
    assert found.throughput_per_s <= truth_per_s * 1.1
    if kind == "slow":  # `slow_epochs` waits at the end of each short epoch
        assert found.throughput_per_s == pytest.approx(truth_per_s, rel=0.1)


@pytest.mark.thorough
def test_workers_that_compute_share_the_cores_and_those_that_wait_do_not(trial: Trial) -> None:
    one_core = ["taskset", "-c", str(min(os.sched_getaffinity(0))), sys.executable]
    busy = trial("loaders.py", "busy", argv=one_core).result()
    assert busy.regime == SHARED
    assert busy.device_rate_per_s is None  # the step is slowed by the workers, so its own rate is unknown
    assert 0 < busy.throughput_per_s < 1.1 * 8 / 0.01  # one core makes no more than 100 batches a second
    waiting = trial("loaders.py", "slow", argv=one_core).result()
    assert waiting.regime == SEPARATE
    assert waiting.device_rate_per_s is not None
    assert trial("loaders.py", "plain", argv=one_core).result().regime == ""


@pytest.mark.parametrize(("num_workers", "is_free"), [(0, False), (1, False), (2, True)])
def test_one_worker_does_not_prove_that_a_stream_is_split_among_workers(num_workers: int, is_free: bool) -> None:
    class Silent(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(8))

    loader = Loader(0, {"dataset": Silent()})
    loader.batch_size, loader.num_workers = 4, num_workers
    assert ("loader.num_workers" not in applicability(loader)) is is_free


@pytest.mark.parametrize(("device", "is_free"), [("cpu", True), ("meta", False)])  # meta stands for a GPU
def test_batches_that_are_on_the_device_already_are_neither_pinned_nor_made_by_workers(device: str, is_free: bool) -> None:
    loader = Loader(0, {"dataset": [1.0]})
    loader.batch_size = 4
    loader.note_facts(torch.ones(4, device=device))
    assert loader.is_on_device is not is_free
    free = {"loader.num_workers", "loader.pin_memory"} - applicability(loader).keys()
    assert bool(free) is is_free


def test_a_number_of_workers_from_numpy_is_reported_as_a_plain_number(trial: Trial) -> None:
    found = trial("loaders.py", "numpy", mode="inspect").result()
    assert (found.status, found.error) == ("measured", None)
    assert found.observed["loader.num_workers"] == 1
