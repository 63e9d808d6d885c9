"""Stage `transformer`: GPT-2 small with random weights on text: tokens per second, share of the device's arithmetic, memory."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from typing import Any

from autotune.harness.protocol import MeasureRules
from autotune.machine import host_facts
from autotune.records import Knobs
from tests.benchmarks.commands import essence, run_command, run_study, verdict_words
from tests.benchmarks.gpu_campaign.checks import Check, Found, Goal, Missing, Place
from tests.benchmarks.gpu_campaign.trying import Trials, recipe
from tests.benchmarks.reporting import table

SHORT = MeasureRules(min_s=1.0, max_s=3.0, slow_max_s=5.0)
LIMIT_FRAC = 0.4  # share of the device's memory that trials may use here, since filling all of it would take too much time
FITS_FRAC, FAILS_FRAC = 0.93, 1.10  # shares of the predicted largest batch: the first must fit, the second must not
MINUTES = 4.0


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes that differ in a dry run.

    Attributes:
        words: sizes of the model and its data, as options of autotune's text program.
        overrides: the same sizes as overrides of the configuration.
        batches: two small batch sizes; the line through their memory predicts the memory of larger ones.
        matrix: rows and columns of the matrices that are multiplied.
    """

    words: tuple[str, ...]
    overrides: tuple[str, ...]
    batches: tuple[int, int]
    matrix: int


FULL = Sizes(
    words=("--sequence-length", "512"),
    overrides=("model=gpt2_small", "data.sequence_length=512"),
    batches=(8, 16),
    matrix=8192,
)
DRY = Sizes(
    words=("--num-layers", "1", "--hidden-size", "64", "--vocab-size", "500", "--sequence-length", "16"),
    overrides=(
        "model=gpt2_small", "data=synthetic", "model.num_layers=1", "model.hidden_size=64", "model.vocab_size=500",
        "data.sequence_length=16",
    ),
    batches=(2, 4),
    matrix=128,
)  # fmt: skip


def sizes(place: Place) -> Sizes:
    """Returns the sizes of this run.

    Raises:
        Missing: transformers is not installed.
    """
    if importlib.util.find_spec("transformers") is None:
        raise Missing("transformers is not installed: pip install transformers")
    return DRY if place.is_dry else FULL


def arithmetic(place: Place) -> dict[str, Any]:
    """Returns the FLOPs per token and the device's FLOPs per second, see arithmetic.py."""
    chosen = sizes(place)
    module = "tests.benchmarks.gpu_campaign.arithmetic"
    words = ["-m", module, "--size", str(chosen.matrix), "--", "--model", "gpt2_small", *chosen.words]
    return dict(place.kept("arithmetic", lambda: json.loads(run_command(*words).splitlines()[-1])))


def utilisation(rate_per_s: float, place: Place) -> float:
    """Returns the MFU of a rate of tokens: its FLOPs per second divided by those that a matrix product reaches here."""
    known = arithmetic(place)
    return float(rate_per_s * known["flop_per_token"] / known["matmul_flop_per_s"])


def tokens_are_tuned(place: Place) -> Found:
    """`autotune run` on the language model."""
    overrides = sizes(place).overrides
    found = place.kept("study", lambda: essence(run_study(place.folder / "runs", "gpt2", overrides, minutes=MINUTES)))
    ends = [found["baseline"]["value"], (found["best"] or {}).get("value")]
    shares = " -> ".join(f"{utilisation(rate, place):.1%}" for rate in ends if rate)
    words = f"{verdict_words(found)}; MFU {shares} of the {_tera(place)} that a bf16 product reaches here"
    return Found(evidence=words)


def arithmetic_is_counted(place: Place) -> Found:
    """The FLOPs of a token and this device's maximum are measured."""
    known = arithmetic(place)
    millions, mega = known["num_parameters"] / 1e6, known["flop_per_token"] / 1e6
    return Found(evidence=f"{millions:.3g} million parameters, {mega:.3g} MFLOP a token; a bf16 product {_tera(place)}")


def _tera(place: Place) -> str:
    return f"{arithmetic(place)['matmul_flop_per_s'] / 1e12:.1f} TFLOP/s"


def memory_is_a_line(place: Place) -> Found:
    """The memory of a third batch size is predicted from the memory of two small ones."""
    trials, (small, larger) = limited(place, None), sizes(place).batches
    line = line_of(trials, small, larger)
    third = 2 * larger
    found, said = _bytes(trials, third), line[0] + line[1] * third
    rows = [(batch, f"{_bytes(trials, batch) / 2**20:.0f}") for batch in (small, larger, third)]
    error = abs(said / found - 1)
    goals = [Goal(what="error of the memory foreseen", value=error, bound=0.05, is_ceiling=True)]
    words = f"{line[0] / 2**20:.0f} MiB and {line[1] / 2**20:.2f} a sample; batch {third} foreseen within {error:.1%}"
    return Found(evidence=words, goals=goals, detail=table(("batch", "MiB"), rows))


def frontier_is_foreseen(place: Place) -> Found:
    """Under a memory limit, 93 % of the predicted largest batch fits, and 110 % of it runs out of memory."""
    gpu = host_facts()["gpus"][0]
    limit_bytes = int(LIMIT_FRAC * gpu["memory_bytes"])
    trials, (small, larger) = limited(place, limit_bytes), sizes(place).batches
    at_none, each = line_of(trials, small, larger)
    largest = (limit_bytes - at_none) / each
    fits, fails = int(FITS_FRAC * largest), int(FAILS_FRAC * largest) + 1
    below, above = (trials.measure({"loader.batch_size": batch}, SHORT) for batch in (fits, fails))
    assert above["outcome"] == "device_oom", f"batch {fails} ended as {above['outcome']}: {above['reason']}"
    assert below["rate_per_s"], f"batch {fits} of at most {largest:.0f} ended as {below['outcome']}: {below['reason']}"
    peak = below["memory"]["peak_bytes"] / limit_bytes
    words = (
        f"at most {largest:.0f} foreseen under {limit_bytes / 2**30:.1f} GiB; {fits} ran at {below['rate_per_s']:.0f} tokens/s"
    )
    return Found(evidence=f"{words}, {peak:.1%} of the limit; {fails}: {above['reason'][:120]}")


def limited(place: Place, limit_bytes: int | None) -> Trials:
    """Returns trials of the model under a memory limit."""
    chosen = sizes(place)
    tokens = int(chosen.words[chosen.words.index("--sequence-length") + 1])
    name = "gpt2" if limit_bytes is None else "gpt2 limited"
    return recipe(place, name, chosen.overrides, memory_limit_bytes=limit_bytes, tokens_per_sample=tokens)


def line_of(trials: Trials, small: int, larger: int) -> tuple[float, float]:
    """Returns the line of the memory as (bytes without any sample, bytes per sample)."""
    low, high = _bytes(trials, small), _bytes(trials, larger)
    each = (high - low) / (larger - small)
    return low - each * small, each


def _bytes(trials: Trials, batch: int) -> float:
    knobs: Knobs = {"loader.batch_size": batch}
    found = trials.measure(knobs, SHORT)
    assert found["rate_per_s"], f"batch {batch}: {found['outcome']}: {found['reason']}"
    return float(found["memory"]["peak_bytes"])


def checks(is_dry: bool) -> list[Check]:
    """Returns the checks of the stage."""
    study = Check(name="autotune tunes GPT-2 small", run=tokens_are_tuned, seconds=MINUTES * 60)
    cuda_only = "the memory that each batch takes" if is_dry else ""
    return [
        Check(name="arithmetic of a token", run=arithmetic_is_counted),
        *([] if is_dry else [study]),
        Check(name="memory is a line in the batch", run=memory_is_a_line, needs_cuda=cuda_only, seconds=45.0),
        Check(
            name="the largest batch is foreseen",
            run=frontier_is_foreseen,
            needs_cuda="CUDA's out of memory at a limit",
            seconds=60.0,
        ),
    ]
