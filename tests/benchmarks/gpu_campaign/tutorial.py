"""Stage `tutorial`: tunes the model of the PyTorch profiler tutorial by the tutorial's own steps, and by `autotune run`.

The model is ResNet-18 on 10,000 images of 32 pixels scaled to 224, batch 32, no workers, float32. On a V100, the tutorial's
seven steps raised its rate from about 400 to 3,268 samples/s (8.2x) and the utilisation from 31.65 % to 97.5 %. The same steps
are repeated here, except that images are not sent to the device as bytes: that is a change of the code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autotune.records import Knobs
from tests.benchmarks.commands import essence, run_study, trials_of, verdict_words
from tests.benchmarks.gpu_campaign.checks import Check, Found, Goal, Place
from tests.benchmarks.gpu_campaign.trying import DRY_OVERRIDES, FINALS, SCREENING, Trials, recipe
from tests.benchmarks.reporting import table

# The tutorial's steps, each added to the steps before it. Setting gradients to None changes nothing any more, because it is now
# torch's default.
CHAIN: list[tuple[str, Knobs]] = [
    ("as it is", {}),
    ("8 workers", {"loader.num_workers": 8}),
    ("pinned, copied without waiting", {"loader.pin_memory": True, "loader.non_blocking": True}),
    ("batch 512", {"loader.batch_size": 512}),
    ("gradients set to None", {"optimizer.set_to_none": True}),
    ("autocast, batch 1024", {"precision.amp": "bf16", "loader.batch_size": 1024}),
    ("compiled", {"compile.mode": "default"}),
]
DRY_CHAIN: list[tuple[str, Knobs]] = [
    ("as it is", {}),
    ("copied without waiting", {"loader.non_blocking": True}),  # not applicable on a CPU
    ("batch 64", {"loader.batch_size": 64}),
]
OVER_HAND, OVER_BASELINE, OUT_OF_MEMORY_FRAC = 1.05, 8.2, 0.01
MAX_ROUNDS = 3
ROUND_S = 60.0  # maximum time of a round of the comparison: two trials, one of which may compile


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes that differ in a dry run."""

    recipe: tuple[str, ...]
    chain: list[tuple[str, Knobs]]
    minutes: float
    overrides: tuple[str, ...] = ()


FULL = Sizes(
    recipe=("model=resnet18", "data=fake_cifar"),
    chain=CHAIN,
    minutes=5.0,
)
DRY = Sizes(
    recipe=("model=mlp", "data=tabular", "model.hidden_size=16"),
    chain=DRY_CHAIN,
    minutes=0.4,
    overrides=("search_space=none", "loader.batch_size=choice(64,128)", "study.budget.trials=1", *DRY_OVERRIDES),
)


def sizes(place: Place) -> Sizes:
    """Returns the sizes of this run."""
    return DRY if place.is_dry else FULL


def climb(place: Place) -> list[dict[str, Any]]:
    """Returns the result of each step by hand, {"title", "knobs", "rate_per_s", "note", "seconds"}; measures missing steps."""
    trials, knobs, steps = recipe(place, "hand", sizes(place).recipe), Knobs(), []
    for title, change in sizes(place).chain:
        knobs = {**knobs, **change}
        found = trials.measure(knobs, SCREENING)
        note = found["reason"]
        if refused := found["not_applied"]:  # a knob that cannot be set here fails the trial: repeat it without
            knobs = {key: value for key, value in knobs.items() if key not in refused}
            note = "; ".join(f"{key} {why}" for key, why in refused.items())
            found = trials.measure(knobs, SCREENING)
        steps.append(
            {"title": title, "knobs": knobs, "note": note, "rate_per_s": found["rate_per_s"], "seconds": found["seconds"]}
        )
    return steps


def by_hand(place: Place) -> Found:
    """The tutorial's steps are measured by hand; a knob that cannot be set here is named and left out."""
    steps = climb(place)
    first, best = steps[0], fastest(steps)
    assert first["rate_per_s"], f"the program as it is: {first['note']}"
    rows = [
        (step["title"], f"{step['rate_per_s']:.0f}" if step["rate_per_s"] else "", step["note"], f"{step['seconds']:.0f}")
        for step in steps
    ]
    words = f"{first['rate_per_s']:.0f} -> {best['rate_per_s']:.0f} samples/s, {best['rate_per_s'] / first['rate_per_s']:.2f}x"
    return Found(evidence=words, detail=table(("by hand", "samples/s", "", "seconds"), rows))


def fastest(steps: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the fastest step, which is harder to beat than the last one."""
    return max(steps, key=lambda step: float(step["rate_per_s"] or 0.0))


def study(place: Place) -> dict[str, Any]:
    """Returns the result of `autotune run`."""
    chosen, runs = sizes(place), place.folder / "runs"

    def run() -> dict[str, Any]:
        summary = run_study(runs, "tutorial", [*chosen.recipe, *chosen.overrides], minutes=chosen.minutes)
        busy = {trial.number: trial.metrics.get("gpu.utilisation_frac") for trial in trials_of(runs, "tutorial")}
        ends = {name: busy.get((summary[name] or {}).get("trial")) for name in ("baseline", "best")}
        return {**essence(summary), "utilisation_frac": ends}

    return dict(place.kept("study", run))


def by_autotune(place: Place) -> Found:
    """`autotune run` reaches the tutorial's speed-up in five minutes."""
    found = study(place)
    num_trials, num_oom = (
        sum(found["counts"].values()),
        sum(found["counts"].get(name, 0) for name in ("device_oom", "host_oom")),
    )
    ratio = (found["speedup"] or {}).get("ratio")
    goals = [Goal(what="share of trials out of memory", value=num_oom / num_trials, bound=OUT_OF_MEMORY_FRAC, is_ceiling=True)]
    if ratio:
        goals.insert(0, Goal(what="winner over the start", value=ratio, bound=OVER_BASELINE))
    busy = " -> ".join("unknown" if share is None else f"{share:.1%}" for share in found["utilisation_frac"].values())
    rows = [
        (row["knob"], row["from"], row["to"], f"{row['ratio']:.3f}" if row["ratio"] else "") for row in found["attribution"]
    ]
    detail = table(("changed", "from", "to", "worth"), rows) if rows else ""
    return Found(evidence=f"{verdict_words(found)}; utilisation {busy}", goals=goals, detail=detail)


def against_each_other(place: Place) -> Found:
    """The winner and the fastest step by hand are measured in fresh processes, in turn; only these rounds are compared."""
    chosen = sizes(place)
    trials = recipe(place, "hand", chosen.recipe)
    pair = {"winner": dict((study(place)["best"] or {}).get("overrides", {})), "by hand": dict(fastest(climb(place))["knobs"])}
    rates: dict[str, list[float]] = {name: [] for name in pair}
    for number in range(1 if place.is_dry else MAX_ROUNDS):
        if number and place.left_s < ROUND_S:
            break
        for name in pair if number % 2 == 0 else reversed(pair):
            rates[name].append(_final(trials, pair[name], again=number + 1))
    ratios = [ours / theirs for ours, theirs in zip(rates["winner"], rates["by hand"], strict=True)]
    ratio = sum(ratios) / len(ratios)
    words = ", ".join(f"{name} {' '.join(f'{rate:.0f}' for rate in values)} samples/s" for name, values in rates.items())
    return Found(evidence=words, goals=[Goal(what="winner over the hand chain", value=ratio, bound=OVER_HAND)])


def _final(trials: Trials, knobs: Knobs, *, again: int) -> float:
    found = trials.measure(knobs, FINALS, again=again)
    assert found["rate_per_s"], f"{knobs}: {found['outcome']}: {found['reason']}"
    return float(found["rate_per_s"])


def checks(is_dry: bool) -> list[Check]:
    """Returns the checks of the stage."""
    left_out = [
        Check(name=f"by hand: {title}", run=by_hand, needs_cuda="its size, and what it is worth") for title, _ in CHAIN[1:]
    ]
    return [
        Check(name="by hand", run=by_hand, seconds=120.0),
        *(left_out if is_dry else []),
        Check(name="by autotune", run=by_autotune, seconds=FULL.minutes * 60),
        Check(name="against each other", run=against_each_other, seconds=ROUND_S),
    ]
