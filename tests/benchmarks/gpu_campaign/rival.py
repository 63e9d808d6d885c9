"""Stage `rival`: compares autotune with pytorch-autotune 2.0.0, on an example of pytorch-autotune.

The example is ResNet-18 on one fixed batch of 128 images of 32 pixels. pytorch-autotune publishes a result of 3.84x after a
search of 56 s on an A100. Both tuners get the same script, device and time (`tests/benchmarks/rivals.py`). The winners then run
in fresh processes, in turn, and the script measures their rates.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.benchmarks import rivals
from tests.benchmarks.gpu_campaign.checks import Check, Found, Goal, Missing, Place
from tests.benchmarks.gpu_campaign.trying import DRY_OVERRIDES
from tests.benchmarks.reporting import table
from tests.benchmarks.rivals import OURS, PLAIN, PYTORCH_AUTOTUNE, TPE, Work

BUDGET_S = 300.0  # time limit of pytorch-autotune, which ends by itself once it has tried everything
LEAST_S = 45.0  # minimum time of a study: enough for the baseline and one more trial
LONGER_S = 180.0
LONGER = "autotune, longer"


def work(place: Place) -> Work:
    """Returns the job that all searches tune."""
    whole = Work(folder=place.folder, budget_s=BUDGET_S, words=("--model", "resnet18", "--size", "32"), batch=128)
    if not place.is_dry:
        return whole
    words, overrides = (
        ("--model", "small"),
        ("search_space=none", "optimizer.implementation=choice(default,fused)", *DRY_OVERRIDES),
    )
    return replace(whole, words=words, batch=8, budget_s=10.0, max_trials=1, seconds=0.2, overrides=overrides)


def found_by(place: Place, name: str, key: str, ours: Work) -> dict[str, Any]:
    """Returns the result of a search; runs the search unless an earlier run of the command has done so."""
    return dict(place.kept(key, lambda: rivals.search(name, ours, 0)))


def rival(place: Place) -> dict[str, Any]:
    """Returns the result of pytorch-autotune's search.

    Raises:
        Missing: pytorch-autotune is not installed.
    """
    if why := rivals.missing(PYTORCH_AUTOTUNE):
        raise Missing(why)
    return found_by(place, PYTORCH_AUTOTUNE, PYTORCH_AUTOTUNE, work(place))


def pytorch_autotune_searches(place: Place) -> Found:
    """pytorch-autotune tunes the model on the batch."""
    said = rival(place)["said"]
    rows = [
        (
            " ".join(str(value) for value in trial["config"].values()),
            trial["status"],
            f"{trial['ms_per_step'] or 0:.2f}",
            trial["note"],
        )
        for trial in said["trials"]
    ]
    words = f"{said['winner']}: {said['rate_per_s'] / said['baseline_per_s']:.2f}x by its own figures, {said['seconds']:.0f} s"
    return Found(evidence=words, detail=table(("pytorch-autotune tried", "", "ms per step", ""), rows))


def autotune_searches(place: Place) -> Found:
    """`autotune run` tunes the script in the time that pytorch-autotune took, and again in LONGER_S."""
    theirs = None if rivals.missing(PYTORCH_AUTOTUNE) else rival(place)
    whole = work(place)
    budget_s = max(LEAST_S, theirs["seconds"]) if theirs else whole.budget_s if place.is_dry else LONGER_S
    found = found_by(place, OURS, OURS, replace(whole, budget_s=budget_s))
    words = f"{found['winner']}, {found['num_trials']} trials, {found['seconds']:.0f} s"
    goals = []
    if theirs:
        goals.append(
            Goal(what="seconds over the rival's", value=found["seconds"] / theirs["seconds"], bound=1.0, is_ceiling=True)
        )
        longer = found_by(place, OURS, LONGER, replace(whole, budget_s=LONGER_S))
        words += f"; with {LONGER_S:.0f} s: {longer['winner']}, {longer['num_trials']} trials"
    return Found(evidence=words, goals=goals)


def tpe_searches(place: Place) -> Found:
    """Optuna's TPE, with a fresh process and 50 steps per trial, gets the same time as the first study."""
    if OURS not in (measured := place.document.measured(place.stage)):
        raise Missing("autotune has not searched yet; its seconds are the budget of this search")
    whole, budget_s = work(place), max(LEAST_S, measured[OURS]["seconds"])
    found = found_by(place, TPE, TPE, whole if place.is_dry else replace(whole, budget_s=budget_s))
    return Found(evidence=f"{found['winner']}, {found['num_trials']} trials, {found['seconds']:.0f} s")


def winners_meet(place: Place) -> Found:
    """All winners run in fresh processes, in turn and then in reverse order."""
    measured = place.document.measured(place.stage)
    found = {name: measured[name] for name in (OURS, LONGER, TPE, PYTORCH_AUTOTUNE) if name in measured}
    if len(found) < 2:
        raise Missing("fewer than two have searched so far")
    commands = {PLAIN: work(place).program, **{name: one["command"] for name, one in found.items()}}
    verified = place.kept("verified", lambda: rivals.verify(commands, work(place), is_dry=place.is_dry))
    rates = {name: rivals.mean(values) for name, values in verified.items()}
    goals = [
        Goal(what=f"{name} over pytorch-autotune", value=rates[name] / rates[PYTORCH_AUTOTUNE], bound=1.0)
        for name in (OURS, LONGER)
        if PYTORCH_AUTOTUNE in rates
    ]
    lines = rivals.rows([{"found": found, "verified": verified}])
    words = ", ".join(f"{name} {rate / rates[PLAIN]:.2f}x" for name, rate in rates.items() if name != PLAIN)
    return Found(evidence=words, goals=goals, detail=table(rivals.HEADER, lines))


def checks(_: bool) -> list[Check]:
    """Returns the checks of the stage; later checks need the results of earlier ones."""
    return [
        Check(name="pytorch-autotune searches", run=pytorch_autotune_searches, seconds=BUDGET_S),
        Check(name="autotune searches", run=autotune_searches, seconds=LONGER_S),
        Check(name="Optuna's TPE searches", run=tpe_searches, seconds=90.0),
        Check(name="the winners meet", run=winners_meet, seconds=120.0),
    ]
