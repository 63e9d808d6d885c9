"""The files between tuner and harness: what the tuner asks for, and what each rank answers.

This module is the only one both sides import. It needs Python 3.9 and the standard library, because the harness runs in
the program's interpreter, where autotune is not installed. Stored numbers are SI floats and byte ints; every stored
document carries `schema`. History of the schema: 1, the first.

    spec.json             tuner -> harness   Spec: which trial this is, its knobs, when to stop measuring
    progress.jsonl        harness -> tuner   one Progress line at each phase change and at most five a second; the first,
                                             "spawn", when the first Python process starts, whether it imports torch or not
    result.rank<R>.json   harness -> tuner   RankResult, written under a temporary name and renamed: there or not, never half
    stop.json             rank 0 -> ranks    {"step": n}: every rank writes its result and leaves after its n-th step
    peer<K>.json          processes that train without torch.distributed -> each other: see peers.py
    loader<K>.bin         loader workers     counters of each worker of the K-th DataLoader, see worker.py
    kept.txt              keeper -> harness  paths of the user's files that no trial may rename over or remove, each with a NUL
    spared.txt            harness -> keeper  those of them that the program would have changed, the same
    made.txt              harness -> keeper  files that the program begins to save where there was none, the same
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
from typing import Any, Dict, List, Mapping, Optional

SCHEMA = 1
# Path of spec.json; its presence is what wakes the harness. In mode "apply" it holds the spec itself, as JSON: there is no
# folder, nothing is left behind, and every rank on every node that inherits the environment can read it.
SPEC_VARIABLE = "AUTOTUNE_SPEC"
HARNESS = "_autotune_harness"  # the name the harness is loaded under, whoever loads it
MARK_VARIABLE = "AUTOTUNE_MARK"  # "<study folder>:<trial>", inherited by every process of a trial: how leftovers are found
HIDDEN_VARIABLE = "AUTOTUNE_HIDDEN"  # {"NAME": sha256}: what `env.NAME` must be where the spec holds a stand-in
STAND_IN = "***"  # what the spec holds, followed by a number, for the value of a secret environment variable
SPEC_FILE, PROGRESS_FILE, STOP_FILE = "spec.json", "progress.jsonl", "stop.json"
KEPT_FILE, SPARED_FILE, MADE_FILE = "kept.txt", "spared.txt", "made.txt"
STDOUT_FILE, STDERR_FILE = "stdout.log", "stderr.log"
# Every Python process of a trial answers this signal by writing its stacks to standard error: how a hang is placed. A
# real-time one, which programs do not use; None where the system has none.
STACK_SIGNAL: Optional[int] = int(signal.SIGRTMAX) - 3 if hasattr(signal, "SIGRTMAX") else None

# Phases of a trial, in order. "steady" may not be reached; when the window begins anew, those from "compile" on come again.
PHASES = ("spawn", "import", "init", "first_batch", "compile", "warmup", "steady", "exit")

SEPARATE, SHARED = "separate", "shared"  # whether a loader's workers have cores of their own

UNMEASURABLE = "autotune.Unmeasurable"  # RankResult.error["type"] where the harness gave up: the message says why

# What a rank says of each knob it was given.
APPLIED, NOT_APPLICABLE, OVERRIDDEN = "applied", "not applicable", "overridden by the program"


# Variables that launchers tell a process its rank by: torchrun and its kin, Slurm's srun, Open MPI, other MPIs.
RANK_VARIABLES = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")


def launched_rank(environment: Mapping[str, str]) -> int:
    """Returns the rank that a launcher gave a process; 0 without one."""
    given = [environment[name] for name in RANK_VARIABLES if environment.get(name, "").isdigit()]
    return int(given[0]) if given else 0


def is_real_run(environment: Mapping[str, str]) -> bool:
    """Returns whether a process belongs to a real run with a file's knobs, not to a trial."""
    return environment.get(SPEC_VARIABLE, "").startswith("{")


def result_file(rank: int) -> str:
    """Returns the name of a rank's result file."""
    return f"result.rank{rank}.json"


@dataclasses.dataclass
class MeasureRules:
    """When warm-up ends and when measuring stops; the thresholds of the whole tool, in one place.

    Sources: the steady-state and stopping rules of nvbench and Kernel Tuner, block means after Law & Kelton's batch means;
    figures from our own probes (a loader's prefetch queue makes naive short trials 2.3x wrong).
    """

    warmup_min_device_s: float = 1.0  # work done before the window may open
    warmup_max_s: float = 60.0  # then the window opens anyway and the trial is `unsteady`
    warmup_mean_frac: float = 0.03  # last two blocks' means agree within this
    warmup_quartile_frac: float = 0.05  # and their quartiles within this
    warmup_quiet_steps: int = 3  # steps without a newly compiled graph
    drain_max_s: float = 5.0  # waited for a queue filled before; one that takes longer to drain changes the rate little
    trend_frac: float = 0.05  # a step time that changes by more than this from one window to the next is not steady
    slow_step_s: float = 0.25  # steps longer than this use the slow-step rule
    slow_warmup_steps: int = 2
    slow_min_steps: int = 6
    slow_max_s: float = 15.0
    block_min_s: float = 0.05
    min_blocks: int = 5
    min_steps: int = 20
    min_s: float = 2.0
    max_s: float = 30.0
    cycles_max_s: float = 60.0  # of a window whose steps come in cycles, until it holds two whole ones
    half_width_frac: float = 0.03  # stop when the blocks' spread makes a 95 % half-width this narrow, relative to the mean
    # A trial that may be the best so far is measured more narrowly before it is believed: three times as narrow is nine times
    # as many blocks, so there is a bound of its own, beyond which the finals have to tell.
    promoted_half_width_frac: float = 0.01
    promoted_max_s: float = 8.0
    race_min_s: float = 1.0  # of a window before racing may end it: a shorter one does not show whether it was disturbed


@dataclasses.dataclass
class Spec:
    """One trial as the harness sees it.

    Attributes:
        trial: number of the trial within its study.
        nonce: random word that must come back in the result; results of an earlier attempt are not mistaken for this one's.
        folder: absolute path of the trial's folder.
        mode: "measure" (stop after the window), "inspect" (stop after a few steps), "parity" (stop after `max_steps` optimizer
            steps, keep the loss of each), "apply" (never stop, never measure).
        knobs: knob key -> value, only those to be changed; absent means "as the program does it".
        passed: knob key -> value of those the command line already carries; the harness only checks them.
        target: `RankResult.target` of the baseline: which loaders to change. None in the baseline itself.
        device: "cuda" or "cpu", or "auto" when it is not given.
        memory_limit_bytes: per-process cap, CUDA by allocator fraction and CPU by RLIMIT_DATA; None for none.
        global_batch: samples that an optimizer step of all ranks is to hold: where `knobs` has no step.accumulation it is
            derived from the batch size that the program has; None leaves the program's steps as they are.
        seed: what random, numpy and torch are seeded with before the program runs; None leaves them as they are.
        max_steps: in mode "parity", optimizer steps.
        max_s: in mode "parity", seconds since the first step after which fewer steps do, though not under 8; None for no bound.
        race_below_per_s: the window ends early once the rate of all ranks is certainly below this; None never.
        promote_above_per_s: where the rate of all ranks may reach this, the best so far, the window goes on until it is as
            narrow as `MeasureRules.promoted_half_width_frac` asks; None never.
        cycle: {"steps", "seconds"} of a cycle of the baseline, {} where its steps come in none; None in the baseline itself. A
            window waits for its like.
        end_s: moment on the machine's monotonic clock at which the window ends with what it has; None whenever it is full.
        tokens_per_sample: tokens of each sample, which are counted instead of samples; None where it is not known.
        origin: in mode "apply", the file that the knobs come from, as the user named it.
        made_on: in mode "apply", what that file was made on: {"torch", "device_name"}; None on the CPU, unknown is absent.
        late: in mode "apply", knob key -> why it has come too late to have any effect in this process.
    """

    trial: int
    nonce: str
    folder: str
    mode: str = "measure"
    knobs: Dict[str, Any] = dataclasses.field(default_factory=dict)
    passed: Dict[str, Any] = dataclasses.field(default_factory=dict)
    target: Optional[List[Dict[str, Any]]] = None
    device: str = "auto"
    memory_limit_bytes: Optional[int] = None
    global_batch: Optional[int] = None
    seed: Optional[int] = None
    max_steps: Optional[int] = None
    max_s: Optional[float] = None
    race_below_per_s: Optional[float] = None
    promote_above_per_s: Optional[float] = None
    cycle: Optional[Dict[str, float]] = None
    end_s: Optional[float] = None
    rules: MeasureRules = dataclasses.field(default_factory=MeasureRules)
    tokens_per_sample: Optional[int] = None
    origin: str = ""
    made_on: Dict[str, Any] = dataclasses.field(default_factory=dict)
    late: Dict[str, str] = dataclasses.field(default_factory=dict)
    schema: int = SCHEMA


@dataclasses.dataclass
class KnobReport:
    """What became of one knob in one rank.

    Attributes:
        status: APPLIED, NOT_APPLICABLE or OVERRIDDEN.
        reason: why not, in a sentence's words; empty when applied.
        observed: the value read back from the process after the last step, None when it cannot be read.
    """

    status: str
    reason: str = ""
    observed: Any = None


@dataclasses.dataclass
class Window:
    """The steady phase: the only place throughput comes from.

    Attributes:
        steps: counted optimizer steps.
        seconds: wall time, synchronised at both ends on CUDA.
        samples: work units consumed.
        rate_per_s: samples per second as consumed.
        block_rates_per_s: the same per block of whole multiples of the worker count.
        half_width_frac: 95 % half-width of the rate relative to it; None where the blocks are too few for one, or depend on
            each other too much.
        is_steady: False when warm-up hit its cap, graphs were still compiled or the step time kept changing.
        reason: why it stopped, or why it is not steady.
        is_raced: it was stopped early, being certainly slower than `Spec.race_below_per_s`.
        clock_gap_frac: |sum of device event gaps - wall time| / wall time; None on the CPU.
        block_s: seconds of each block; empty in results of earlier versions.
        cycles: whole cycles that the window holds, its blocks; 0 where steps just follow steps.
    """

    steps: int
    seconds: float
    samples: float
    rate_per_s: float
    block_rates_per_s: List[float]
    half_width_frac: Optional[float]
    is_steady: bool
    reason: str
    is_raced: bool = False
    clock_gap_frac: Optional[float] = None
    block_s: List[float] = dataclasses.field(default_factory=list)
    cycles: int = 0


@dataclasses.dataclass
class RankResult:
    """Everything one rank of one trial found out.

    Attributes:
        status: "measured" (the harness ended the program), "ended" (the program ended by itself first), "failed" (exception).
        error: {"type", "message", "traceback"} of the exception that ended the program; None otherwise. Also "worker", "12,
            SIGKILL", when a loader worker was ended by a signal; "knob", which the harness was setting when it was raised.
        failed_s: when the exception was noted, on the machine's monotonic clock: of several ranks, who failed first.
        phases_s: seconds spent in each phase of PHASES.
        unit: "samples"; "tokens" where `Spec.tokens_per_sample` says how many a sample has, or batches are rows or tables of
            them whose samples are not known; "steps" when no batch dimension could be found. `unit_source` says where it was
            read.
        steps: raw steps since the first: {"end_s": [...], "samples": [...], "wait_s": [...], "warmup": n}; `end_s` on the
            monotonic clock from the first step's end, `wait_s` host seconds inside the loader's __next__.
        window: None when no window was reached.
        throughput_per_s: the trial's number for this rank: the consumed rate, less what came from a queue filled before.
        regime: "separate" or "shared": whether the loader's workers have cores of their own; "" without workers.
        device_rate_per_s: D, what the device would do with a free loader; None when unknown, and in the "shared" regime, where
            what is seen is slower.
        loader_rate_per_s: L, what the loader can sustain; None without a loader.
        memory: {"kind": "cuda"|"cpu", "peak_bytes", "peak_reserved_bytes", "capacity_bytes", "alloc_retries"}, unknown = None;
            retries of the allocator since the window opened.
        loss: {"first", "last", "is_finite", "curve", "why_no_curve"} seen at backward(); None where backward was not seen.
            The curve is the mean loss of each of the first optimizer steps, gradient scaling undone, None for one that is no
            number; empty, with the reason, where that cannot be had.
        scaling: {"scale", "skipped", "skipped_in_window"} of the program's GradScaler; None without one.
        knobs: knob key -> KnobReport for every knob of the spec.
        observed: knob key -> the program's own value, for every knob the harness can read (what "baseline" means).
        applicability: knob key -> reason why that knob cannot be turned in this program; absent = it can.
        target: loaders whose batches reach the optimizer, as [{"site", "ordinal", "code", "nth"}], the last two for a program
            that was edited or moved since (sites.py); None without a DataLoader. "is_unshared": true marks a stream that does
            not ask which worker it is in: its workers are left as they are.
        detected: what `inspect` prints: {"loader", "modules", "optimizers", "precision", "compile", "world_size", ...}.
        facts: interpreter, torch, device and instruction set as the program's process sees them.
        compiled: {"graphs", "cached" (of them found in the study's compile cache), "recompile_limit_hit", "seconds"}.
        communication: {"exposed_s" (of a step), "num_steps" (looked at), "gradient_bytes", "bandwidth_bytes_per_s" (None
            unknown)}, see ranks.py; {} where it is not known.
        is_at_own_pace: it does not wait for the other ranks (peers.py): rates add up, over a span that all windows have in
            common.
    """

    trial: int
    nonce: str
    rank: int
    world_size: int
    pid: int
    status: str
    error: Optional[Dict[str, str]] = None
    failed_s: Optional[float] = None
    phases_s: Dict[str, float] = dataclasses.field(default_factory=dict)
    unit: str = "steps"
    unit_source: str = ""
    steps: Dict[str, Any] = dataclasses.field(default_factory=dict)
    window: Optional[Window] = None
    throughput_per_s: Optional[float] = None
    device_rate_per_s: Optional[float] = None
    loader_rate_per_s: Optional[float] = None
    data_wait_frac: Optional[float] = None
    regime: str = ""
    memory: Dict[str, Any] = dataclasses.field(default_factory=dict)
    loss: Optional[Dict[str, Any]] = None
    scaling: Optional[Dict[str, Any]] = None
    knobs: Dict[str, KnobReport] = dataclasses.field(default_factory=dict)
    observed: Dict[str, Any] = dataclasses.field(default_factory=dict)
    applicability: Dict[str, str] = dataclasses.field(default_factory=dict)
    target: Optional[List[Dict[str, Any]]] = None
    detected: Dict[str, Any] = dataclasses.field(default_factory=dict)
    facts: Dict[str, Any] = dataclasses.field(default_factory=dict)
    compiled: Dict[str, Any] = dataclasses.field(default_factory=dict)
    communication: Dict[str, Any] = dataclasses.field(default_factory=dict)
    is_at_own_pace: bool = False
    schema: int = SCHEMA


@dataclasses.dataclass
class Progress:
    """One line of progress.jsonl: where rank 0 stands.

    Attributes:
        time_s: monotonic clock of the machine (comparable between processes of one host).
        phase: member of PHASES.
        step: counted optimizer steps so far.
        rate_per_s: samples per second over the last block, None before there is one.
    """

    time_s: float
    phase: str
    step: int = 0
    rate_per_s: Optional[float] = None


def write_json(path: str, document: Any) -> None:
    """Writes a dataclass or plain document as JSON: whole under a temporary name, then renamed."""
    plain = dataclasses.asdict(document) if dataclasses.is_dataclass(document) and not isinstance(document, type) else document
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
            json.dump(plain, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:  # a full disk: half a document is of no use to anybody
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def read_spec(source: str) -> Spec:
    """Returns the spec that SPEC_VARIABLE leads to.

    Args:
        source: path of the file, or the spec itself as JSON.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not a spec of this schema.
    """
    raw = _checked(json.loads(source), SPEC_VARIABLE) if source.startswith("{") else _read(source)
    raw["rules"] = MeasureRules(**raw["rules"])
    return Spec(**raw)


def read_result(path: str) -> RankResult:
    """Returns the rank result stored at `path`.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not a result of this schema (a program may have overwritten it).
    """
    raw = _read(path)
    try:
        raw["window"] = Window(**raw["window"]) if raw.get("window") else None
        raw["knobs"] = {key: KnobReport(**report) for key, report in raw.get("knobs", {}).items()}
        return RankResult(**raw)
    except (TypeError, AttributeError) as error:
        raise ValueError(f"{path}: not a result of schema {SCHEMA}: {error}") from error


def _read(path: str) -> Dict[str, Any]:
    with open(path, encoding="utf-8") as file:
        return _checked(json.load(file), path)


def _checked(raw: Any, path: str) -> Dict[str, Any]:
    if not isinstance(raw, dict) or raw.get("schema") != SCHEMA:
        raise ValueError(f"{path}: not a document of schema {SCHEMA}")
    return raw
