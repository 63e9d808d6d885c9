"""Defines the files of trials in mode "explain". Each rank writes one, in the folder that also holds its result.

Like `protocol`, this module needs only Python 3.9 and the standard library, because both the harness and the tuner import it.
Seconds are floats, bytes are integers. Unknown values are None, never 0, and `notes` says why. A trial
makes one of three passes, which write these files:

    explained.lines.rank<R>.json     Lines: where the host's time goes, by phase, line and loader stage; no profiler is active
    explained.trace.rank<R>.json     Traced: what was profiled; the trace itself is trace.rank<R>.json.gz (Chrome's format,
                                     opens in ui.perfetto.dev)
    explained.memory.rank<R>.json    Memory: what uses the memory at the peak, and the FLOPs of one step
"""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, List, Optional

from ..protocol import SCHEMA

LINES, TRACE, MEMORY = PASSES = ("lines", "trace", "memory")

# Phases of a step, as the host sees them. "input" is inside the loader's __next__, "transfer" are copies of a batch to the
# device, "forward" are the calls of the module that trains and of torch's losses.
INPUT, TRANSFER, FORWARD, BACKWARD, OPTIMIZER, OTHER = STEP_PHASES = (
    "input", "transfer", "forward", "backward", "optimizer", "other",
)  # fmt: skip
MAIN, WORKER, THREAD = "main", "worker", "thread"  # where a line ran: the training thread, a loader worker, another thread

# Stages of the input pipeline, in order; the stages of a Compose are "transform: ToTensor" and so on.
READ, DECODE, TRANSFORM, ITEM, COLLATE, HANDOVER, PIN = ("read", "decode", "transform", "item", "collate", "hand-over", "pin")
FUNCTION = "function"  # in `Spec.skipped`, "function: FILE: NAME" stands for one of the program's own functions
# Keys of `Traced.peaks`, `Memory.products` and `Memory.products_in_16_bits`.
WIDE, NARROW, BYTES, CASTS, TIMED_FRAC = ("float32", "bfloat16", "bytes", "casts", "timed_frac")
PADDED, IN_ALL = "padded_frac", "in_all_frac"  # keys of `Memory.padding`


def document_file(which: str, rank: int) -> str:
    """Returns the name of the document of a pass."""
    return f"explained.{which}.rank{rank}.json"


def trace_file(rank: int) -> str:
    """Returns the name of a rank's trace."""
    return f"trace.rank{rank}.json.gz"


@dataclasses.dataclass
class Line:
    """Host time at one line of code.

    Attributes:
        file: absolute path, or "<...>" for code without a file.
        line, function: number of the line, and name of its function: the qualified name if known.
        text: the stripped source line; "" if it cannot be read.
        phase: one of STEP_PHASES; "input" for worker processes.
        where: MAIN, WORKER or THREAD.
        is_own: whether the file belongs to the program, not to torch, the standard library or an installed package.
        self_s: for a line of the program, the seconds per step in which it was the innermost of the program's own lines; the
            library code that it calls is included. For a line of a library, the seconds per step in which it was the innermost
            line of all. For workers, summed over workers.
        total_s: seconds per step in which the line was anywhere on the stack. For workers, summed over workers.
        callee: "file name:function" of the library function that takes the largest part of self_s; "" if less than half of
            self_s is spent in library functions.
    """

    file: str
    line: int
    function: str
    text: str
    phase: str
    where: str
    is_own: bool
    self_s: float
    total_s: float
    callee: str = ""


@dataclasses.dataclass
class Stage:
    """One stage of the input pipeline, summed over all workers (WORKER), or in the training process (MAIN).

    Without workers, all stages run in the training process. With workers, the training process only receives batches
    (HANDOVER) and pins them.

    Attributes:
        name: one of the constants READ to PIN or, for a part of a Compose, for example "transform: ToTensor".
        where: MAIN or WORKER.
        seconds: wall seconds per sample.
        cpu_s: CPU seconds per sample; None if unknown. While the stage waits, the CPU seconds of child processes and of the
            worker's other threads are included, up to the seconds of that wait.
        blocked_s: seconds per sample that are neither CPU time nor waits for a core: storage, network, sleep. None if unknown.
        count: number of timed calls. If samples are cheap to make, only some of the batches are timed.
        file, line, function: what was timed, if it is the program's own code; "" and 0 otherwise.
    """

    name: str
    where: str
    seconds: float
    cpu_s: Optional[float] = None
    blocked_s: Optional[float] = None
    count: int = 0
    file: str = ""
    line: int = 0
    function: str = ""


@dataclasses.dataclass
class Site:
    """A place in the program's own code where the host waits for the GPU or, in a run on the CPU, would wait for a GPU.

    The code there copies a tensor and waits for the copy, or reads a tensor's values (`.item()`, `.tolist()`, `print(tensor)`).

    Attributes:
        kind: "item", "cpu", "synchronize", "nonzero", "copy" (to the device, from pageable memory or without non_blocking), ...
        file, line, function, text: as in `Line`.
        phase: one of STEP_PHASES.
        count: calls per step.
        seconds: seconds per step in these calls.
    """

    kind: str
    file: str
    line: int
    function: str
    text: str
    phase: str
    count: float
    seconds: float


@dataclasses.dataclass
class Compiled:
    """Recompilations and graph breaks of torch.compile.

    Attributes:
        recompilations: [{"file", "line", "function", "reason", "seconds", "count"}], most seconds first.
        graph_breaks: [{"file", "line", "reason", "count"}].
        seconds: seconds of compiling in the observed steps.
        is_limit_hit: whether a function was recompiled so often that torch runs it uncompiled from now on.
    """

    recompilations: List[Dict[str, Any]] = dataclasses.field(default_factory=list)
    graph_breaks: List[Dict[str, Any]] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    is_limit_hit: bool = False


@dataclasses.dataclass
class Restarts:
    """Starts of new workers of the training loader in the observed steps, as at the beginning of an epoch.

    Attributes:
        count: number of starts; starting all workers of an epoch counts as one.
        start_s: seconds that the training thread spent starting them.
        first_s: seconds that the training thread waited for the first batch after each start.
        end_s: seconds that the training thread spent ending workers.
        num_remade: how many of these starts were for a DataLoader that the program had made since the last step.
        steps_per_epoch: optimizer steps of the last epoch; 0 if unknown.
    """

    count: int = 0
    start_s: float = 0.0
    first_s: float = 0.0
    end_s: float = 0.0
    num_remade: int = 0
    steps_per_epoch: int = 0


@dataclasses.dataclass
class Lines:
    """Result of the pass "lines".

    Attributes:
        rank, world_size: of this process.
        device: "cuda" or "cpu".
        steps, seconds: observed optimizer steps, and the wall seconds that they took.
        samples: work units of these steps, in `unit`.
        phases_s: phase of STEP_PHASES -> host seconds per step; all phases together take seconds / steps.
        device_phases_s: phase -> seconds per step on the GPU, timed with CUDA events; None on the CPU.
        wait_s: seconds per step inside the training loader's __next__; None without a DataLoader.
        num_workers, batch_size: of the training loader; None if unknown. If each item of the data set is a whole batch,
            batch_size is its number of samples.
        num_samples: number of samples that the line sampler took of the training thread.
        lines: lines of all phases, sorted by self_s, the largest first; at most 300 for each `where`.
        stages: of the training loader.
        syncs: the sites with the most seconds, at most 50.
        gc_s, gc_count: seconds and collections of the cyclic garbage collector per step.
        compiled: recompilations and graph breaks; None if nothing was compiled.
        communication: {"exposed_s", "gradient_bytes"} as in RankResult.communication, seconds per step; {} if unknown.
        notes: what could not be measured, and why.
        busy_cpu_s: CPU seconds per step that the training thread uses in all phases but "input"; None if unknown.
        is_stream: whether the training loader reads an iterable data set.
        page_faults: page faults of the training process per step, without those that raise its peak memory. Each counted fault
            touches a page that was returned to the kernel and requested again. None if unknown, as in a pass with an
            evaluation.
        is_anomaly_mode: whether torch's anomaly detection was on in some of the steps.
        restarts: starts of new loader workers within the steps; None if there were none.
        ranks_per_batch, unit_source: as in RankResult; they determine which ranks' samples are added up.
    """

    rank: int
    world_size: int
    device: str
    steps: int
    seconds: float
    samples: float
    unit: str
    phases_s: Dict[str, float]
    device_phases_s: Optional[Dict[str, float]]
    wait_s: Optional[float]
    num_workers: Optional[int]
    batch_size: Optional[int]
    num_samples: int
    lines: List[Line]
    stages: List[Stage]
    syncs: List[Site]
    gc_s: float
    gc_count: float
    compiled: Optional[Compiled] = None
    communication: Dict[str, Any] = dataclasses.field(default_factory=dict)
    notes: List[str] = dataclasses.field(default_factory=list)
    busy_cpu_s: Optional[float] = None
    is_stream: bool = False
    page_faults: Optional[float] = None
    is_anomaly_mode: bool = False
    restarts: Optional[Restarts] = None
    ranks_per_batch: int = 1
    unit_source: str = ""
    schema: int = SCHEMA


@dataclasses.dataclass
class Traced:
    """Result of the pass "trace".

    Attributes:
        file: name of the trace in this document's folder; "" if there is none, and `notes` says why.
        steps: number of profiled optimizer steps, not counting `left_out`; each step is a `ProfilerStep#` range in the trace.
        step_s: seconds of a step under the profiler.
        plain_step_s: seconds of a step before the profiler was started, in the same process; None if unknown.
        peaks: highest rates of the device, measured after the steps in all ranks at the same time. "float32" and "bfloat16" (on
            a GPU older than Ampere: "float16") -> FLOPs per second of a matrix product; "bytes" -> bytes per second of a copy.
            {} if they could not be measured.
        left_out: numbers of the `ProfilerStep#` ranges that are not in `steps`: the program evaluated its model in such a
            range, or ended in it.
        notes: what could not be measured, for example because CUPTI was refused.
    """

    rank: int
    world_size: int
    device: str
    file: str
    steps: int
    step_s: float
    plain_step_s: Optional[float]
    peaks: Dict[str, float] = dataclasses.field(default_factory=dict)
    left_out: List[int] = dataclasses.field(default_factory=list)
    notes: List[str] = dataclasses.field(default_factory=list)
    schema: int = SCHEMA


@dataclasses.dataclass
class Memory:
    """Result of the pass "memory". Bytes of one rank.

    Attributes:
        peak_bytes: the most bytes that the program's tensors used at once. On CUDA it is the allocator's peak. On the CPU it is
            the bytes of parameters and optimizer state plus the peak of the steps' allocations. It is at least the sum of the
            parts below.
        parameters, gradients, optimizer_state, activations, input, other: bytes at the peak; `other` is the rest of peak_bytes.
        by_module: [{"module": dotted name, "class", "activations", "parameters", "flops"}], sorted by activations, the largest
            first. The numbers of a module do not include the modules inside it; the root's name is "".
        flops: of one step, forward and backward; None if not counted.
        samples: work units of that step, in `unit`.
        products: times of that step's products with 32-bit inputs (matrix products, convolutions and, on the CPU, attention).
            They are timed one by one, those with the most FLOPs first, for about 2 s. "float32" and "bfloat16" -> seconds that
            the timed products take in this type (on a GPU older than Ampere, "bfloat16" stands for float16); "casts" -> seconds
            to convert their inputs to 16 bits; "timed_frac" -> FLOPs of the timed products, divided by those of all. {} without
            such products, or if they could not be run (see `notes`).
        products_in_16_bits: as `products`, but for products with 16-bit inputs: bfloat16 or float16, whichever is more
            frequent. The key "bfloat16" stands for this type. {} without such products.
        padding: "padded_frac" -> share of that step's tokens that are padding; "in_all_frac" -> share of that step's tokens
            that are at positions where all samples are padded. {} without an embedding of tokens, or if the program packs the
            sequences after the embedding.
        timeline: [[seconds since the step began, allocated bytes, reserved bytes]], at most 500 points; CUDA only.
        at_peak: [{"file", "line", "function", "bytes", "count"}] the largest allocations at the peak; CUDA only.
        fragmentation_frac: (reserved - allocated) / reserved at the peak; None on the CPU.
        alloc_retries: how often the allocator emptied its cache and tried again in the observed steps; None on the CPU.
        capacity_bytes: memory of the device; on the CPU, the process's memory limit.
    """

    rank: int
    world_size: int
    device: str
    peak_bytes: int
    parameters: int
    gradients: int
    optimizer_state: int
    activations: int
    input: int
    other: int
    by_module: List[Dict[str, Any]]
    flops: Optional[float]
    samples: float
    unit: str
    products: Dict[str, float] = dataclasses.field(default_factory=dict)
    products_in_16_bits: Dict[str, float] = dataclasses.field(default_factory=dict)
    padding: Dict[str, float] = dataclasses.field(default_factory=dict)
    timeline: List[List[float]] = dataclasses.field(default_factory=list)
    at_peak: List[Dict[str, Any]] = dataclasses.field(default_factory=list)
    fragmentation_frac: Optional[float] = None
    alloc_retries: Optional[int] = None
    capacity_bytes: Optional[int] = None
    notes: List[str] = dataclasses.field(default_factory=list)
    schema: int = SCHEMA
