"""A trial that skips stages of the loader runs them only a few times and then reuses their results."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pickle
import threading
from collections import UserDict
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

from autotune.harness.explain import kept_results
from autotune.harness.explain.documents import LINES, document_file
from autotune.harness.explain.kept_results import KEPT, Again, Left, Pixels, apart, copied, leave
from autotune.harness.explain.skipping import (
    BATCHES,
    KEPT_CALLS,
    MOST_BYTES,
    Items,
    SkippedStages,
    _skipping,
    skip_functions,
)
from tests.harness.conftest import PROGRAMS, RULES, Run, Trial
from tests.harness.forks import Forks, Server
from tests.support.rows import more

PROGRAM = "stages.py"
CALLED = ("write", "loss", "static", "of_class", "inner", "cached")  # functions that are called once a step
STAGES = ("item", "halve", "tensor", "collate", *CALLED)
FILE = os.path.join(PROGRAMS, PROGRAM)
MOST_BATCHES = BATCHES["most"]
BATCH = 8  # samples per batch; libraries that the first batch imports are patched only after it
PREFETCHED = 4  # batches that two workers make ahead
OFTEN = 3  # a stage of single samples that is not skipped runs at least this often per batch


@pytest.fixture(scope="module")
def forks(server: Server) -> Iterator[Forks]:
    """Takes the place of the usual fixture: the program's library is imported once for all of its runs."""
    with server.forks("torchvision.transforms") as made:
        yield made


def ran(run: Run) -> dict[str, int]:
    """Returns how often each stage ran."""
    files = {stage: run.folder / f"ran.{stage}" for stage in STAGES}
    return {stage: file.stat().st_size if file.exists() else 0 for stage, file in files.items()}


@pytest.mark.parametrize("words", [("workers",), pytest.param((), marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    ("skipped", "fewer", "most"),
    [
        ("transform: Halve", ("halve",), KEPT),
        *more(("collate", ("collate",), MOST_BATCHES)),
        ("item", ("item", "halve", "tensor"), KEPT),
    ],
)
def test_skipped_stage_runs_only_a_few_times_in_each_process(
    trial: Trial, words: tuple[str, ...], skipped: str, fewer: tuple[str, ...], most: int
) -> None:
    run = trial(PROGRAM, *words, skipped=[skipped])
    assert run.result().status == "measured", run.stderr
    counts = ran(run)
    for stage in fewer:
        assert 0 < counts[stage] <= (most + BATCH) * (2 if words else 1)
    batches = run.result().window.steps
    for stage in set(STAGES) - set(fewer):
        assert counts[stage] >= batches * (1 if stage in ("collate", *CALLED) else OFTEN)


@pytest.mark.parametrize(
    ("name", "skipped"),
    [
        ("Log.write", "write"),
        *more(("Log.static", "static"), ("Log.of_class", "of_class"), ("Log.Inner.write", "inner"), ("cached", "cached")),
    ],
)
def test_a_function_of_the_program_is_skipped(trial: Trial, name: str, skipped: str) -> None:
    run = trial(PROGRAM, skipped=[f"function: {FILE}: {name}"])
    assert run.result().status == "measured", run.stderr
    counts = ran(run)
    assert KEPT_CALLS <= counts[skipped] <= KEPT_CALLS + 1
    for other in {*CALLED} - {skipped}:
        assert counts[other] >= run.result().window.steps


@pytest.mark.parametrize(
    ("skipped", "stage", "most"),
    [("transform: Halve", "halve", KEPT), *more(("collate", "collate", MOST_BATCHES), ("item", "item", KEPT))],
)
def test_workers_of_later_epochs_start_with_results_of_earlier_workers(
    trial: Trial, skipped: str, stage: str, most: int
) -> None:
    run = trial(PROGRAM, "workers", "short", skipped=[skipped], rules=dataclasses.replace(RULES, min_s=0.5, max_s=4.0))
    assert run.result().status == "measured", run.stderr
    counts = ran(run)
    assert counts["loss"] >= 3 * 5  # three epochs of five batches
    assert 0 < counts[stage] <= most * 2  # of two workers in the first epoch


@pytest.mark.parametrize("words", [("valid", "workers"), pytest.param(("valid",), marks=pytest.mark.thorough)])
def test_only_samples_of_the_loader_that_trains_are_skipped(trial: Trial, words: tuple[str, ...]) -> None:
    baseline = trial(PROGRAM, *words, mode="inspect").result()
    run = trial(PROGRAM, *words, skipped=["item"], target=baseline.target)
    assert run.result().status == "measured", run.stderr
    counts = ran(run)
    evaluated = counts["loss"] // 4 + 1 + PREFETCHED  # batches of the evaluation loader
    assert counts["item"] <= BATCH * evaluated + 2 * (KEPT + BATCH * PREFETCHED) < BATCH * (counts["loss"] + evaluated)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("loss_of", "whose result is part of the model's graph"),
        ("stepping", "stepping cannot be skipped, because it calls the optimizer"),
        *more(("gone", "gone cannot be skipped"), ("main", "main cannot be skipped, because it calls the optimizer")),
    ],
)
def test_a_function_that_cannot_be_skipped_fails_the_trial(trial: Trial, name: str, said: str) -> None:
    run = trial(PROGRAM, skipped=[f"function: {FILE}: {name}"])
    assert run.returncode != 0
    assert said in run.stderr


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["moved", "Log.decorated"])  # called at several places; inside a decorator
def test_function_that_is_decorated_or_called_at_several_places_is_skipped(trial: Trial, name: str) -> None:
    run = trial(PROGRAM, skipped=[f"function: {FILE}: {name}"])
    assert run.result().status == "measured", run.stderr


def test_reused_result_is_complete_although_the_program_changed_an_earlier_one() -> None:
    def prepared() -> dict[str, Any]:
        return {"images": torch.ones(2), "sizes": [1, 2]}

    skipped = _skipping("prepared", prepared)
    for _ in range(3 * KEPT_CALLS):
        batch = skipped()
        assert batch.pop("images").shape == (2,)
        assert batch["sizes"].pop() == 2


def test_result_that_contains_a_part_of_the_graph_is_not_reused() -> None:
    loss = torch.ones(1, requires_grad=True).sum()
    with pytest.raises(RuntimeError, match="part of the model's graph"):
        _skipping("losses", lambda: {"aux": [1.0, (loss,)]})()


def test_missing_function_is_an_error_only_if_it_is_needed() -> None:
    name = f"function: {FILE}: gone"
    skip_functions([name], is_needed=False)
    with pytest.raises(RuntimeError, match="gone cannot be skipped"):
        skip_functions([name])


def test_a_function_that_is_never_skipped_fails_the_trial(trial: Trial) -> None:
    run = trial(PROGRAM, skipped=[f"function: {FILE}: Stream.__iter__"])
    assert run.returncode != 0
    assert "Stream.__iter__ was never skipped" in run.stderr


@pytest.mark.parametrize("skipped", ["item", "collate"])
@pytest.mark.parametrize("words", ["dicts workers", *more("two", "dicts")])
def test_stages_are_skipped_with_alternating_loaders_and_emptied_samples(trial: Trial, words: str, skipped: str) -> None:
    run = trial(PROGRAM, *words.split(), skipped=[skipped])
    assert run.result().status == "measured", run.stderr
    assert 0 < ran(run)[skipped] <= (KEPT + BATCH) * 2


@pytest.mark.thorough
def test_samples_that_a_data_set_returns_together_are_skipped_too(trial: Trial) -> None:
    run = trial(PROGRAM, "many", skipped=["item"])
    assert run.result().status == "measured", run.stderr
    assert 0 < ran(run)["item"] <= KEPT


def test_decoded_pixels_are_reused(trial: Trial) -> None:
    run = trial(PROGRAM, skipped=["decode"])
    assert run.result().status == "measured", run.stderr
    counts = ran(run)
    assert counts["item"] == counts["halve"] == counts["tensor"]  # the program still runs every stage


def test_skipping_samples_of_a_stream_fails_the_trial(trial: Trial) -> None:
    run = trial(PROGRAM, "stream", skipped=["item"])
    assert run.returncode != 0
    assert "samples of a stream cannot be skipped" in run.stderr


@pytest.mark.parametrize(("words", "is_stream"), [(("stream",), True), *more(((), False), (("valid",), False))])
def test_explain_reports_whether_the_training_loader_reads_a_stream(
    trial: Trial, words: tuple[str, ...], is_stream: bool
) -> None:
    run = trial(PROGRAM, *words, mode="explain", explain=LINES, max_s=0.3)
    assert json.loads((run.folder / document_file(LINES, 0)).read_text())["is_stream"] is is_stream


def test_trial_that_skips_nothing_runs_every_stage(trial: Trial) -> None:
    run = trial(PROGRAM)
    counts = ran(run)
    assert counts["item"] == counts["halve"] == counts["tensor"]
    assert counts["item"] >= 8 * run.result().window.steps


def test_pixels_of_an_earlier_image_replace_those_of_a_later_one() -> None:
    import io

    from PIL import Image, ImageFile

    def stored(size: tuple[int, int], color: int) -> Any:
        file = io.BytesIO()
        Image.new("RGB", size, (color, 0, 0)).save(file, "png")
        return Image.open(io.BytesIO(file.getvalue()))

    stages = SkippedStages(["decode"])
    stages._is_timing = True
    load = stages._around_load(ImageFile.ImageFile.load)
    first = [stored((4, 3), color) for color in range(KEPT)]
    for image in first:
        load(image)
    later = stored((40, 30), 200)
    load(later)
    assert later.size == (4, 3)
    assert later.getpixel((0, 0))[0] < KEPT
    later.putpixel((0, 0), (99, 0, 0))
    assert 99 not in {image.getpixel((0, 0))[0] for image in first}
    grey = Image.new("L", (2, 2))
    grey.save(file := io.BytesIO(), "png")
    other = Image.open(io.BytesIO(file.getvalue()))
    load(other)
    assert (other.mode, other.size) == ("L", (2, 2))


def test_kept_results_are_reused_in_turn_once_there_are_enough() -> None:
    again = Again(None, most=2)
    assert not again.is_full
    again.keep("a")
    again.keep("b")
    assert again.is_full
    assert [again.next() for _ in range(4)] == ["a", "b", "a", "b"]  # alternating results keep alternating
    large = Again(None, most=1000)
    large.keep(torch.empty(2**28 + 1, dtype=torch.uint8))  # pages that are never written take no memory
    assert large.is_full
    slow = Again(None, most_s=0.5, least=2)
    slow.keep("a", seconds=0.6)
    assert not slow.is_full
    slow.keep("b")
    assert slow.is_full


def test_skipped_collating_reuses_batches_of_many_lengths() -> None:
    stages = SkippedStages(["collate"])
    stages._is_timing = True
    batches = [stages.timed("collate", torch.ones, (length,), {}) for length in range(100, 200)]
    lengths = {len(batch) for batch in batches[MOST_BATCHES:]}
    assert lengths == set(range(100, 100 + MOST_BATCHES))


def test_later_workers_start_with_the_merged_results_of_earlier_workers(tmp_path: Path) -> None:
    places = []
    for _ in range(2):
        places.append(again := Again(list_of))
        for number in range(KEPT - 1):
            again.keep(torch.full((2,), number))
    left = Left(str(tmp_path / "left"))
    for number, again in enumerate(places):
        leave(f"{left.prefix}.{number}", {("halve", 0): again})
    assert left.read()[("halve", 0)].is_full
    assert not list(tmp_path.iterdir())
    known = pickle.loads(pickle.dumps(left.read()))  # as for workers that are not forked
    taken = known[("halve", 0)].taken_over(list_of)
    assert taken.is_full
    assert not taken.new()
    assert taken.next().equal(torch.zeros(2))


def test_results_are_sent_to_spawned_workers_without_shared_memory_or_open_files(tmp_path: Path) -> None:
    again = Again(list_of)
    again.keep(torch.ones(3))
    left = Left(str(tmp_path / "left"))
    leave(left.prefix, {("item", 0): again})
    sent = ForkingPickler.dumps(left.read())
    assert not left.known["item", 0].next().is_shared()
    assert pickle.loads(sent)["item", 0].next().equal(torch.ones(3))


def test_results_that_are_large_or_cannot_be_pickled_are_not_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_results, "LEFT_BYTES", 1 << 16)
    known = {(name, 0): Again(list_of) for name in ("thread", "large", "row", "pixels")}
    known["thread", 0].keep(threading.Lock())
    known["large", 0].keep(torch.zeros(1 << 16))
    known["row", 0].keep(torch.arange(1 << 20).view(-1, 4)[3])  # a row of a tensor that holds the whole data set
    known["pixels", 0].keep(Pixels(Image.new("RGB", (4, 3), (7, 8, 9))))
    left = Left(str(tmp_path / "left"))
    leave(left.prefix, known)
    found = left.read()
    assert set(found) == {("row", 0), ("pixels", 0)}
    assert found["row", 0].next().equal(torch.arange(12, 16))
    image = Image.new("RGB", (1, 1))
    found["pixels", 0].next().put_into(image)
    assert (image.size, image.getpixel((3, 2))) == ((4, 3), (7, 8, 9))


def test_results_of_another_stage_are_not_taken_over() -> None:
    stages = SkippedStages(["item"])
    again = Again(list_of)
    again.keep(1)
    stages.enter(lambda: True, {("item", 0): again})
    assert not stages._results(1, test_results_of_another_stage_are_not_taken_over, ("item",)).is_full
    assert len(stages.by_place) == 1
    stages.enter(lambda: True, {("item", 0): again})
    assert stages._results(2, list_of, ("item",)).next() == 1


def test_batch_of_nested_containers_is_copied_deeply() -> None:
    pair = torch.ones(2), {"x": [torch.ones(3), "word"]}
    found = copied(pair)
    assert found[0].equal(pair[0])
    assert found[0] is not pair[0]
    assert found[1]["x"][0].data_ptr() != pair[1]["x"][0].data_ptr()
    assert found[1]["x"][1] == "word"


def test_kept_batches_and_samples_are_unaffected_by_changes_to_a_copy() -> None:
    class Encoding(UserDict[str, Any]):  # such as BatchEncoding of transformers
        pass

    for again in (copied, apart):
        kept = Encoding({"x": [1, 2], "y": 3})
        other = again(kept)
        other.pop("y")
        other["x"].append(3)
        assert dict(kept) == {"x": [1, 2], "y": 3}
        assert type(other) is Encoding
    samples = [{"x": 1}], {"y": [2]}
    made = apart(samples)
    made[0][0].clear()
    made[1]["y"].clear()
    assert samples == ([{"x": 1}], {"y": [2]})


def test_data_sets_of_alternating_loaders_are_wrapped_only_once() -> None:
    stages = SkippedStages(["item"])
    fetchers = [SimpleNamespace(dataset=dataset, collate_fn=list_of) for dataset in ("a", "b")]
    for _ in range(3):
        for fetcher in fetchers:
            stages._begin_with(fetcher)
    assert [fetcher.dataset.dataset_of_program for fetcher in fetchers] == ["a", "b"]


class Plus:
    """A transform that adds a number."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __call__(self, value: int) -> int:
        return value + self.number


def composed(stages: SkippedStages, *transforms: Plus) -> Any:
    stages._is_timing = True
    return functools.partial(stages._around_compose(None), SimpleNamespace(transforms=transforms))


def test_transform_used_several_times_in_a_compose_has_separate_results() -> None:
    plus = Plus(1)
    call = composed(SkippedStages(["transform: Plus"]), plus, plus, plus)  # the number of results is not a multiple of 3
    assert {call(0) for _ in range(4 * KEPT)} == {3}


def test_results_of_two_transforms_of_one_class_are_not_swapped_between_workers() -> None:
    """A worker whose first sample lacks the first transform still takes over the results of the second one."""
    one, ten, names = Plus(1), Plus(10), ["transform: Plus"]
    earlier = SkippedStages(names)
    call = composed(earlier, one, ten)
    assert [call(0) for _ in range(KEPT)] == KEPT * [11]
    later = SkippedStages(names)
    later.enter(lambda: True, earlier.by_place)
    assert composed(later, negative, ten)(0) == 11  # as the earlier worker's second transform made it
    assert composed(later, one, negative)(0) == -1  # the earlier worker's first transform made 1


def negative(value: int) -> int:
    return -value


def test_batches_of_two_data_sets_are_kept_apart() -> None:
    stages = SkippedStages(["collate"])
    stages._is_timing = True
    datasets = ["a", "b"]
    for _ in range(MOST_BATCHES + 3):
        for dataset in datasets:
            stages._collating = [(SimpleNamespace(dataset=dataset), None)]
            assert stages.timed("collate", list_of, ([dataset],), {}) == [[dataset]]


def test_results_of_data_sets_that_are_rebuilt_repeatedly_do_not_accumulate() -> None:
    stages = SkippedStages(["item"])
    for number in range(12):
        large = torch.empty(2**28, dtype=torch.uint8)  # pages that are never written take no memory
        stages._results(number, None, ("item",)).keep(large)
    assert len(stages._again) <= MOST_BYTES // 2**28 + 1
    assert list(stages.by_place.values()) == list(stages._again.values())  # nothing else keeps what was dropped
    assert list(stages.by_place)[-1] == ("item", 11)


def test_a_data_set_that_makes_whole_batches_cannot_be_skipped() -> None:
    class Batches:
        def __getitems__(self, indices: list[int]) -> dict[str, Any]:
            return {"x": torch.tensor(indices)}

    with pytest.raises(RuntimeError, match="already collated"):
        Items(Batches(), Again(None)).__getitems__([1, 2])


def test_attributes_of_the_data_set_remain_available() -> None:
    class Numbers:
        classes = ("even", "odd")

        def __len__(self) -> int:
            return 7

        def __getitem__(self, index: int) -> int:
            return index

    items = Items(Numbers(), Again(None, most=2))
    assert (len(items), items.classes) == (7, ("even", "odd"))
    assert items.__getitems__([3, 4]) == [3, 4]
    assert set(items.__getitems__([5, 6])) == {3, 4}


def list_of(samples: Any) -> list[Any]:
    return [samples]


def test_smaller_last_batch_is_not_replaced_by_a_full_one() -> None:
    stages = SkippedStages(["collate"])
    stages._is_timing = True
    for samples in 9 * ([1, 2, 3], [1], 7):
        assert stages.timed("collate", list_of, (samples,), {}) == [samples]


def test_other_threads_run_a_skipped_stage_normally() -> None:
    stages, calls = SkippedStages(["collate"]), []
    stages._is_timing = True

    def collate(samples: list[int]) -> list[int]:
        calls.append(samples)
        return samples

    for _ in range(MOST_BATCHES + 3):
        stages.timed("collate", collate, ([1],), {})
    assert len(calls) == MOST_BATCHES
    thread = threading.Thread(target=stages.timed, args=("collate", collate, ([1],), {}))
    thread.start()
    thread.join()
    assert len(calls) == MOST_BATCHES + 1
