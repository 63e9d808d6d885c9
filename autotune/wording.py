"""Formats numbers and knobs as text, for the terminal and MLflow's run names and notes. Stored data stays in SI units."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from autotune.knobs.base import value_text
from autotune.knobs.catalogue import CATALOGUE
from autotune.knobs.environment import PREFIX
from autotune.log_messages import FRAME, LIBRARY_FILE, OUR_FRAMES
from autotune.plain_text import plain
from autotune.quantities import (
    DASH,
    bytes_text,
    interval_text,
    number_text,
    rate_text,
    ratio_text,
    ratio_with_interval_text,
    seconds_text,
    step_time_text,
)
from autotune.records import COST, ENERGY, THROUGHPUT, TIME, Knobs, KnobValue, Outcome, Summary, TrialRecord, objective_names

# By objective: the word for the verdict "faster" (BETTER), what the ratio refers to (GAINS), the column head (HEADS).
BETTER = {THROUGHPUT: "faster", TIME: "faster", ENERGY: "better", COST: "cheaper"}
GAINS = {
    THROUGHPUT: "",
    TIME: "less time for {samples} samples",
    ENERGY: "less energy per {unit}",
    COST: "lower cost per epoch",
}
NO_TIME = "no time"  # reason of each effect that there was no time to measure; one line reports all these effects together
HEADS = {TIME: "T(N)", ENERGY: "J/{unit}", COST: "per epoch"}
MAX_LOG_LINES = 15  # maximum number of log lines that the message about a failed trial shows


def knob_phrase(key: str, value: KnobValue) -> str:
    """Returns one setting in few words: "bf16", "batch 64". A knob that this version does not know is shown by its key."""
    if key.startswith(PREFIX):
        return f"{key.removeprefix(PREFIX)}={value}"
    return CATALOGUE[key].phrase_of(value) if key in CATALOGUE else f"{key} {value_text(value)}"


def parity_lines(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns the results of comparing losses as (label, text): for the best, and for each configuration that was rejected."""
    found = summary.get("parity") or {}
    lines = [("parity", f"loss {found['text']}")] if found.get("text") and found.get("verdict") != "not needed" else []
    if found.get("verdict") == "not needed" and found.get("training"):
        lines.append(("parity", str(found["text"])))
    return [
        *lines,
        *(("rejected", f"{changes_phrase(entry['knobs'])}: {entry['reason']}") for entry in found.get("failed") or []),
    ]


def listed(texts: Sequence[str], most: int, separator: str = ", ") -> str:
    """Returns at most `most` of some texts, and how many more there are: "a, b and 3 more"; "" for no texts."""
    return separator.join(texts[:most]) + (f" and {len(texts) - most} more" if len(texts) > most else "")


def changes_phrase(changed: Knobs, *, none: str = "unchanged") -> str:
    """Returns what a configuration changes, most important first: "bf16 · channels_last · batch 64"; `none` for nothing."""
    order = ("precision", "layout", "compile", "loader.batch_size", "loader", "threads", "optimizer")

    def place(key: str) -> tuple[int, str]:
        ranks = [n for n, prefix in enumerate(order) if key == prefix or key.startswith(prefix + ".")]
        return (min(ranks, default=len(order)), key)

    return " · ".join(knob_phrase(key, changed[key]) for key in sorted(changed, key=place)) or none


def against_phrase(changed: Knobs, before: Knobs, number: int) -> str:
    """Returns a configuration as its difference from a similar one, "as 0003 with batch 64, without bf16", if that is short.

    If the difference has at least as many parts as the list of all changes to the baseline, returns this list.

    Args:
        changed: the configuration's changes to the baseline.
        before: the similar configuration's changes to the baseline.
        number: trial number of the similar configuration.
    """
    added = {key: value for key, value in changed.items() if before.get(key) != value}
    gone = {key: value for key, value in before.items() if key not in changed}
    if not before or not 0 < len(added) + len(gone) < len(changed):
        return changes_phrase(changed)
    parts = [f"with {changes_phrase(added)}" if added else "", f"without {changes_phrase(gone)}" if gone else ""]
    return f"as {number:04d} {', '.join(part for part in parts if part)}"


def communication_text(ranks: dict[str, Any]) -> str:
    """Returns how much time communication adds to a step, and how long it takes by itself; `ranks` is from `ranks.joined`."""
    found = ranks["communication"]
    if not found and not any(entry.get("step_s") for entry in ranks.get("by_rank") or []):
        return "communication: not measured, as the trial has no step times"
    if not found:
        return "communication: not known, as it is measured only in DistributedDataParallel"
    share = f" ({found['exposed_frac']:.0%} of the step)" if found["exposed_frac"] is not None else ""
    text = f"communication: {step_time_text(found['exposed_s'])} of a step are spent waiting for it{share}"
    if found["bound_s"]:
        size, at = bytes_text(found["gradient_bytes"]), f"{bytes_text(found['bandwidth_bytes_per_s'])}/s"
        text += f"; by itself, averaging {size} of gradients takes {step_time_text(found['bound_s'])}, at {at}"
    return text


def rank_names(by_rank: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the ranks of `ranks.joined` as "0", "1", ..., or as "0 on n1", "1 on n2" if they ran on several nodes."""
    hosts = {entry.get("host") for entry in by_rank}
    return [f"{entry['rank']} on {entry['host']}" if len(hosts) > 1 else str(entry["rank"]) for entry in by_rank]


def unwatched_text(ranks: Mapping[str, Any], watched: str) -> str:
    """Returns a sentence on the nodes that are not monitored for disturbances; "" if there are none.

    Args:
        ranks: what `ranks.joined` returned for the trial.
        watched: host name of the machine that is monitored.
    """
    hosts = sorted({str(entry.get("host") or watched) for entry in ranks.get("by_rank") or ()} - {watched})
    if not hosts:
        return ""
    return f"Ranks run on {', '.join(hosts)}; other programs there are not noticed, only those on {watched}"


def head_text(name: str, unit: str) -> str:
    """Returns the column head of an objective other than throughput: "T(N)", "J/sample", "per epoch"."""
    return HEADS[name].format(unit=unit.removesuffix("s"))


def objective_text(name: str, value: float | None, unit: str = "samples") -> str:
    """Returns an objective's value with its unit: "56.8 samples/s", "12 min 30 s", "0.310 J/sample", "4.20 per epoch"."""
    if value is None:
        return DASH
    if name == THROUGHPUT:
        return rate_text(value, unit)
    return seconds_text(value) if name == TIME else f"{number_text(value)} {head_text(name, unit)}"


def objective_interval_text(name: str, interval: Sequence[float] | None) -> str:
    """Returns the interval of an objective's value: "[0.305, 0.315]", "[12 min 20 s, 12 min 40 s]"; "" without one."""
    if name != TIME or interval is None:
        return interval_text(interval)
    return f"[{seconds_text(max(0.0, interval[0]))}, {seconds_text(interval[1])}]"


def aims_text(objective: str | list[str], terms: dict[str, Any]) -> str:
    """Returns a study's goal: "time_for_samples of 1,000,000 samples, constraints.max_power_w=500"."""
    names = " and ".join(objective_names(objective))
    samples, price = terms.get("samples"), terms.get("price_per_hour")
    parts = [names, f"of {samples:,.0f} samples" if samples else "", f"at {price:g} an hour" if price else ""]
    limits = [f"{key}={limit:g}" for key, limit in (terms.get("constraints") or {}).items()]
    return ", ".join([" ".join(part for part in parts if part), *limits])


def objective_of(summary: Summary) -> str:
    """Returns the objective that decides a study."""
    return objective_names(summary.get("objective") or THROUGHPUT)[0]


def side_texts(summary: Summary, side: dict[str, Any]) -> tuple[str, str]:
    """Returns (value, interval) of a baseline or best: the deciding objective's value, followed by the rate."""
    name, unit = objective_of(summary), str(summary.get("unit") or "samples")
    rate, interval = rate_text(side.get("value"), unit), interval_text(side.get("ci"))
    value = (side.get("objectives") or {}).get(name)
    if name == THROUGHPUT or value is None:
        return rate, interval
    interval_of_value = (side.get("objectives_ci") or {}).get(name)
    return f"{objective_text(name, value, unit)} at {rate}", objective_interval_text(name, interval_of_value)


def score_of(summary: Summary, side: dict[str, Any]) -> float | None:
    """Returns a number proportional to the score of a trial or of a side of a summary; None when unknown."""
    name = objective_of(summary)
    value = side.get("value") if name == THROUGHPUT else (side.get("objectives") or {}).get(name)
    return value if name == THROUGHPUT or not value else 1 / float(value)


def gain_text(summary: Summary, ratio: float | None, interval: Sequence[float] | None = None) -> str:
    """Returns a ratio and what it refers to: "2.41x [2.36, 2.46]", "1.31x [1.28, 1.34] less energy per sample"."""
    return gain_words(summary, ratio_with_interval_text(ratio, interval))


def gain_words(summary: Summary, ratio: str) -> str:
    """Returns a ratio, given as text, and what it refers to: "1.31x less energy per sample"; for throughput, only the ratio."""
    samples = (summary.get("terms") or {}).get("samples")
    unit = str(summary.get("unit") or "samples").removesuffix("s")
    what = GAINS[objective_of(summary)].format(samples=f"{samples:,.0f}" if samples else "N", unit=unit)
    return f"{ratio} {what}".strip()


def verdict_text(summary: Summary) -> str:
    """Returns verdict and ratio of a study that has a comparison: "faster: 2.41x [2.36, 2.46]"."""
    speedup = summary["speedup"]
    verdict = str(speedup.get("verdict") or "")
    if (summary.get("baseline") or {}).get("is_barred") and (summary.get("best") or {}).get("overrides"):
        verdict = "within the constraints"  # the baseline violates them, whatever the ratio
    words = BETTER[objective_of(summary)] if verdict == "faster" else verdict
    compared = {} if (summary.get("best") or {}).get("overrides") else speedup.get("overrides") or {}
    what = f" with {changes_phrase(compared)}" if compared else ""  # the baseline was kept; name its rival
    return f"{words}: {gain_text(summary, speedup['ratio'], speedup.get('ci'))}{what}"


def headline(summary: Summary, *, is_said: bool = False) -> str:
    """Returns the verdict as one line: "faster: 2.41x [2.36, 2.46]", "failed: every trial ...", "running".

    Args:
        summary: the study's summary.
        is_said: whether the reason for a failure is already printed elsewhere, so that "failed" is enough.
    """
    if is_said and summary.get("status") == "failed":
        return "failed"
    speedup = summary.get("speedup") or {}
    status, reason = str(summary.get("status") or "running"), str(summary.get("reason") or "")
    if (verification := summary.get("verification")) and status != "failed":
        words = _verification_text(verification)
        return words if status == "complete" else f"{words} ({status})"
    if (recording := summary.get("recording")) and status != "failed":
        words = f"recorded: {recording['configurations']} configurations, {recording['trials']} measurements"
        return words if status == "complete" else f"{words} ({reason or status})"
    if not speedup or status == "failed":
        return f"{status}: {reason}" if reason else status
    if speedup.get("ratio") is None:
        words = "same" if speedup.get("verdict") == "same" else "no verdict"
        words = f"{words}: {speedup.get('reason') or reason}"
    else:
        words = verdict_text(summary)
    return words if status == "complete" else f"{words} ({status})"


def _verification_text(found: dict[str, Any]) -> str:
    """Returns the verdict of a verification as one line: "holds: 2.04x now, 2.06x claimed"."""
    now, claimed = found.get("now"), ratio_text(found["claimed"]["ratio"])
    if not found.get("verdict"):
        return f"verifying: {claimed} claimed"
    if not now:
        return f"{found['verdict']}: {claimed} claimed"
    return f"{found['verdict']}: {ratio_text(now['ratio'])} now, {claimed} claimed"


def break_even_text(summary: Summary) -> str:
    """Returns a sentence on how much training makes up for the winner's slower start; "" if the start is not slower."""
    found = summary.get("break_even")
    if not found:
        return ""
    what = "compilation" if found.get("compile_s") else "the slower start"
    cost = f"training starts {seconds_text(found['dearer_s'])} later"
    cost += " if nothing is compiled yet" if found.get("compile_s") else ""
    if found.get("samples") is None:
        return f"{what} never pays off: {cost} and is no faster afterwards"
    unit, amount = (
        ("steps", found["steps"]) if found.get("steps") else (str(summary.get("unit") or "samples"), found["samples"])
    )
    num = math.ceil(amount)
    unit = unit.removesuffix("s") if num == 1 else unit
    return f"{what} pays off after {num:,} {unit} ({seconds_text(found['seconds'])}): {cost}"


def search_cost_text(summary: Summary) -> str:
    """Returns a line on the time of the search and the training time that repays it; "" if no search was completed."""
    found = summary.get("search_cost")
    if not found:
        return ""
    num = found["trials"]
    if not num:
        return f"{seconds_text(found['seconds'])}, no trial searched"
    took = f"{seconds_text(found['seconds'])}, {num} trial{'' if num == 1 else 's'} searched"
    if found["repaid_after_s"] is None or found["ci"] is None:
        what, _, why = str(found["why_not"]).partition(": ")
        return f"{took}; {'never pays off' if what == 'never' else 'when it pays off is not known'}: {why}"
    first_s, last_s = found["ci"]
    last = "never" if last_s is None else seconds_text(last_s)
    repaid = f"{seconds_text(found['repaid_after_s'])} [{seconds_text(first_s)}, {last}]"
    return f"{took}; pays off if the unchanged training takes more than {repaid}"


def warm_start_text(found: dict[str, Any]) -> str:
    """Returns a line on the results that a study reuses, from `StudyRecord.warm_start`; "" for none."""
    if not found:
        return ""
    names = [source["study"] for source in found["sources"]]
    differs = list(dict.fromkeys(name for source in found["sources"] for name in source["differs"]))
    whose = f"another {', '.join(differs[:4])}" if differs else "the same program and machine"
    said = [f"{'their' if len(names) > 1 else 'its'} best configurations are tried first"] if found["seeds"] else []
    out = [f"{changes_phrase(_memory_part(entry) or entry['knobs'])} ({entry['study']})" for entry in found["out_of_memory"]]
    if out:
        said.append(f"left out after running out of memory there: {listed(out, 3, '; ')}, and all that need as much memory")
    return f"{', '.join(names)} ({whose}): {'; '.join(said)}"


def _memory_part(entry: dict[str, Any]) -> Knobs:
    """Returns the knobs of a configuration that affect the memory that ran out, without knobs that are off."""
    knobs = entry["knobs"]
    wanted = ["loader.batch_size", "precision.amp", "compile.mode", "memory.activation_checkpointing"]
    if entry["outcome"] == Outcome.host_oom:  # workers use host memory, too
        wanted += ["loader.num_workers", "loader.prefetch_factor"]
    return {key: knobs[key] for key in wanted if key in knobs and knobs[key] != "off" and knobs[key] is not False}


def counts_text(counts: dict[str, int]) -> str:
    """Returns outcome counts, good ones first: "14 ok, 2 device_oom, 1 timeout"."""
    good = ("ok", "raced", "unsteady", "infeasible")
    names = [name for name in good if counts.get(name)] + sorted(n for n in counts if n not in good and counts[n])
    return ", ".join(f"{counts[name]} {name}" for name in names) or "none"


def machine_text(machine: dict[str, object]) -> str:
    """Returns a line on the machine: its GPUs ("NVIDIA H200"), CPU model, cores and memory."""
    gpus = machine.get("gpus") or []
    found = gpus if isinstance(gpus, list) else []
    names = Counter(str(gpu.get("name") or "GPU") for gpu in found if isinstance(gpu, dict))
    device = ", ".join(f"{num} x {name}" if num > 1 else name for name, num in names.items())
    model = re.sub(r"\((R|TM|r|tm)\)|\bCPU\b|@.*$", "", str(machine.get("cpu_model") or "")).strip()
    cores, memory = machine.get("num_cores"), machine.get("memory_bytes")
    parts = [device, re.sub(r"\s+", " ", model), f"{cores} cores" if cores else ""]
    parts.append(bytes_text(float(memory)) if isinstance(memory, int | float) else "")
    return ", ".join(part for part in parts if part) or "unknown machine"


def budget_text(budget_s: float | None, budget_trials: int | None) -> str:
    """Returns a study's budget: "8 min", "30 trials", "8 min or 30 trials"; "" without one."""
    parts = [seconds_text(budget_s)] if budget_s is not None else []
    parts += [f"{budget_trials} trial{'' if budget_trials == 1 else 's'}"] if budget_trials is not None else []
    return " or ".join(parts)


def cycles_text(metrics: Mapping[str, float]) -> str:
    """Returns "Steps come in cycles of 40 steps in 2.5 s; ..." for a trial whose steps come in cycles; else ""."""
    num = metrics.get("window_cycles")
    if not num:
        return ""
    steps, seconds = metrics["window_steps"] / num, metrics["window_s"] / num
    cycles = "1 cycle" if num == 1 else f"{num:.0f} cycles"
    return f"Steps come in cycles of {steps:.0f} steps in {seconds:.3g} s; the window contains {cycles}"


def node_of(trial: TrialRecord) -> dict[str, Any]:
    """Returns the node of a cluster that a trial ran on, {"host", "boot_id", "job"}; {} for the tuner's own machine."""
    node = trial.evidence.get("node")
    return node if isinstance(node, dict) else {}


def where_text(trial: TrialRecord) -> str:
    """Returns "slot 2: n1, job 12, beside 3 others" or "n1, job 12"; "" if the trial had the tuner's own machine to itself."""
    node = node_of(trial)
    place = f"slot {trial.slot}" if trial.slot else ", job ".join(str(node[name]) for name in ("host", "job") if node.get(name))
    others = "1 other" if trial.neighbours == 1 else f"{trial.neighbours} others"
    return f"{place}, beside {others}" if place and trial.neighbours else place


def log_lines(evidence: dict[str, Any]) -> list[str]:
    """Returns the last lines of a failed trial's traceback, else of its log, else of its output, indented for a message."""
    error = evidence.get("error") or {}
    texts = (error.get("traceback"), evidence.get("log_tail"), evidence.get("stdout_tail"))
    logs = (plain(OUR_FRAMES.sub("", str(text or ""))).rstrip() for text in texts)
    lines = next(filter(None, logs), "").splitlines()
    start, shown = max(0, len(lines) - MAX_LOG_LINES), lines[-MAX_LOG_LINES:]
    own = [n for n, line in enumerate(lines) if (found := FRAME.match(line)) and not LIBRARY_FILE.search(found[1])]
    if own and own[-1] < start:  # only frames of libraries would be shown: put the last frame of the user's files first
        shown = [*lines[own[-1] : own[-1] + 2], "  ...", *shown[3:]]
    return [f"  | {line}" for line in shown]


def effect_text(entry: Mapping[str, Any]) -> str:
    """Returns a change's effect from the summary's attribution: "1.62x [1.58, 1.66]", "needed: without it: oom"."""
    return f"{effect_number(entry)} {effect_doubt(entry)}".strip()


def effect_number(entry: Mapping[str, Any]) -> str:
    """Returns a change's factor and interval; "" if it has no factor."""
    return ratio_with_interval_text(entry["ratio"], entry.get("ci")) if entry.get("ratio") else ""


def effect_doubt(entry: Mapping[str, Any]) -> str:
    """Returns the note on a factor: "ambiguous", "estimated", "not measured"; "" if it was measured clearly."""
    verdict, reason = str(entry.get("verdict") or ""), str(entry.get("reason") or "")
    if verdict in ("needed", "not measured", "not separated"):  # "not separated": the name in older summaries
        return f"{verdict}: {reason}" if reason not in ("", NO_TIME) else verdict
    words = [verdict] if verdict in ("ambiguous", "slower") else []
    return ", ".join([*words, *(["estimated"] if entry.get("basis") == "estimated" else [])])
