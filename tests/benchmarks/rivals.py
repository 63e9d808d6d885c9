"""Compares autotune with other searches on the same machine, program and budget. The searches take turns.

    python -m tests.benchmarks.rivals [--minutes 4] [--repeats 3] [--only NAME ...] [--workers N] [--quick] [--json FILE]

There are three ways to tune `image_program.py`, a training script that measures its own rate:

- `autotune`: `autotune run -- python image_program.py`. Its winner is verified by `autotune apply`.
- `tpe`: a script that a user could write in an afternoon. Optuna's TPE proposes options of the program. Each trial is a fresh
  process with 3 warm-up steps and 50 measured steps. The best trial's options are verified.
- `pytorch-autotune` 2.0.0: tunes model and batch inside one process. Its stored winner is verified in a fresh process. It
  supports only one fixed batch (no `--workers`). Install it with pip install --no-deps pytorch-autotune==2.0.0

In each repeat, every search runs for `--minutes`, in rotating order. Then all winners and the unchanged script run in fresh
processes, in turn and in reverse (ABCCBA), and the script measures their rates. Only these rates are compared. For the seconds
to 95 % of the best rate, a search's own rates are scaled so that its winner's rate equals the verified one.

Nothing else may run on the machine. Otherwise, autotune would spend its budget on waiting for a quiet machine; the others
would not wait.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.launchers.environment import own_environment
from autotune.machine import host_facts
from autotune.records import Kind
from autotune.run_dir import StudyFolder
from tests.benchmarks.commands import run_study
from tests.benchmarks.reporting import machine_lines, table

PROGRAM, RIVAL = Path(__file__).with_name("image_program.py"), Path(__file__).with_name("rival_tuner.py")
OURS, TPE, PYTORCH_AUTOTUNE, PLAIN = "autotune", "tpe", "pytorch-autotune", "as it is"
INSTALL = "pip install --no-deps pytorch-autotune==2.0.0"
STEPS = 50  # measured steps of a trial of `tpe`
TRIAL_S = 300.0  # time limit of a trial of `tpe`
SLACK_S = 120.0  # a search is killed this long after its budget
NEAR_FRAC = 0.95  # share of the best verified rate that searches are timed to reach
SAID = re.compile(r"\[ok\s*\].*?([\d.]+) ms\s*$")  # the line that pytorch-autotune prints after a trial

Found = dict[str, Any]  # {"seconds", "timeline": [[seconds, samples per second]], "winner", "command", "num_trials"}


@dataclass(frozen=True, kw_only=True)
class Work:
    """The job to tune, and the budget.

    Attributes:
        words: options of the program, the same for all searches.
        workers: loader workers of the unchanged program; None for one fixed batch.
        batch: samples per step.
        folder: folder in which the searches work.
        budget_s: time of each search.
        max_trials: maximum number of trials of each search; None for no limit.
        seconds: how long the program measures when a winner is verified.
    """

    folder: Path
    budget_s: float
    words: tuple[str, ...] = ()
    workers: int | None = None
    batch: int = 128
    max_trials: int | None = None
    seconds: float = 15.0
    overrides: tuple[str, ...] = field(default=())

    @property
    def options(self) -> list[str]:
        """Options of the unchanged program."""
        return [*self.words, "--batch", str(self.batch), *([] if self.workers is None else ["--workers", str(self.workers)])]

    @property
    def program(self) -> list[str]:
        """Command of the unchanged program."""
        return [sys.executable, str(PROGRAM), *self.options]


def missing(name: str) -> str:
    """Returns why a search cannot take part; "" if it can."""
    if name == PYTORCH_AUTOTUNE and importlib.util.find_spec("pytorch_autotune") is None:
        return f"pytorch-autotune is not installed: {INSTALL}"
    return ""


# The searches ---------------------------------------------------------------------------------------------------------------


def search(name: str, work: Work, repeat: int) -> Found:
    """Returns the result of a search within the budget."""
    return {OURS: search_ours, TPE: search_tpe, PYTORCH_AUTOTUNE: search_pytorch_autotune}[name](work, repeat)


def search_ours(work: Work, repeat: int) -> Found:
    """Returns the result of `autotune run`."""
    runs, name = work.folder / "runs", f"rivals-{work.budget_s:.0f}s-{repeat}"
    limits = [] if work.max_trials is None else [f"study.budget.trials={work.max_trials}"]
    overrides = [*work.overrides, *limits, f"study.seed={repeat}"]
    summary = run_study(runs, name, overrides, minutes=work.budget_s / 60, command=work.program)
    folder = StudyFolder(runs / name)
    begun_s = folder.read_study().started_at
    trials = [trial for trial in folder.read_trials() if trial.kind in (Kind.baseline, Kind.search)]
    figures = [(trial.started_at + trial.seconds - begun_s, trial.value) for trial in trials if trial.outcome.may_win]
    best = summary["best"] or {}
    apply = [sys.executable, "-m", "autotune", "apply", str(folder.best_file), "--"] if best.get("overrides") else []
    return {
        "seconds": summary["seconds"]["total"],
        "timeline": climb(figures),
        "winner": " ".join(f"{key}={value}" for key, value in best.get("overrides", {}).items()) or PLAIN,
        "command": [*apply, *work.program],
        "num_trials": len(trials),
    }


def choices(work: Work) -> dict[str, list[list[str]]]:
    """Returns the search space of `tpe`: {name: the program's options for each value}."""
    facts = host_facts()
    has_cuda, num_cores = bool(facts["gpus"]), int(facts["num_cores"])
    switches = ["--channels-last", "--fused", *(["--tf32", "--cudnn-benchmark"] if has_cuda else [])]
    found = {switch.strip("-"): [[], [switch]] for switch in switches}
    formats = ["off", "bf16", *(["fp16"] if has_cuda else [])]
    modes = ["off", "default", *(["reduce-overhead", "max-autotune"] if has_cuda else [])]
    found |= {"amp": [["--amp", name] for name in formats], "compile": [["--compile", name] for name in modes]}
    if not has_cuda:
        found["threads"] = [["--threads", str(number)] for number in sorted({1, max(1, num_cores // 2), num_cores})]
    if work.workers is not None:
        numbers = sorted({0, 1, 2, 4, 8, num_cores} & set(range(num_cores + 1)))
        found["workers"] = [["--workers", str(number)] for number in numbers]
    return found


def search_tpe(work: Work, repeat: int) -> Found:
    """Returns the result of Optuna's TPE with a fresh process and 50 steps per trial."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=repeat))
    space, figures, begun_s = choices(work), [], time.monotonic()
    while (left_s := work.budget_s - (time.monotonic() - begun_s)) > 0 and len(study.trials) != work.max_trials:
        trial = study.ask()
        chosen = [space[name][trial.suggest_categorical(name, list(range(len(space[name]))))] for name in space]
        words = list(itertools.chain(*chosen))
        trial.set_user_attr("words", words)
        command = [*caching(work, TPE), *work.program, *words]
        value = rate_of([*command, "--steps", str(STEPS)], timeout_s=min(TRIAL_S, left_s))
        study.tell(trial, value, state=None if value else optuna.trial.TrialState.FAIL)
        if value:
            figures.append((time.monotonic() - begun_s, value))
    words = list(study.best_trial.user_attrs["words"]) if figures else []
    return {
        "seconds": time.monotonic() - begun_s,
        "timeline": climb(figures),
        "winner": " ".join(words) or PLAIN,
        "command": [*caching(work, TPE), *work.program, *words],
        "num_trials": len(study.trials),
    }


def search_pytorch_autotune(work: Work, repeat: int) -> Found:
    """Returns the result of pytorch-autotune. The time of each trial is taken when its line is printed."""
    kept = f"PYTORCH_AUTOTUNE_CACHE={work.folder / f'pytorch-autotune-{repeat}.json'}"
    command = [*caching(work, PYTORCH_AUTOTUNE), kept, sys.executable, "-u", str(RIVAL), *work.options]
    work.folder.mkdir(parents=True, exist_ok=True)
    begun_s, figures, lines = time.monotonic(), [], []
    with (
        (work.folder / f"pytorch-autotune-{repeat}.log").open("w+") as log,
        subprocess.Popen(
            [*command, "--search", str(int(work.budget_s))],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        ) as process,
    ):
        assert process.stdout
        for line in process.stdout:
            lines.append(line)
            if said := SAID.search(line):
                figures.append((time.monotonic() - begun_s, work.batch * 1e3 / float(said[1])))
        process.wait(timeout=SLACK_S)
        log.seek(0)
        assert process.returncode == 0, f"pytorch-autotune ended with {process.returncode}: {log.read()[-500:]}"
    said_last = json.loads(lines[-1])
    return {
        "seconds": time.monotonic() - begun_s,
        "timeline": climb(figures),
        "winner": said_last["winner"],
        "command": command,
        "num_trials": sum(trial["ms_per_step"] is not None for trial in said_last["trials"]),
        "said": said_last,
    }


def caching(work: Work, name: str) -> list[str]:
    """Returns the words before a command that give it this search's own compile cache, so that searches share no graphs."""
    folder = work.folder / f"{name}-compiled"
    return ["env", f"TORCHINDUCTOR_CACHE_DIR={folder}", f"TRITON_CACHE_DIR={folder / 'triton'}"]


def climb(figures: Sequence[tuple[float, float | None]]) -> list[list[float]]:
    """Returns [seconds, best rate so far] for each moment at which the best rate rose."""
    found: list[list[float]] = []
    for seconds, value in figures:
        if value and (not found or value > found[-1][1]):
            found.append([seconds, value])
    return found


# Verification ---------------------------------------------------------------------------------------------------------------


def rate_of(command: Sequence[str], *, timeout_s: float) -> float | None:
    """Returns the samples per second that the program itself measures; None if it failed or took too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=own_environment(), timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return None
    return float(json.loads(done.stdout.splitlines()[-1])["rate_per_s"]) if done.returncode == 0 else None


def verify(commands: dict[str, list[str]], work: Work, *, is_dry: bool = False) -> dict[str, list[float]]:
    """Returns the rates of the winners, two each, measured in turn and in reverse (ABCCBA).

    Args:
        commands: {name of a search: its winner's command}.
        work: the job that was tuned.
        is_dry: whether to measure each winner only once.
    """
    order = [*commands, *([] if is_dry else reversed(commands))]
    found: dict[str, list[float]] = {name: [] for name in commands}
    for name in order:
        skip_s = str(min(3.0, work.seconds))
        value = rate_of([*commands[name], "--skip-s", skip_s, "--seconds", str(work.seconds)], timeout_s=TRIAL_S)
        assert value is not None, f"{name}: its winner did not train when it was verified: {' '.join(commands[name])}"
        found[name].append(value)
        print(f"  verified  {name}  {value:.1f}/s", flush=True)
    return found


def seconds_to_near(found: Found, verified_per_s: float, best_per_s: float) -> float | None:
    """Returns the time at which a search reached 95 % of the best verified rate; None if it never did."""
    if not found["timeline"]:
        return None
    worth = verified_per_s / found["timeline"][-1][1]
    return next((seconds for seconds, value in found["timeline"] if value * worth >= NEAR_FRAC * best_per_s), None)


def one_repeat(names: Sequence[str], work: Work, repeat: int) -> dict[str, Any]:
    """Returns each search's result and its winner's verified rates, {"found": {name: Found}, "verified": {name: [rates]}}."""
    order = [*names[repeat % len(names) :], *names[: repeat % len(names)]]
    found = {}
    for name in order:
        found[name] = search(name, work, repeat)
        print(
            f"  {name}: {found[name]['num_trials']} trials in {found[name]['seconds']:.0f} s: {found[name]['winner']}",
            flush=True,
        )
    commands = {PLAIN: work.program, **{name: found[name]["command"] for name in names}}
    return {"found": found, "verified": verify(commands, work)}


def mean(values: Sequence[float]) -> float:
    """Returns the geometric mean."""
    return statistics.geometric_mean(values)


def rows(repeats: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Returns a row of the table for the unchanged program and for each search."""
    best_per_s = max(mean(rates) for repeat in repeats for rates in repeat["verified"].values())
    lines = []
    for name in repeats[0]["verified"]:
        rates = [mean(repeat["verified"][name]) for repeat in repeats]
        ratios = [
            mean(repeat["verified"][OURS]) / rate
            for repeat, rate in zip(repeats, rates, strict=True)
            if OURS in repeat["found"]
        ]
        found = [repeat["found"].get(name) for repeat in repeats]
        near = [seconds_to_near(one, rate, best_per_s) for one, rate in zip(found, rates, strict=True) if one]
        lines.append(
            (
                name,
                f"{mean(rates):.1f}",
                f"{mean(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})" if ratios else "",
                f"{mean(rates) / best_per_s:.1%}",
                ", ".join("never" if seconds is None else f"{seconds:.0f}" for seconds in near),
                ", ".join(f"{one['seconds']:.0f}" for one in found if one),
                ", ".join(str(one["num_trials"]) for one in found if one),
                next((one["winner"] for one in found if one), ""),
            )
        )
    return lines


HEADER = ("search", "verified/s", "ours / it", "of the best", "s to 95 %", "search s", "trials", "winner of the first repeat")


def main(words: Sequence[str] | None = None) -> int:
    """Runs and prints the comparison; returns 0 unless a search could not be compared."""
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=4.0, help="budget of each search")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=(OURS, TPE, PYTORCH_AUTOTUNE), default=[OURS, TPE, PYTORCH_AUTOTUNE])
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--workers", type=int, help="load images with this many workers; pytorch-autotune cannot")
    parser.add_argument("--seconds", type=float, default=15.0, help="length of the measurement that verifies a winner")
    parser.add_argument("--quick", action="store_true", help="one repeat of one minute per search, to see whether it runs")
    parser.add_argument("--json", type=Path, help="file for all measurements")
    options = parser.parse_args(words)
    wanted = [name for name in options.only if name != PYTORCH_AUTOTUNE or options.workers is None]
    names = [name for name in wanted if not missing(name)]
    for name in wanted:
        if why := missing(name):
            print(f"left out  {name}: {why}", flush=True)
    if not names:
        raise SystemExit("no search is left")
    repeats = []
    with tempfile.TemporaryDirectory(prefix="rivals-") as place:
        for repeat in range(1 if options.quick else options.repeats):
            work = Work(
                folder=Path(place) / str(repeat),
                budget_s=60.0 if options.quick else options.minutes * 60,
                words=("--model", options.model, "--size", str(options.size)),
                workers=options.workers,
                batch=options.batch,
                seconds=5.0 if options.quick else options.seconds,
            )
            print(f"repeat {repeat + 1}, {work.budget_s:.0f} s each", flush=True)
            repeats.append(one_repeat(names, work, repeat))
            if options.json:
                options.json.write_text(json.dumps({"machine": machine_lines(), "repeats": repeats}, indent=1))
    print("\n" + table(HEADER, rows(repeats)))
    print(f"n         {len(repeats)} repeats; rates: geometric mean of two verified runs each; ours / it: mean (least to most)")
    print("\n".join([*machine_lines(), f"date      {time.strftime('%Y-%m-%d')}"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
