from pathlib import Path

import pytest

from autotune import plain_text, quantities, wording
from autotune.run_dir import where


@pytest.mark.parametrize(
    ("value", "text"),
    [(16.84, "16.8"), (1234.5, "1,234"), (0.01234, "0.0123"), (7.0, "7.00"), (None, "-"), (0.0, "0"), (99.96, "100")],
)
def test_numbers_have_three_significant_digits(value, text):
    assert quantities.number_text(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(1.4 * 2**30, "1.40 GiB"), (512 * 2**20, "512 MiB"), (12, "12 B"), (None, "-"), (24 * 2**30, "24.0 GiB")],
)
def test_bytes_come_in_binary_units(value, text):
    assert quantities.bytes_text(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (8.24, "8.2 s"),
        (59.4, "59 s"),
        (9.97, "10 s"),
        (59.7, "1 min"),
        (3599.8, "1 h 00 min"),
        (7199, "2 h 00 min"),
        (200, "3 min 20 s"),
        (480, "8 min"),
        (3900, "1 h 05 min"),
        (None, "-"),
    ],
)
def test_durations_are_rounded_to_readable_units(value, text):
    assert quantities.seconds_text(value) == text


@pytest.mark.parametrize(("value", "text"), [(272, "4:32"), (3605, "1:00:05"), (-3, "0:00")])
def test_time_left_reads_like_a_clock(value, text):
    assert quantities.clock_text(value) == text


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("precision.amp", "bf16", "bf16"),
        ("precision.amp", "off", "fp32"),
        ("loader.batch_size", 64, "batch 64"),
        ("loader.pin_memory", False, "no pin_memory"),
        ("layout.channels_last", True, "channels_last"),
        ("compile.mode", "off", "eager"),
        ("optimizer.implementation", "fused", "fused optimizer"),
        ("env.OMP_NUM_THREADS", 4, "OMP_NUM_THREADS=4"),
    ],
)
def test_settings_have_short_phrases(key, value, text):
    assert wording.knob_phrase(key, value) == text


def test_a_configuration_without_changes_is_unchanged():
    assert wording.changes_phrase({}) == "unchanged"


def test_machine_text_starts_with_the_gpus():
    gpus = [{"name": "NVIDIA H200"}, {"name": "NVIDIA H200"}]
    assert wording.machine_text({"gpus": gpus, "num_cores": 16}) == "2 x NVIDIA H200, 16 cores"
    unlike = [{"name": "NVIDIA A100"}, {"name": "Tesla T4"}, {"name": "NVIDIA A100"}]
    assert wording.machine_text({"gpus": unlike}) == "2 x NVIDIA A100, Tesla T4"


def test_outcome_counts_start_with_ok():
    assert wording.counts_text({"timeout": 1, "ok": 4}) == "4 ok, 1 timeout"


@pytest.mark.parametrize(
    ("value", "text"), [(16.84, "16.8"), (92_877, "92,877"), (103_982, "104k"), (2.5e6, "2.50M"), (3e9, "3.00G"), (None, "-")]
)
def test_compact_numbers_fit_six_characters(value, text):
    assert quantities.compact_text(value) == text


def test_an_interval_of_rates_does_not_reach_below_zero():
    assert quantities.interval_text([-3.2, 57.7]) == "[0, 57.7]"
    assert quantities.ratio_interval_text([-0.1, 2.3]) == "[0.00, 2.30]"


@pytest.mark.parametrize(
    ("runs", "text"),
    [
        ("runs", ""),
        ("./runs", ""),
        ("my runs; [x]", " --runs-dir 'my runs; [x]'"),
        ("-r", " --runs-dir ./-r"),
        ("$HOME", " --runs-dir '$HOME'"),
    ],
)
def test_runs_dir_option_is_quoted_for_a_shell(runs, text):
    assert where(Path(runs)) == text


def test_one_line_removes_line_breaks_and_limits_the_length():
    assert plain_text.one_line("a\nb\t\x1b[31mc", 80) == "a b c"
    assert plain_text.one_line("x" * 100, 10) == "xxxxxxx..."


def test_communication_of_a_failed_trial_is_not_measured():
    failed = {"communication": None, "by_rank": [{"rank": 0, "step_s": None}, {"rank": 1, "step_s": None}]}
    assert "not measured" in wording.communication_text(failed)
    failed["by_rank"][0]["step_s"] = 0.1
    assert "DistributedDataParallel" in wording.communication_text(failed)


OWN_FRAME = '  File "/home/me/train.py", line 7, in <module>\n    loss = model(batch)\n'
THEIR_FRAME = '  File "/venv/lib/python3.11/site-packages/torch/nn/modules/module.py", line 1, in call\n    return call()\n'


@pytest.mark.parametrize("num_frames", [2, 20])
def test_log_of_a_failed_trial_shows_the_last_line_of_the_user(num_frames):
    text = "Traceback (most recent call last):\n" + OWN_FRAME + THEIR_FRAME * num_frames + "ValueError: no"
    shown = wording.log_lines({"error": {"traceback": text}})
    assert len(shown) <= wording.MAX_LOG_LINES
    assert shown[-1] == "  | ValueError: no"
    assert "  |     loss = model(batch)" in shown
