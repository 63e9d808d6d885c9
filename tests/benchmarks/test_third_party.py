"""What `third_party` reads from the output of programs and finds in their folders."""

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.benchmarks.third_party_checks import file_problems, listing, with_batch
from tests.benchmarks.third_party_clock import Clock, Watch, compare, marks, rate_per_s
from tests.benchmarks.third_party_programs import DONE, PROGRAMS

# A line of each kind that programs print, and the progress in it.
PRINTED = {
    "mnist": ("Train Epoch: 2 [1280/60000 (2%)]\tLoss: 0.5", 1_280),
    "hogwild": ("123\tTrain Epoch: 1 [640/60000 (1%)]\tLoss: 2.27", 640),
    "word_transformer": ("| epoch   1 |     5/  172 batches | lr 0.00 | ms/batch 33.20 | loss  9.07", 100),
    "super_resolution": ("===> Epoch[3](2/8): Loss: 0.0123", 32),
    "style": ("Thu Nov 26 07:00:00 2026\tEpoch 1:\t[16/512]\tcontent: 1.0", 16),
    "diffusers": ("Epoch 0:  12%|#2        | 8/64 [00:01<00:07,  7.5it/s, loss=1.1]", 64),
    "sentence_transformer": ("  3%|3         | 2/58 [00:02<00:59,  1.06s/it]", 256),
    "unet": ("Epoch 1/100:  10%|#         | 12/115 [00:03<00:28,  3.6img/s]", 12),
    "timm": ("Train: 0 [   4/32 ( 13%)]  Loss: 0.6 (0.6)  Time: 0.1s", 64),
    "monai": ("7/10, train_loss: 0.5", 14),
    "makemore": ("step 30 | loss 2.5 | step time 8.05ms", 480),
    "mingpt": ("iter_dt 3.20ms; iter 100: train loss 1.9", 6_400),
    "actor_critic": ("Episode 3\tLast reward: 21.00\tAverage reward: 11.05", 21),
    "kfold": ("Train Epoch: 1 [640/60000 (1%)]\tLoss: 0.5", 640),
    "accumulation": ("epoch 1: {'accuracy': 0.5}", 600),
    "fastai": ("2         0.352021    0.361235    0.832300  00:02", 32_000),
    "skorch": ("      2        \x1b[36m0.6931\x1b[0m       0.5000        0.6930  0.1024", 8_000),
    "zoo_ppo": ("|    n_updates         | 40        |", 10_240),
    "cleanrl_ppo": ("SPS: 812", 2_048),
}


@pytest.mark.parametrize("name", PRINTED)
def test_progress_is_read_from_the_output_of_each_program(name: str) -> None:
    line, samples = PRINTED[name]
    clock = next(program.clock for program in PROGRAMS if program.name == name)
    assert clock is not None
    assert [mark.done for mark in marks(clock, [(0.0, line), (1.0, "Test set: 5/10 accurate")]).values()] == [[samples]]


def test_progress_bar_of_loading_a_model_is_ignored() -> None:
    clock = next(program.clock for program in PROGRAMS if program.name == "sentence_transformer")
    assert clock is not None
    assert not marks(clock, [(0.0, "Loading weights: 100%|##########| 37/37 [00:00<00:00, 19754.23it/s]")])


def test_progress_accumulates_over_epochs() -> None:
    lines = [(0.0, "[0/100]"), (1.0, "[60/100]"), (1.1, "[60/100]"), (2.0, "[20/100]")]
    assert marks(Clock(DONE), lines)[""].done == [0, 60, 120]
    assert rate_per_s(Clock(DONE), lines, 0.9, 5.0) == 60
    # This program prints the batch number times the batch size. The last batch is smaller, so the printed number falls.
    smaller = [(0.0, "[0/100]"), (1.0, "[90/100]"), (1.1, "[70/100]"), (2.0, "[0/100]"), (3.0, "[30/100]")]
    assert marks(Clock(DONE), smaller)[""].done == [0, 90, 100, 130]


def test_line_may_print_the_progress_since_the_previous_line() -> None:
    lines = [(0.0, "Last reward: 20.00"), (1.0, "Last reward: 12.00"), (2.0, "Last reward: 9.00")]
    assert marks(Clock(r"Last reward: (?P<more>[\d.]+)"), lines)[""].done == [20, 32, 41]


def test_rates_of_processes_that_print_separately_are_added() -> None:
    lines = [(0.0, "1 of 0"), (0.1, "2 of 0"), (2.0, "1 of 20"), (2.1, "2 of 40")]
    assert rate_per_s(Clock(r"(?P<who>\d) of (?P<done>\d+)"), lines, 0.0, 9.0) == pytest.approx(30)
    assert rate_per_s(Clock(r"(?P<who>\d) of (?P<done>\d+)"), lines[:3], 0.0, 9.0) is None


def test_clock_in_steps_scales_with_a_raised_batch_size() -> None:
    assert with_batch(Clock("", 16, is_steps=True), {"loader.batch_size": 64}, baseline_batch=8).samples == 128
    assert with_batch(Clock("", 16), {"loader.batch_size": 64}, baseline_batch=8).samples == 16


def test_watch_records_complete_lines_of_new_logs(tmp_path: Any) -> None:
    (tmp_path / "old.log").write_text("before\n")
    with Watch(tmp_path, "**/*.log") as watch:
        (tmp_path / "new.log").write_bytes(b"a\nunfini")
        (tmp_path / "bar").mkdir()
        (tmp_path / "bar" / "new.log").write_bytes(b"\r1/9\r2/9")
    assert [[text for _, text in watch.lines[folder]] for folder in (tmp_path, tmp_path / "bar")] == [["a"], ["1/9", "2/9"]]


def write_trial(folder: Any, *results: dict[str, Any], **record: Any) -> None:
    named = {"trial.json": {"value": 10.0, **record}, "progress.jsonl": {"time_s": 50.0, "step": 1}}
    named |= {f"result.rank{rank}.json": {"window": {"seconds": 2.0}, **result} for rank, result in enumerate(results)}
    for name, document in named.items():
        (folder / name).write_text(json.dumps(document))


def test_counted_and_printed_rates_cover_the_time_from_first_to_last_line(tmp_path: Any) -> None:
    result = {"pid": 7, "steps": {"end_s": [1.0, 2.0, 3.0], "samples": [10, 10, 10], "warmup": 1}}
    write_trial(tmp_path, result)
    watch: Any = SimpleNamespace(lines={tmp_path: [(51.0, "step 2"), (53.0, "step 4")]})
    (found,) = compare(Clock(r"step (?P<done>\d+)", 12), watch)
    assert (found.counted_per_s, found.own_per_s, found.seconds, found.window_per_s) == (10.0, 12.0, 2.0, 10.0)
    write_trial(tmp_path, result, changed={"loader.batch_size": 24})
    assert not list(compare(Clock(r"step (?P<done>\d+)", 12, is_steps=True), watch))  # a step has more samples there


def test_only_whole_steps_are_counted_between_two_lines(tmp_path: Any) -> None:
    # Each epoch has two steps and an evaluation, and then prints a line. The first evaluation lasts longest.
    steps = {"end_s": [1.0, 4.0, 5.0, 6.0, 7.0, 8.0], "samples": [10] * 6}
    write_trial(tmp_path, {"pid": 7, "steps": steps})
    watch: Any = SimpleNamespace(lines={tmp_path: [(53.9, "epoch 1"), (55.1, "epoch 2"), (57.9, "epoch 3")]})
    (found,) = compare(Clock(r"epoch (?P<done>\d+)", 20), watch)
    assert found.counted_per_s * found.seconds == found.own_per_s * found.seconds == pytest.approx(40)


def test_a_step_may_end_just_after_the_line_that_counts_it(tmp_path: Any) -> None:
    write_trial(tmp_path, {"pid": 7, "steps": {"end_s": [1.0, 2.0, 3.0], "samples": [10] * 3}})
    lines = [(50.01, "[0/90]"), (51.01, "[10/90]"), (52.99, "[30/90]")]
    (found,) = compare(Clock(DONE), cast(Any, SimpleNamespace(lines={tmp_path: lines})))
    assert found.counted_per_s == found.own_per_s


def test_each_process_is_compared_over_its_own_steps(tmp_path: Any) -> None:
    first = {"pid": 7, "steps": {"end_s": [1.0, 2.0, 3.0, 4.0], "samples": [10] * 4, "origin_s": 50.0}}
    second = {"pid": 8, "steps": {"end_s": [2.0, 4.0, 6.0], "samples": [10] * 3, "origin_s": 60.0}}
    write_trial(tmp_path, first, second)
    lines = [(49.9, "7: 0"), (51.0, "7: 10"), (53.0, "7: 30"), (62.1, "8: 10"), (64.1, "8: 20"), (66.1, "8: 30")]
    (found,) = compare(Clock(r"(?P<who>\d+): (?P<done>\d+)"), cast(Any, SimpleNamespace(lines={tmp_path: lines})))
    assert found.counted_per_s == found.own_per_s == pytest.approx(15)


def test_changed_files_and_unlisted_new_files_are_reported(tmp_path: Any) -> None:
    for name in ("kept", "changed"):
        (tmp_path / name).write_text("")
    before = listing(tmp_path)
    (tmp_path / "out" / "__pycache__").mkdir(parents=True)
    for name in ("changed", "out/a", "b", "out/__pycache__/c", "mlflow.db-wal"):
        (tmp_path / name).write_text("new")
    found = file_problems(before, listing(tmp_path), folder=tmp_path, named=["out"])
    assert found == [f"changed: {tmp_path / 'changed'}", f"not listed: {tmp_path / 'b'}"]
