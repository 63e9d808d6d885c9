"""Prepares the exported configuration, independently of the format."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from autotune.errors import BadInput
from autotune.export.claims import Claimed
from autotune.export.headline import headline
from autotune.export.provenance import provenance
from autotune.knobs.catalogue import CATALOGUE, knob
from autotune.knobs.loader import BATCH_SIZE, MULTIPROCESSING_CONTEXT
from autotune.knobs.step import ACCUMULATION, derived, own_accumulation
from autotune.knobs.values import value_of
from autotune.masking import is_masked
from autotune.plain_text import shell_word
from autotune.records import Knobs, KnobValue, Summary, Tier

HOLDS = "keeps the global batch at train.global_batch"
ON_TOP = (
    "The program itself accumulates {0} batches per step, and step.accumulation={1} multiplies that: {2} batches per step were "
    "measured."
)


@dataclass(frozen=True, kw_only=True)
class Winner:
    """A configuration ready for export.

    Attributes:
        knobs: knobs to set: the winner's changes and the user's pins.
        active: the members of `knobs` and `forced` that have an effect; for example, prefetch_factor has none with
            num_workers=0. step.accumulation in `active` is the number of batches of a step: autotune's value times the number
            of batches that the program itself accumulates. A tool such as Lightning or DeepSpeed uses the
            exported value instead of the program's own accumulation, so the value must be this product.
        forced: {"loader.multiprocessing_context": "fork"} if the harness itself had to choose how to start the workers that
            the trial added; {} otherwise. best.yaml omits it: in `autotune apply`, the harness makes this choice again.
        full: knob -> value for every knob whose value is known: from `knobs` and `forced`, else the program's own value.
        remarks: knob key -> remark, which gives the previous value and the effect, or says that the knob was pinned.
        headline: comment lines that say what the file is, its speedup, and where and when it was measured.
        provenance: origin and measurements as plain values, as best.yaml contains them.
        device: device of the measurement, "cuda" or "cpu"; "" if unknown.
        optimizers: class names of the program's optimizers; [] if unknown.
        world_size: number of processes that train, on all machines together; 1 if unknown.
        num_nodes: number of machines that they run on; 1 if unknown.
        num_replicas: number of GPUs that share each batch under nn.DataParallel; 1 without it, or if unknown.
        nothing: why the configuration changes nothing; "" if it changes something.
    """

    knobs: Knobs
    active: Knobs
    forced: Knobs = field(default_factory=dict)
    full: Knobs
    remarks: dict[str, str] = field(default_factory=dict)
    headline: list[str]
    provenance: dict[str, Any]
    device: str = ""
    optimizers: list[str] = field(default_factory=list)
    world_size: int = 1
    num_nodes: int = 1
    num_replicas: int = 1
    nothing: str = ""

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables to set before the program starts, name -> value."""
        return {name: text for key, value in self.active.items() for name, text in knob(key).environment(value).items()}

    @property
    def in_program(self) -> list[str]:
        """Active knobs that are not environment variables."""
        return [key for key, value in self.active.items() if not knob(key).environment(value)]

    def per_device(self, name: str, batch_size: int) -> dict[str, Any] | None:
        """Returns {name: samples of a batch on one GPU}; None if this is not a whole number."""
        each, rest = divmod(batch_size, self.num_replicas)
        return {name: each} if each and not rest else None


def _own_values(summary: Summary) -> Knobs:
    """Returns the program's own values of the knobs, except values of a type that the knob cannot have."""

    def is_known(key: str, value: KnobValue) -> bool:
        kind = CATALOGUE[key].type if key in CATALOGUE else object
        return isinstance(value, int | float if kind is float else kind)

    return {key: value for key, value in (summary["baseline"].get("knobs") or {}).items() if is_known(key, value)}


def _held_accumulation(summary: Summary, own: Knobs, full: Knobs) -> Knobs:
    """Returns the accumulation with which the knobs `full` reach `train.global_batch`; {} if none is needed."""
    batch, each = own.get(BATCH_SIZE.key), own.get(ACCUMULATION.key)
    if "train.global_batch" not in (summary.get("settings") or {}) or not isinstance(batch, int) or not isinstance(each, int):
        return {}
    found = {ACCUMULATION.key: derived(full, held=batch * each)[ACCUMULATION.key]}
    is_passed = ACCUMULATION.key in (summary.get("placeholders") or {})  # the command would otherwise pass the baseline's value
    return found if is_passed or found[ACCUMULATION.key] != ACCUMULATION.default else {}


def _forced(entry: dict[str, Any], knobs: Knobs) -> Knobs:
    """Returns the start method of the workers that the trial added, if the harness had to choose one; {} otherwise.

    From Python 3.14 on, workers are not forked by default. A trial forks the workers that it adds.
    """
    key, method = MULTIPROCESSING_CONTEXT.key, entry.get("worker_start")
    return {key: method} if method and key not in knobs else {}


def winner(summary: Summary, tier: Tier | None) -> Winner:
    """Returns the best configuration of a study, or of a tier if one is given.

    Raises:
        BadInput: the study has no winner, or the winner has a value that its knob cannot have.
    """
    entry = summary["best"] if tier is None else summary["best_by_tier"].get(str(tier))
    if not entry:
        winner_of = f"winner up to tier {tier}" if tier and summary["best"] else "winner"
        raise BadInput(
            f"STUDY: has no {winner_of} to export, got {summary['study']!r} ({summary['status']}). "
            f"`autotune show {shell_word(summary['study'])}` lists its trials and their outcomes."
        )
    claimed = Claimed(summary=summary, entry=entry, tier=tier)
    pinned = summary.get("pinned") or {}
    knobs = {**pinned, **entry["overrides"]}
    hidden = {key: knobs.pop(key) for key in list(knobs) if is_masked(knobs[key])}
    for key, value in knobs.items():
        value_of(knob(key), value)
    own = _own_values(summary)
    held = {} if ACCUMULATION.key in knobs else _held_accumulation(summary, own, {**own, **knobs})
    knobs |= held
    forced = _forced(entry, knobs)
    full = {**own, **knobs, **forced}
    active = {key: value for key, value in {**knobs, **forced}.items() if knob(key).is_active(full)}
    lines = headline(claimed, hidden, held)
    times = own_accumulation((summary.get("detected") or {}).get("batches_per_step"), own)
    if ACCUMULATION.key in active and times > 1:
        each = int(active[ACCUMULATION.key])
        active[ACCUMULATION.key] = each * times
        lines.append(ON_TOP.format(times, each, each * times))
    said = provenance(claimed)
    if hidden:
        said["secret"] = list(hidden)
    detected = summary.get("detected") or {}
    return Winner(
        knobs=knobs,
        active=active,
        forced=forced,
        full=full,
        remarks={key: HOLDS if key in held else claimed.remark(key, is_pinned=key in pinned) for key in knobs},
        headline=lines,
        provenance=said,
        device=str(summary["machine"].get("device") or ""),
        optimizers=list(detected.get("optimizers") or []),
        world_size=int(detected.get("world_size") or 1),
        num_nodes=max(1, int(summary["machine"].get("num_nodes") or 1)),
        num_replicas=max(1, int(detected.get("num_replicas") or 1)),
        nothing=claimed.nothing,
    )
