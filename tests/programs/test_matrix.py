"""Unmodified programs of many kinds: what the harness detects, which knobs take effect, and whether the timing is right.

`expectations.py` has a row for each program in `scripts/`. The programs themselves confirm knobs and timing in their journals.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autotune.harness.protocol import APPLIED
from tests.harness.conftest import REPOSITORY, SCRIPTS
from tests.programs.expectations import PROGRAMS, PYTHON, SEEN_AS, Program
from tests.programs.starting import Journal, Seen, run_trial, seconds_of_both

Look = Callable[[Program], Seen]
COUNTED = ("num_steps", "num_loaders", "batches_per_step")
FORKED_AT = re.compile(r"<fork_server\.py:\w+:\w+")
# Slow rows that test little more than other rows.
SLOW = (
    "hf_trainer",
    "bystander_from_bash",
    "late_model",
    "evaluating",
    "lightning_module",
    "own_compile",
    "structures",
    "stream_shared",
    "fine_tuned",
    "detector",
    "molecules",
    "hand_written_gathered",
)
EVERY = pytest.mark.parametrize(
    "program",
    [pytest.param(each, marks=[pytest.mark.thorough] * (each.name in SLOW), id=each.name) for each in PROGRAMS],
)


def ranks_of(program: Program) -> list[int | None]:
    return [None] if program.ranks == 1 else list(range(program.ranks))


@EVERY
def test_harness_detects_modules_optimizers_loader_and_unit(seen: Look, program: Program) -> None:
    run = seen(program).bare_run
    assert run.returncode == 0, run.stderr
    found = run.result()
    assert (found.status, found.world_size, found.detected.get("harness_problems")) == ("measured", program.ranks, None)
    assert (found.target is not None) == program.has_loader
    assert found.observed.get("loader.batch_size") == program.batch_size
    assert (found.detected["modules"], found.detected["optimizers"]) == ([*program.modules], [*program.optimizers])
    assert (found.unit, found.unit_source.split(":")[0]) == (program.unit, program.source)
    told = {key: reason for key, reason in found.applicability.items() if key in program.knobs}
    assert told.keys() == program.blocked.keys() & program.knobs.keys()
    for key, reason in program.blocked.items():
        assert reason in found.applicability.get(key, "can be turned")


@EVERY
def test_samples_and_times_match_the_journal_of_the_program(seen: Look, program: Program) -> None:
    for journal, run in ((seen(program).bare, seen(program).bare_run), (seen(program).turned, seen(program).turned_run)):
        for rank in ranks_of(program):
            found = run.result(rank or 0)
            assert found.window is not None
            same = journal.window(found, rank)
            assert found.window.seconds == pytest.approx(same.harness_s, abs=1e-4)
            assert found.window.samples == pytest.approx(same.samples)
            assert same.told_harness_samples == pytest.approx(same.told_own_samples, rel=0.03)
            assert same.told_harness_s == pytest.approx(same.told_own_s, abs=0.03 * same.told_own_s + same.jitter_s)
            if not found.regime:  # without workers, no correction for a draining queue
                assert found.throughput_per_s == pytest.approx(found.window.samples / same.harness_s, rel=0.001)
    own = [step["n"] for step in seen(program).bare.steps(ranks_of(program)[0])]
    if program.samples is not None:
        assert max(set(own), key=own.count) == program.samples


@pytest.mark.parametrize(
    ("late", "by_s", "lost", "is_alike"),
    [(None, 0.0, None, True), *((late, by_s, None, True) for late in (0, 50, 100) for by_s in (0.45, -0.45))]
    + [(None, 0.0, lost, False) for lost in (2, 50, 98)],
)
def test_seconds_of_both_ignores_late_stamps_but_not_time_that_the_harness_misses(late, by_s, lost, is_alike):
    stamps = [number * 0.01 for number in range(103)]
    ends = [end_s - (0.05 if lost is not None and number >= lost else 0.0) for number, end_s in enumerate(stamps)]
    stamps = [stamp_s + (by_s if number == late else 0.0) for number, stamp_s in enumerate(stamps)]
    harness_s, own_s, jitter_s = seconds_of_both(list(range(1, 101)), ends, stamps)
    assert (harness_s == pytest.approx(own_s, abs=0.03 * own_s + jitter_s)) == is_alike
    assert own_s > 0.95


@EVERY
def test_losses_without_knobs_equal_those_of_the_plain_run_bit_by_bit(seen: Look, program: Program) -> None:
    for rank in ranks_of(program):
        alone, watched = seen(program).plain.losses(rank), seen(program).bare.losses(rank)
        num = min(len(alone), len(watched))
        assert num >= 20
        assert watched[:num] == alone[:num]


@EVERY
def test_each_knob_takes_effect_or_is_reported_with_a_reason(seen: Look, program: Program) -> None:
    run, before = seen(program).turned_run, seen(program).bare
    assert run.returncode == 0, run.stderr
    assert "stride" not in run.stderr
    assert "caught" not in run.stdout
    for rank in ranks_of(program):
        found, facts, usual = run.result(rank or 0), seen(program).turned.saw(rank), before.saw(rank)
        reports = {key: (report.status, report.reason) for key, report in found.knobs.items()}
        for key, value in program.knobs.items():
            status, reason = program.refused.get(key, (APPLIED, ""))
            assert (key, reports[key][0]) == (key, status), reports[key]
            assert reason in reports[key][1]
            if key in SEEN_AS and SEEN_AS[key][0] in usual:
                fact, words = SEEN_AS[key]
                expected = words.get(value, value) if status == APPLIED else usual[fact]
                assert (key, facts[fact]) == (key, expected)
        assert {name: facts.get(name) for name in program.saw} == program.saw


def without_fork(targets: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Returns the places where loaders are made, without the fork server's frame; None without a loader."""
    return targets and [{**each, "code": FORKED_AT.sub("", each["code"])} for each in targets]


@pytest.mark.thorough
@EVERY
def test_started_programs_give_the_same_results_as_forked_programs(seen: Look, program: Program, tmp_path: Path) -> None:
    if program.starter != PYTHON and program.ranks == 1:
        pytest.skip("the other tests of this row already start a new process")
    run, forked = run_trial(program, tmp_path, None), seen(program).bare_run.result()
    found = run.result()
    counted = dict.fromkeys(COUNTED, 0)  # the two runs end after different numbers of steps
    assert {**found.detected, **counted} == {**forked.detected, **counted}
    assert (found.target, found.applicability) == (without_fork(forked.target), forked.applicability)
    started, own = Journal(tmp_path / "journal").losses(), seen(program).plain.losses()
    assert started[:20] == own[:20]


def test_programs_do_not_mention_autotune_and_each_has_a_row() -> None:
    used = {word.rpartition("/")[2] for program in PROGRAMS for word in (*program.argv, *program.plain)}
    for path in SCRIPTS.rglob("*.py"):
        assert "autotune" not in path.read_text().lower()
        if path.parent == SCRIPTS and path.name != "journal.py":
            assert path.name in used
    assert len(PROGRAMS) >= 15


def test_only_adapters_py_names_training_libraries() -> None:
    names = re.compile("lightning|accelerate|transformers|hugging|deepspeed|nanogpt|fairscale|timm", re.IGNORECASE)
    harness = REPOSITORY / "autotune" / "harness"
    naming = {str(path.relative_to(harness)) for path in harness.rglob("*.py") if names.search(path.read_text())}
    assert naming == {"adapters.py"}
