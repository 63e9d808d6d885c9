"""How numbers and knobs are worded for people: in the terminal, in MLflow's run names and notes. Stored data stays SI."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from autotune.records import Knobs, KnobValue

DASH = "-"  # what stands in for a number that could not be had

# Knobs whose value alone, or with a shorter name, says what is set; the others read "<last part of the key> <value>".
PHRASES: dict[str, str] = {
    "loader.batch_size": "batch {}",
    "loader.num_workers": "workers {}",
    "loader.prefetch_factor": "prefetch {}",
    "threads.intra": "threads {}",
    "threads.omp": "OMP {}",
    "precision.matmul": "matmul {}",
    "compile.mode": "compile {}",
    "optimizer.implementation": "{} optimizer",
}
OFF_PHRASES = {"precision.amp": "fp32", "compile.mode": "eager"}


def value_text(value: KnobValue | None) -> str:
    """Returns a knob's value as it is written in YAML: `true`, `bf16`, `64`; a dash for None."""
    if value is None:
        return DASH
    return str(value).lower() if isinstance(value, bool) else str(value)


def knob_phrase(key: str, value: KnobValue) -> str:
    """Returns one setting in two words or fewer: "bf16", "batch 64", "channels_last", "no pin_memory"."""
    last = key.removeprefix("env.") if key.startswith("env.") else key.rpartition(".")[2]
    if key.startswith("env."):
        return f"{last}={value}"
    if isinstance(value, bool):
        return last if value else f"no {last}"
    if value == "off" and key in OFF_PHRASES:
        return OFF_PHRASES[key]
    if key == "precision.amp":
        return str(value)
    return PHRASES.get(key, f"{last} {{}}").format(value_text(value))


def parity_lines(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns what was found when losses were compared, as (label, text): of the best, and of what is out for its loss."""
    found = summary.get("parity") or {}
    lines = [("parity", f"loss {found['text']}")] if found.get("text") and found.get("verdict") != "not needed" else []
    if found.get("verdict") == "not needed" and found.get("training"):
        lines.append(("parity", str(found["text"])))
    return [*lines, *(("out", f"{changes_phrase(entry['knobs'])}: {entry['reason']}") for entry in found.get("failed") or [])]


def changes_phrase(changed: Knobs, *, none: str = "as it is") -> str:
    """Returns what a configuration changes, most telling first: "bf16 channels_last batch 64"; `none` for nothing."""
    order = ("precision", "layout", "compile", "loader.batch_size", "loader", "threads", "optimizer")

    def place(key: str) -> tuple[int, str]:
        ranks = [n for n, prefix in enumerate(order) if key == prefix or key.startswith(prefix + ".")]
        return (min(ranks, default=len(order)), key)

    return " · ".join(knob_phrase(key, changed[key]) for key in sorted(changed, key=place)) or none


def number_text(value: float | None, *, digits: int = 3) -> str:
    """Returns a number with `digits` significant digits and no exponent: 16.8, 1,234, 0.0123; a dash for None."""
    if value is None:
        return DASH
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    text = f"{value:.{digits}g}"
    if "e" in text:
        return f"{value:.{digits + 3}f}".rstrip("0").rstrip(".") if value else "0"
    whole, _, fraction = text.partition(".")
    shown = len((whole + fraction).lstrip("-0"))
    return f"{whole}.{fraction}{'0' * max(0, digits - shown)}" if shown < digits and value else text


def compact_text(value: float | None) -> str:
    """Returns a number in six characters at most: "16.8", "92,877", "104k"; a dash for None."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e5, "k")):
        if value is not None and value >= size:
            return f"{number_text(value / min(size, 1e3 if letter == 'k' else size))}{letter}"
    return number_text(value)


def rate_text(value: float | None, unit: str) -> str:
    """Returns a rate with its unit: "56.8 samples/s"."""
    return DASH if value is None else f"{number_text(value)} {unit}/s"


def interval_text(interval: Sequence[float] | None) -> str:
    """Returns a rate's interval, "[55.9, 57.7]"; "" where none could be had. Few blocks can put an end below 0: no rate is."""
    return "" if interval is None else f"[{number_text(max(0.0, interval[0]))}, {number_text(interval[1])}]"


def bytes_text(value: float | None) -> str:
    """Returns bytes in the largest binary unit that keeps the number above 1: "1.42 GiB"."""
    if value is None:
        return DASH
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if value >= size:
            return f"{number_text(value / size)} {unit}"
    return f"{value:.0f} B"


def seconds_text(value: float | None) -> str:
    """Returns a duration as one would say it: "8.2 s", "3 min 20 s", "1 h 05 min"."""
    if value is None:
        return DASH
    if value < 60:
        return f"{value:.1f} s" if value < 10 else f"{value:.0f} s"
    minutes, seconds = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {seconds:02d} s" if seconds else f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def clock_text(value: float) -> str:
    """Returns a remaining time as "7:32" or "1:07:32"; 0:00 once it is over."""
    minutes, seconds = divmod(max(0, int(value)), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}" if minutes >= 60 else f"{minutes}:{seconds:02d}"


def ratio_text(ratio: float | None) -> str:
    """Returns a speed-up: "2.41x"."""
    return DASH if ratio is None else f"{ratio:.2f}x" if ratio < 10 else f"{number_text(ratio)}x"


def ratio_interval_text(interval: Sequence[float] | None) -> str:
    """Returns a speed-up's interval with two decimals, as its ratio has: "[2.36, 2.46]"; "" without one."""
    return "" if interval is None else f"[{max(0.0, interval[0]):.2f}, {interval[1]:.2f}]"


def counts_text(counts: dict[str, int]) -> str:
    """Returns outcome counts, the good first: "14 ok, 2 device_oom, 1 timeout"."""
    good = ("ok", "raced", "unsteady")
    names = [name for name in good if counts.get(name)] + sorted(n for n in counts if n not in good and counts[n])
    return ", ".join(f"{counts[name]} {name}" for name in names) or "none"


def machine_text(machine: dict[str, object]) -> str:
    """Returns the machine in a line: "NVIDIA H200" or the CPU's model, with its cores and memory."""
    gpus = machine.get("gpus") or []
    names = [str(gpu.get("name", "GPU")) for gpu in gpus if isinstance(gpu, dict)] if isinstance(gpus, list) else []
    device = f"{len(names)} x {names[0]}" if len(names) > 1 else (names[0] if names else "")
    model = re.sub(r"\((R|TM|r|tm)\)|\bCPU\b|@.*$", "", str(machine.get("cpu_model") or "")).strip()
    cores, memory = machine.get("num_cores"), machine.get("memory_bytes")
    parts = [device, re.sub(r"\s+", " ", model), f"{cores} cores" if cores else ""]
    parts.append(bytes_text(float(memory)) if isinstance(memory, int | float) else "")
    return ", ".join(part for part in parts if part) or "unknown machine"


def command_text(command: Iterable[str]) -> str:
    """Returns an argument list as one would type it."""
    return shlex.join(command)


def own_command_text(*words: str, runs: Path) -> str:
    """Returns a command of ours as one would type it to reach the studies of a runs folder: `autotune show resnet18`."""
    folder = f"./{runs}" if str(runs).startswith("-") else str(runs)
    where = [] if runs == Path("runs") else ["--runs-dir", folder]
    return shlex.join(["autotune", *words, *where])


def one_line(text: str, most: int) -> str:
    """Returns text as one line of printable characters, cut to `most` of them: fit for a terminal, a comment, a table."""
    plain = "".join(letter if letter.isprintable() else " " for letter in text)
    plain = " ".join(plain.split())
    return plain if len(plain) <= most else f"{plain[: most - 3]}..."


def log_lines(evidence: dict[str, Any], *, most: int = 15) -> list[str]:
    """Returns the end of what a failed trial said, its traceback or else its log, set off for a message."""
    error = evidence.get("error") or {}
    tail = str(error.get("traceback") or evidence.get("log_tail") or "").rstrip().splitlines()[-most:]
    return [f"  | {line}" for line in tail]
