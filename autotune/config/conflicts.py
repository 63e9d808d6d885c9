"""Finds pinned knobs and keys that conflict with each other or with this machine, before anything runs."""

from __future__ import annotations

from collections.abc import Iterable

from autotune.config.command import BATCH_SIZE, RECIPE_BATCH_SIZE, CommandTemplate
from autotune.config.schema import StudyConfig
from autotune.knobs import malloc
from autotune.knobs.base import HostContext, value_text
from autotune.knobs.catalogue import CATALOGUE
from autotune.knobs.environment import PREFIX
from autotune.knobs.memory import FRACTION, MALLOC
from autotune.knobs.nccl import MAX_NCHANNELS, MIN_NCHANNELS
from autotune.knobs.parallel import FSDP, STRATEGY
from autotune.knobs.precision import AMP
from autotune.knobs.step import ACCUMULATION
from autotune.masking import is_secret
from autotune.records import Knobs, KnobValue
from autotune.space import Choice, Domain


def problems_of_knobs(
    config: StudyConfig, pinned: Knobs, domains: dict[str, Domain], template: CommandTemplate, *, is_node_known: bool = True
) -> list[str]:
    """Returns the conflicts: values that contradict each other, or that this machine or program cannot apply.

    Args:
        config: the configuration.
        pinned: its pinned knobs.
        domains: knob key -> domain from the command line.
        template: the command, whose placeholders hold values of the baseline.
        is_node_known: whether it is known what is installed on the machine on which trials run.
    """
    installed = _malloc(pinned) if is_node_known else []
    strategy = _strategy(config, pinned, template)
    return [*_channels(pinned), *installed, *strategy, *_global_batch(config, pinned, domains, template)]


def problems_of_secrets(values: Iterable[tuple[str, KnobValue]]) -> list[str]:
    """Returns a problem for each environment variable with a secret value, because values of knobs are recorded and shown."""
    keys = [key for key, value in values if key.startswith(PREFIX) and is_secret(key.removeprefix(PREFIX), str(value))]
    return [
        f"{key}: a secret, which cannot be a setting. Leave it out, and set the variable {key.removeprefix(PREFIX)} before "
        "autotune starts: each trial inherits it."
        for key in dict.fromkeys(keys)
    ]


def notes_of_knobs(config: StudyConfig, pinned: Knobs, template: CommandTemplate, here: HostContext) -> list[str]:
    """Returns notes on pinned knobs that have no effect here. They are not errors: a file may come from another machine."""
    notes = []
    for key, value in pinned.items():
        if key in CATALOGUE and value != CATALOGUE[key].default and (reason := CATALOGUE[key].blocked(here)):
            notes.append(f"{key}={value_text(value)}: {reason}")
    others = {key: value for key, value in pinned.items() if key != STRATEGY.key}
    notes += [
        f"{key}={value_text(value)}: has no effect with {STRATEGY.key}={pinned[STRATEGY.key]}"
        for key, value in others.items()
        if key in CATALOGUE and CATALOGUE[key].is_active(others) and not CATALOGUE[key].is_active(pinned)
    ]
    if pinned.get(AMP.key) == "fp16" and not here.has_cuda:
        notes.append(f"{AMP.key}=fp16: meant for GPUs without bf16, but there is no CUDA device")
    limit, fraction = config.device.memory_limit, pinned.get(FRACTION.key)
    if isinstance(fraction, float) and isinstance(limit, float) and limit < fraction:
        notes.append(f"{FRACTION.key}={fraction}: device.memory_limit={limit} is lower and takes precedence")
    return notes


def _channels(pinned: Knobs) -> list[str]:
    least, most = pinned.get(MIN_NCHANNELS.key), pinned.get(MAX_NCHANNELS.key)
    if not isinstance(least, int) or not isinstance(most, int) or least <= most:
        return []
    return [f"{MIN_NCHANNELS.key}: more than {MAX_NCHANNELS.key}, got {least} and {most}. Swap them."]


def _malloc(pinned: Knobs) -> list[str]:
    asked = pinned.get(MALLOC.key)
    if asked not in malloc.LIBRARIES or asked in malloc.installed():
        return []
    there = ", ".join([malloc.GLIBC, malloc.GLIBC_KEEP, *malloc.installed()])
    install = "on Debian and Ubuntu: libjemalloc2, libtcmalloc-minimal4"
    return [f"{MALLOC.key}: not installed here, got {asked!r}. Allowed: {there}. Install it ({install}), or leave it out."]


def _strategy(config: StudyConfig, pinned: Knobs, template: CommandTemplate) -> list[str]:
    if not template.is_recipe or config.launch.nproc > 1 or pinned.get(STRATEGY.key) != FSDP:
        return []
    return [
        f"{STRATEGY.key}: needs several processes to share the model, got {FSDP!r} with one. Give launch.nproc=2 or more, or "
        "leave it out."
    ]


def _global_batch(config: StudyConfig, pinned: Knobs, domains: dict[str, Domain], template: CommandTemplate) -> list[str]:
    """Returns what is wrong with a global batch, as far as batch sizes are known before the baseline has run."""
    total, nproc, asked = config.train.global_batch, config.launch.nproc, domains.get(BATCH_SIZE)
    own = pinned.get(BATCH_SIZE, template.placeholders.get(BATCH_SIZE, RECIPE_BATCH_SIZE if template.is_recipe else None))
    if total is None or total < 1 or nproc < 1:
        return []
    processes = "" if nproc == 1 else f" in {nproc} processes"
    if isinstance(own, int) and own > 0:
        if total % (own * nproc):
            another = "" if asked else f", or pin another batch size: {BATCH_SIZE}=N"
            return [
                f"train.global_batch: not a multiple of the baseline's batch of {own}{processes}, got {total}. "
                f"Give a multiple of {own * nproc}{another}."
            ]
        needs, accumulation = total // (own * nproc), pinned.get(ACCUMULATION.key, total // (own * nproc))
        if accumulation != needs and not asked:
            return [
                f"{ACCUMULATION.key}: train.global_batch={total} needs {needs} batches of {own}{processes} per step, got "
                f"{accumulation}. Leave it out: autotune derives it."
            ]
    if isinstance(asked, Choice) and not any(value and total % (int(value) * nproc) == 0 for value in asked.values):
        got = ", ".join(map(str, asked.values))
        return [
            f"{BATCH_SIZE}: no value divides train.global_batch={total}{processes}, got {got}. "
            f"Give divisors of {total // nproc}."
        ]
    return []
