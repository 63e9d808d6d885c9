"""Defines the files exchanged by tuner and harness: the tuner's requests and each rank's results.

Both sides import this module (and `cores`). It may use only Python 3.9 and the standard library, because the harness runs
in the program's interpreter, where autotune is not installed. Stored numbers are floats in SI units and integer bytes. Every
stored document contains the number of its `schema`. So far, there is only schema 1.

    spec.json             tuner -> harness   Spec: which trial this is, its knobs, when to stop measuring
    progress.jsonl        harness -> tuner   a Progress line at each phase change, and at most five a second in between; the
                                             first, "spawn", is written when the first Python process starts, even if it
                                             never imports torch
    result.rank<R>.json   harness -> tuner   RankResult; written under a temporary name and renamed, so it is never partial
    stop.json             rank 0 -> ranks    {"step": n}: every rank writes its result and exits after its n-th step
    explain.json          rank 0 -> ranks    {"step": n}: in mode "explain", every rank begins its pass after its n-th step
    explained.*.json      harness -> tuner   results of a pass, see explain/documents.py; trace.rank<R>.json.gz is the trace
    peer<K>.json          process -> process exchanged by processes that train without torch.distributed, see peers.py; their
                                             stop.json is {"span", "pids"}: begin and end of the time that the processes
                                             measured together, and their process ids
    loader<K>.<P>.bin     worker -> harness  counters of each worker of the K-th DataLoader of process P, see worker.py
    kept.txt              keeper -> harness  NUL-terminated paths of the user's files that no trial may replace or remove
    own.txt               keeper -> harness  files and folders made by earlier trials, which each trial may change; same format
    spared.txt            harness -> keeper  the user's files that the harness has kept the program from changing; same format
    made.txt              harness -> keeper  new files that the program starts to save, and folders that it makes; same format

The keeper is a separate process that protects the user's files from a study's trials.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import operator
import os
import signal
import time
from typing import Any, Dict, List, Mapping, Optional, Tuple

from .cores import read

SCHEMA = 1
# Path of spec.json; the harness starts only if this variable is set. In mode "apply" it contains the spec itself as JSON: no
# folder is needed, no file is left behind, and every rank on every node that inherits the environment can read it.
SPEC_VARIABLE = "AUTOTUNE_SPEC"
# JSON: a copy of the variables that keep what a trial logs to trackers (W&B, MLflow) out of the user's accounts and servers.
# The copy is made when the trial begins, because the program may change the variables before it starts its ranks.
RECORDS_VARIABLE = "AUTOTUNE_RECORDS"
HARNESS = "_autotune_harness"  # the name under which the harness is always loaded
MARK_VARIABLE = "AUTOTUNE_MARK"  # "<study folder>:<trial>"; every process of a trial inherits it, so leftovers can be found
# Variables with which the C library keeps freed memory (memory.malloc=glibc_keep). By default it returns large blocks (above a
# threshold that adapts, up to 32 MB) to the kernel at once. So the next step has a page fault at its first access to each page.
# With these values, no block gets its own mapping (mallopt(3): M_MMAP_MAX), and the heap shrinks only if a TiB at its end is
# free (M_TRIM_THRESHOLD).
KEEPING = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}
SPEC_FILE, PROGRESS_FILE, STOP_FILE = "spec.json", "progress.jsonl", "stop.json"
KEPT_FILE, OWN_FILE, SPARED_FILE = "kept.txt", "own.txt", "spared.txt"
MADE_FILE, LOADED_FILE = "made.txt", "loaded.txt"
STDOUT_FILE, STDERR_FILE = "stdout.log", "stderr.log"
# A trial's folder for files that are removed after the trial. The program's W&B and MLflow write there, so that trials leave
# nothing in the user's records.
SCRATCH = "scratch"
# In the folder SCRATCH: the request for stacks of processes that the tuner cannot signal (stack_requests.py), and the answers
STACKS_FILE, STACK_FILE = "stacks.asked", "stack.{host}.{pid}.txt"
BOOT_ID = "/proc/sys/kernel/random/boot_id"
FICLONE = 0x40049409  # ioctl: the copy shares the original's blocks until one of them is written (btrfs, XFS)
SAME_CLOCK_S = 1.0  # two monotonic clocks that seem to differ by less than this count as the same clock
# Every Python process of a trial answers this signal by writing its stacks to standard error, which shows where it hangs. It
# is a real-time signal, because programs do not use real-time signals.
STACK_SIGNAL = int(signal.SIGRTMAX) - 3

# Phases of a trial, in order. "steady" may never be reached. When the window restarts, the phases from "compile" on repeat.
PHASES = ("spawn", "import", "init", "first_batch", "compile", "warmup", "steady", "exit")

SEPARATE, SHARED = "separate", "shared"  # whether a loader's workers have cores to themselves, or share cores with the step

UNMEASURABLE = "autotune.Unmeasurable"  # RankResult.error["type"] if the harness gave up; the message says why

# Status that a rank reports for each knob of its spec.
APPLIED, NOT_APPLICABLE, OVERRIDDEN = "applied", "not applicable", "overridden by the program"

# Variables in which launchers pass a process its rank: torchrun and similar, Slurm's srun, Open MPI, other MPIs.
RANK_VARIABLES = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")


def whole_number(text: str) -> Optional[int]:
    """Returns the whole number in a variable's text; None if it is not one, or has more than nine digits."""
    return int(text) if text.isdecimal() and len(text) <= 9 else None


def launched_rank(environment: Mapping[str, str]) -> int:
    """Returns the rank that a launcher assigned to a process; 0 without a launcher."""
    given = [whole_number(environment.get(name, "")) for name in RANK_VARIABLES]
    return next((rank for rank in given if rank is not None), 0)


def place_of(environment: Mapping[str, str]) -> Optional[Tuple[int, int]]:
    """Returns the rank of a process and the number of ranks, from torchrun or from srun; None if neither has started it.

    Slurm also sets SLURM_PROCID in a batch script, outside srun, but SLURM_STEP_NUM_TASKS only under srun.
    """
    for names in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")):
        rank, num = (whole_number(environment.get(name, "")) for name in names)
        if rank is not None and num is not None:
            return rank, num
    return None


def is_real_run(environment: Mapping[str, str]) -> bool:
    """Returns whether a process belongs to a real run with knobs from a file, not to a trial."""
    return environment.get(SPEC_VARIABLE, "").startswith("{")


def result_file(rank: int) -> str:
    """Returns the name of a rank's result file."""
    return f"result.rank{rank}.json"


@dataclasses.dataclass
class MeasureRules:
    """Thresholds for the end of warm-up and of measuring, for the whole tool.

    The steady-state and stopping rules follow nvbench and Kernel Tuner, the block means follow Law & Kelton's batch means, and
    the values come from our own measurements. Without such rules, a loader's prefetch queue makes short trials wrong by 2.3x.
    """

    warmup_min_device_s: float = 1.0  # minimum seconds of steps without compilation before the window may open
    warmup_max_s: float = 60.0  # after this time the window opens anyway, and the trial is `unsteady`
    # A block is a group of consecutive steps. Its rate is its samples divided by its seconds.
    warmup_mean_frac: float = 0.03  # the rates of the last two blocks of warm-up may differ by at most this share
    warmup_quartile_frac: float = 0.05  # each quartile of the step times of these two blocks may differ by at most this share
    warmup_quiet_steps: int = 3  # minimum number of consecutive steps without compilation
    # While the loader's queue of batches drains, the rate is higher than the loader can sustain. So the window opens only once
    # the queue has drained, at most this much later. It does not wait for slower queues, which change the rate little.
    drain_max_s: float = 5.0
    # A trial is not steady if step times change by more than this share over two windows. The second one is measured only if
    # the first looks unsteady.
    trend_frac: float = 0.05
    slow_step_s: float = 0.25  # if steps take longer than this on average, the next three thresholds apply
    slow_warmup_steps: int = 2  # minimum number of consecutive steps without compilation, if steps are slow
    slow_min_steps: int = 6  # minimum number of steps of a window of slow steps, unless slow_max_s has passed
    slow_max_s: float = 15.0  # longest window of slow steps
    block_min_s: float = 0.05  # minimum length of a block
    min_blocks: int = 5  # minimum number of blocks of a window
    min_steps: int = 20  # minimum number of steps of a window
    min_s: float = 2.0  # shortest window
    max_s: float = 30.0  # longest window
    cycles_max_s: float = 60.0  # longest window if steps come in cycles and the window does not yet hold enough of them
    half_width_frac: float = 0.03  # stop once the 95 % half-width, from the blocks' spread, is at most this share of the mean
    # A trial that may be the best so far is measured more precisely. An interval a third as wide takes nine times as many
    # blocks, so such a trial has its own time limit. After this limit, `half_width_frac` is enough, and the finals measure
    # which of the best trials is the fastest.
    promoted_half_width_frac: float = 0.01
    promoted_max_s: float = 8.0
    # Shortest window that `Spec.race_below_per_s` may end. A shorter window does not show whether it was disturbed.
    race_min_s: float = 1.0


@dataclasses.dataclass
class Spec:
    """One trial as the harness sees it.

    Attributes:
        trial: number of the trial within its study.
        nonce: random word that the result must repeat. It distinguishes this attempt's results from those of earlier attempts.
        folder: absolute path of the trial's folder.
        mode: "measure" (stop after the window), "inspect" (stop after a few steps), "parity" (stop after `max_steps` optimizer
            steps, keep the loss of each), "explain" (stop after a pass), "apply" (never stop, never measure).
        knobs: knob key -> value for the knobs to change; an absent knob keeps the program's own value.
        passed: knob key -> value of the knobs already set on the command line; the harness only checks them.
        target: which loaders to change, from `RankResult.target` of the baseline; None in the baseline itself.
        device: "cuda", "cpu" or, if not given, "auto".
        memory_limit_bytes: limit per process, set on CUDA by allocator fraction, on the CPU by RLIMIT_DATA; None for no limit.
        global_batch: samples of an optimizer step over all ranks. If `knobs` has no step.accumulation, accumulation is derived
            from this and the program's batch size. None leaves the program's steps unchanged.
        seed: seed set for random, numpy and torch before the program runs; None leaves them unseeded.
        max_steps: in mode "parity", the number of optimizer steps.
        max_s: in mode "parity", the run ends once this many seconds have passed since the first step, but not before 8 steps;
            None for no limit. In mode "explain", the length of the pass "lines" in seconds; None for the default, 5 s.
        race_below_per_s: the window ends early once the rate of all ranks is certainly below this; None for never.
        promote_above_per_s: best rate so far. If the rate of all ranks may reach it, the window continues until its interval
            is as narrow as `MeasureRules.promoted_half_width_frac`. None for never.
        cycle: {"steps", "seconds"} from one regular pause, such as a validation, to the next in the baseline. A window waits
            for the next pause (cycles.py). {} if the baseline has no such pauses; None in the baseline itself.
        end_s: time on the launcher's monotonic clock at which the window ends even if it is not full; None for no deadline.
        tokens_per_sample: tokens of each sample, to count tokens instead of samples; None if not known.
        origin: in mode "apply", the file that the knobs come from, as named by the user.
        made_on: in mode "apply", {"torch", "device_name"} of the machine where that file was made. The device's name is None
            on the CPU; unknown values are absent.
        late: in mode "apply", knob key -> why the knob was set too late to have any effect in this process.
        is_quiet: in mode "apply", whether to report only settings that did not take effect.
        explain: in mode "explain", which pass is made: one of `explain.documents.PASSES`.
        skipped: stages of the loader, and functions of the program, that are skipped to measure what they cost; see
            explain/skipping.py.
        host: name of the machine that launches the trial; "" in a real run.
        boot_id: the id that this machine's kernel got when the machine was last started; "" in a real run.
        epoch_s: when this machine's monotonic clock was 0, in seconds since the epoch; None in a real run. `clock_offset_s`
            uses it and `boot_id`, because ranks on other nodes have other clocks.
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
    is_quiet: bool = False
    explain: str = ""
    skipped: List[str] = dataclasses.field(default_factory=list)
    host: str = ""
    boot_id: str = ""
    epoch_s: Optional[float] = None
    schema: int = SCHEMA


@dataclasses.dataclass
class KnobReport:
    """Whether one knob took effect in one rank.

    Attributes:
        status: APPLIED, NOT_APPLICABLE or OVERRIDDEN.
        reason: why it was not applied, as part of a sentence; empty if it was.
        observed: the value read back from the process after the last step; None if it cannot be read.
    """

    status: str
    reason: str = ""
    observed: Any = None


@dataclasses.dataclass
class Window:
    """The measured steady phase, the only source of the throughput.

    Attributes:
        steps: counted optimizer steps.
        seconds: wall time; on CUDA, the device is synchronised at both ends.
        samples: work units consumed.
        rate_per_s: samples consumed per second.
        block_rates_per_s: the rate of each block; a block's number of steps is a multiple of the number of workers.
        half_width_frac: half the width of the rate's 95 % interval, divided by the rate; None if the blocks are too few or too
            correlated.
        is_steady: False if warm-up reached its time limit, graphs were still being compiled, the step time kept changing, the
            window held no whole cycle of steps, or the time was up while the loader's queue was running empty.
        reason: why the window ended, or why it is not steady.
        is_raced: whether the window was ended early because the rate was certainly below `Spec.race_below_per_s`.
        clock_gap_frac: |sum of the seconds between device events - wall time| / wall time; None on the CPU.
        block_s: seconds of each block; empty in results of earlier versions.
        cycles: number of whole cycles in the window; each cycle is a block. 0 if the steps do not come in cycles.
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
    """Everything that one rank of a trial measured and observed.

    Attributes:
        status: "measured" (the harness ended the program), "ended" (the program ended by itself first), "failed" (exception).
        error: {"type", "message", "traceback"} of the exception that ended the program; None otherwise. If a signal ended a
            loader worker, also "worker": process id and signal ("12, SIGKILL"). If the exception was raised while the harness
            set a knob, also "knob".
        failed_s: when the exception was noted, on the launcher's monotonic clock; shows which of several ranks failed first.
        phases_s: seconds spent in each phase of PHASES.
        unit: "samples"; "tokens" if `Spec.tokens_per_sample` is set, or if the number of samples is unknown and batches are
            packed sequences or matrices of token ids; "steps" if no batch dimension was found. `unit_source` says where the
            unit comes from.
        steps: raw steps since the first: {"end_s": [...], "samples": [...], "wait_s": [...], "warmup": n}. `end_s` is in
            seconds since the first step ended. Steps that a GPU's clock drops when the window opens are absent, and so is their
            time (`CudaClock.open_window`). `wait_s` is host seconds inside the loader's __next__. With `is_at_own_pace`,
            "origin_s" is when the first step ended, monotonic clock.
        window: the measured window; None if the trial did not reach it.
        throughput_per_s: the rank's throughput: its rate once the loader's queued batches are used up (supply.py).
        data_wait_frac: share of the window's step time that the host spent inside the loader's __next__; None if unknown.
        regime: "separate" or "shared": whether the loader's workers have cores to themselves; "" without workers.
        device_rate_per_s: D, the device's rate if the loader took no time; None if unknown. It is unknown in the "shared"
            regime, where the workers slow the device's steps down. In a training on the CPU, another thread of the program may
            fetch the batches. The steps' waits for this thread cannot be seen, so D is then unknown, too, unless the loader is
            far faster than the steps.
        loader_rate_per_s: L, the rate that the loader can sustain; None without a loader.
        memory: {"kind": "cuda"|"cpu", "peak_bytes", "peak_reserved_bytes", "capacity_bytes", "alloc_retries"}; None
            for unknown values. The allocator's retries are those since the window opened.
        loss: {"first", "last", "is_finite", "curve", "why_no_curve"} seen at backward(); None if backward() was not seen. The
            curve contains the mean loss of each of the first optimizer steps, without gradient scaling, and None for each loss
            that is not finite. If there is no curve, it is empty, and "why_no_curve" says why.
        scaling: {"scale", "skipped", "skipped_in_window"} of the program's or the harness's GradScaler; None without one.
        knobs: knob key -> KnobReport for every knob of the spec.
        observed: knob key -> the program's own value, for every knob that the harness can read. It is the knob's baseline.
        applicability: knob key -> why that knob cannot be changed in this program; knobs that can be changed are absent.
        target: loaders whose batches reach the optimizer, as [{"site", "ordinal", "code", "nth"}]; None without a DataLoader.
            "code" and "nth" identify the loader after the program was edited or moved (sites.py). "is_unshared": true marks a
            data set that yields all samples in each worker (an IterableDataset without `get_worker_info`); the loader keeps its
            number of workers.
        detected: what `inspect` prints: {"loader", "modules", "optimizers", "precision", "compile", "world_size", ...}.
        facts: interpreter, torch, device and instruction set as the program's process sees them.
        compiled: {"graphs", "cached" (graphs found in the study's compile cache), "recompile_limit_hit", "seconds"}.
        communication: {"exposed_s" (per step), "num_steps" (observed), "gradient_bytes", "bandwidth_bytes_per_s" (None if
            unknown)}, see ranks.py; {} if not known.
        is_at_own_pace: whether this process does not wait for the other ranks (peers.py). If so, the processes' rates over
            their common time span are added up.
        ranks_per_batch: number of ranks that train on the same batch, because the model is split over them.
        host: name of the machine that the rank ran on; "" in results of earlier versions.
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
    ranks_per_batch: int = 1
    host: str = ""
    schema: int = SCHEMA


@dataclasses.dataclass
class Progress:
    """One line of progress.jsonl: the progress of rank 0.

    Attributes:
        time_s: monotonic clock of the machine that launched the trial.
        phase: one of PHASES.
        step: counted optimizer steps so far.
        rate_per_s: samples per second over the last block; None before the first block ends.
    """

    time_s: float
    phase: str
    step: int = 0
    rate_per_s: Optional[float] = None


def clock_offset_s(spec: Spec) -> float:
    """Returns the seconds to add to this process's monotonic clock to get that of the machine that launched the trial.

    The result is 0.0 on that machine, even if its system clock was set meanwhile. On other machines, it is as exact as the
    system clocks.
    """
    if spec.epoch_s is None or (spec.boot_id and spec.boot_id == read(BOOT_ID)):
        return 0.0
    offset_s = time.time() - time.monotonic() - spec.epoch_s
    return offset_s if abs(offset_s) > SAME_CLOCK_S else 0.0


def write_json(path: str, document: Any) -> None:
    """Writes a dataclass or plain document as JSON, by `write_text`. Integers of NumPy or other libraries become plain ones."""
    write_text(path, json.dumps(document, default=_plain))


def _plain(value: Any) -> Any:
    return operator.index(value) if hasattr(value, "__index__") else dataclasses.asdict(value)


def write_text(path: str, text: str, *, is_durable: bool = True) -> None:
    """Writes a file that only its owner may read. It is renamed once it is complete, so no reader sees a part of it.

    If not `is_durable`, the file may be lost when the machine fails, but the caller does not wait for the disk.
    """
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
            file.write(text)
            if is_durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:  # for example a full disk: an incomplete document is useless
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def read_spec(source: str) -> Spec:
    """Returns the spec from the value of SPEC_VARIABLE: a path or JSON.

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
    return result_of(_read(path), path)


def result_of(raw: Dict[str, Any], source: str) -> RankResult:
    """Returns the rank result in a document.

    Args:
        raw: the document, as `dataclasses.asdict` makes it from a result; it is changed.
        source: where the document comes from, for the error message.

    Raises:
        ValueError: it is not a result of this schema.
    """
    try:
        raw["window"] = Window(**raw["window"]) if raw.get("window") else None
        raw["knobs"] = {key: KnobReport(**report) for key, report in raw.get("knobs", {}).items()}
        return RankResult(**raw)
    except (TypeError, AttributeError) as error:
        raise ValueError(f"{source}: not a result of schema {SCHEMA}: {error}") from error


def _read(path: str) -> Dict[str, Any]:
    with open(path, encoding="utf-8") as file:
        return _checked(json.load(file), path)


def _checked(raw: Any, path: str) -> Dict[str, Any]:
    if not isinstance(raw, dict) or raw.get("schema") != SCHEMA:
        raise ValueError(f"{path}: not a document of schema {SCHEMA}")
    return raw
