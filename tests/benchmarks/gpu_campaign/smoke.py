"""Stage `smoke`: does everything work that can only be tested on a GPU?

Most checks run tests of `tests/gpu`. The tests are skipped if there is no GPU. Tests that neither time the device nor wait
until it is free run at the same time: on an H100, 13 of them took 61 s in seven processes, mostly to import torch.
"""

from __future__ import annotations

import ast
import json
import os
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from autotune.run_dir import StudyFolder
from tests.benchmarks.commands import ROOT, run_command, run_study
from tests.benchmarks.gpu_campaign.checks import Check, Found, Place
from tests.benchmarks.reporting import table

TESTS = ROOT / "tests" / "gpu"
TESTS_S = 240.0  # time limit of a check that runs tests
# Tests in these files time the device, or wait until no other process holds its memory.
ALONE = ("test_clean_gate.py", "test_counters.py", "test_device_clock.py", "test_explaining.py", "test_sticky_errors.py",
         "test_warm_starts.py")  # fmt: skip
MAX_BESIDE = 8  # tests that share the GPU
ENERGY_MINUTES, POWER_MINUTES = 1.0, 0.5
RECIPE = ("model=resnet18", "data=fake_cifar")
ANSWERED = ("driver", "persistence mode", "clocks", "power cap")  # findings that every driver reports


def run_tests(selection: Sequence[str], place: Place) -> Found:
    """Runs tests marked `gpu`; the evidence contains what each passed test observed.

    Args:
        selection: arguments of pytest.
        place: the stage's place.
    """
    report = place.folder / "tests.xml"
    report.unlink(missing_ok=True)
    # Warnings of a newer or older torch are no failures here.
    words = ["-m", "gpu", "-W", "default", "-p", "no:cacheprovider", f"--junitxml={report}", *selection]
    run_command("-m", "pytest", *words, timeout_s=TESTS_S, may_fail=True)
    assert report.exists(), "pytest wrote no report"
    rows, failed = [], []
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        name = str(case.get("name"))
        seen = ", ".join(f"{entry.get('name')} {entry.get('value')}" for entry in case.iter("property"))
        problem = case.find("failure") if case.find("failure") is not None else case.find("error")
        skipped = case.find("skipped")
        if problem is not None:
            failed.append(f"{name}: {str(problem.get('message'))[:300]}")
        status = "FAILED" if problem is not None else "skipped" if skipped is not None else "passed"
        note = str(skipped.get("message")) if skipped is not None else seen
        rows.append(
            (status, name.removeprefix("test_").replace("_", " "), note.replace("|", "/"), f"{float(case.get('time', 0)):.1f}")
        )
    assert rows, "no test was found"
    assert not failed, f"{len(failed)} of {len(rows)} failed: " + "; ".join(failed)
    num_passed = sum(row[0] == "passed" for row in rows)
    return Found(evidence=f"{num_passed} of {len(rows)} tests passed", detail=table(("", "test", "saw", "seconds"), rows))


def doctor_knows_the_gpus(_: Place) -> Found:
    """The real driver reports what `autotune doctor` asks for; a stand-in cannot show which values a real driver reports."""
    document = json.loads(run_command("-m", "autotune", "doctor", "--json", may_fail=True))
    found = {finding["name"]: finding for finding in document["findings"]}
    unknown = [name for name in ANSWERED if found[name]["status"] == "skipped"]
    assert not unknown, f"not answered: {', '.join(unknown)}"
    assert found["torch"]["status"] == "ok", found["torch"]["found"]
    rows = [(finding["status"], finding["name"], finding["found"]) for finding in document["findings"]]
    words = "; ".join(str(found[name]["found"]) for name in ANSWERED)
    return Found(evidence=words, detail=table(("", "doctor looked at", "found"), rows))


def energy_and_power_are_measured(place: Place) -> Found:
    """A study of energy reads joules. A power limit that no configuration keeps is read, and every trial violates it."""
    runs = place.folder / "runs"
    overrides = [*RECIPE, "objective=[energy_per_sample,throughput]"]
    summary = run_study(runs, "energy", overrides, minutes=ENERGY_MINUTES)
    values = [trial["objectives"] for trial in summary["trials"] if trial["outcome"] == "ok"]
    assert values, f"no trial worked: {summary['counts']}"
    assert all(value.get("energy_per_sample", 0) > 0 for value in values), f"{values}"
    limits = ["study.budget.trials=1", "constraints.max_power_w=1", "study.name=power", f"runs_dir={runs}"]
    power = StudyFolder(runs / "power")
    if not power.summary_file.exists():  # the study ends without a winner, and so with an exit code other than 0
        budget = f"study.budget.minutes={POWER_MINUTES}"
        run_command("-m", "autotune", "run", *RECIPE, *limits, budget, may_fail=True, timeout_s=TESTS_S)
    outcomes = power.read_summary()["counts"]
    assert "ok" not in outcomes, f"at most 1 W was kept: {outcomes}"
    best = summary["best"] or {}
    return Found(evidence=f"{summary['baseline']['objectives']} -> {best.get('objectives')}; at most 1 W: {outcomes}")


def other_files() -> list[Path]:
    """Returns the test files outside `tests/gpu` with tests marked `gpu`.

    pytest does not get the other files, because their imports may need libraries that are missing.
    """
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [path for path in files if path.parent != TESTS and "@pytest.mark.gpu" in path.read_text(encoding="utf-8")]


def tests_together() -> Check:
    """Returns the check that runs the tests that may share the GPU, as many at once as the cores can start."""
    paths = [*(path for path in sorted(TESTS.glob("test_*.py")) if path.name not in ALONE), *other_files()]
    num_processes = max(1, min(MAX_BESIDE, len(os.sched_getaffinity(0)) // 2))
    return Check(
        name="the tests that may share the GPU pass",
        run=partial(run_tests, ["-n", str(num_processes), "--dist", "load", *map(str, paths)]),
        needs_cuda=", ".join(str(path.relative_to(ROOT)) for path in paths),
        seconds=150.0,
    )


def file_of_tests(path: Path) -> Check:
    """Returns the check that runs a test file. The check's name is the file's docstring."""
    title = (ast.get_docstring(ast.parse(path.read_text())) or path.stem).splitlines()[0].rstrip(".")
    return Check(name=title, run=partial(run_tests, [str(path)]), needs_cuda=f"{path.relative_to(ROOT)}", seconds=60.0)


def checks(_: bool) -> list[Check]:
    """Returns the checks of the stage; all of them need a GPU."""
    return [
        Check(
            name="doctor knows the GPUs",
            run=doctor_knows_the_gpus,
            needs_cuda="what a real driver tells of clocks and power",
        ),
        tests_together(),
        *(file_of_tests(TESTS / name) for name in ALONE),
        Check(
            name="energy and power are measured",
            run=energy_and_power_are_measured,
            needs_cuda="NVML's energy counter and power reading",
            seconds=120.0,
        ),
    ]
