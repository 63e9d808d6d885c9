"""Makes all tables of an explanation from the files of the passes, and writes and reads them.

explain/<table>.csv, explain/<table>.json    one table, all ranks
explain/tables.json                          which tables there are, why others are absent, and one step's timeline
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from autotune.documents import read_json, write_json, write_text
from autotune.errors import Unreadable
from autotune.explain.breakdown import MAX_OTHER_FRAC, ON_DEVICE, OTHER, Breakdown, breakdown
from autotune.explain.host import host_of
from autotune.explain.host_tables import COLUMNS as HOST_COLUMNS
from autotune.explain.host_tables import lines_tables, memory_tables, step_s
from autotune.explain.kernels import COLUMNS as KERNEL_COLUMNS
from autotune.explain.kernels import kernel_rows
from autotune.explain.operators import COLUMNS as OPERATOR_COLUMNS
from autotune.explain.operators import operator_rows, operators_of
from autotune.explain.passes import Passes, read_passes
from autotune.explain.ranks import COLUMNS as RANKS_COLUMNS
from autotune.explain.ranks import ranks_table
from autotune.explain.roofline import COLUMNS as ROOFLINE_COLUMNS
from autotune.explain.roofline import Step, documented_peaks, measured_peaks, roofline_row
from autotune.explain.table import Row, Table
from autotune.explain.timeline import Rectangle, timeline
from autotune.explain.trace import Trace, read_trace
from autotune.harness.explain.documents import LINES, MAIN, MEMORY, TRACE, Traced
from autotune.plain_json import from_json
from autotune.quantities import percent_text
from autotune.shapes import check, number, text

FOLDER, INDEX = "explain", "tables.json"
SCHEMA = 1  # version of the index; 1 is the first
# If the profiler makes a step more than this many times as long, the shares in a trace do not hold for a step without it.
MAX_DISTORTION = 1.5
EMPTY = {  # table -> why it has no rows although its pass ran
    "stages": "the program has no DataLoader whose stages could be timed",
    "syncs": "the host never waited for a tensor's value while it was observed",
    "compile": "no recompilation and no graph break",
}
PRIVILEGES = "CUPTI_ERROR_INSUFFICIENT_PRIVILEGES"
PRIVILEGES_REMEDY = (
    "let users profile with the driver's option NVreg_RestrictProfilingToAdminUsers=0, or give the container CAP_SYS_ADMIN"
)

BREAKDOWN_COLUMNS = {
    "rank": "rank of the process", "category": "what the time goes to; if several apply at once, the one listed first counts",
    "seconds": "seconds per step, under the profiler", "share_frac": "seconds relative to the step", "steps": "profiled steps",
}  # fmt: skip
TRACE_TABLES = {  # name -> title, columns
    "breakdown": ("Where the time of a step goes", BREAKDOWN_COLUMNS),
    "operators": ("Operators", OPERATOR_COLUMNS),
    "kernels": ("Kernels", KERNEL_COLUMNS),
    "roofline": ("Relative to the device's peaks", ROOFLINE_COLUMNS),
}
NEVER_NULL = {  # table -> columns whose numbers are always known
    "breakdown": ("seconds",), "memory": ("bytes",), "memory_timeline": ("time_s", "allocated_bytes", "reserved_bytes"),
}  # fmt: skip
COLUMNS = {**{name: columns for name, (_, columns) in TRACE_TABLES.items()}, **HOST_COLUMNS, "ranks": RANKS_COLUMNS}


@dataclass(kw_only=True)
class Tables:
    """The tables of one configuration.

    Attributes:
        tables: name -> table.
        absent: name -> why there is no such table.
        timeline: what happened in one step of the rank `timeline_rank`.
        distortion: rank -> seconds of a step with the profiler, divided by the seconds of a step without it.
        traces: rank -> path of its trace, for ui.perfetto.dev.
        other_parts: rank -> parts of "other" by place, [(place, seconds per step)]; only for ranks on which "other" takes more
            than 5 % of the step.
    """

    tables: dict[str, Table] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    timeline: list[Rectangle] = field(default_factory=list)
    timeline_rank: int = 0
    distortion: dict[int, float] = field(default_factory=dict)
    traces: dict[int, str] = field(default_factory=dict)
    other_parts: dict[int, list[tuple[str, float]]] = field(default_factory=dict)

    def rows(self, name: str, rank: int | None = None) -> list[Row]:
        """Returns the rows of a table, of one rank or all; [] if the table is absent."""
        table = self.tables.get(name)
        return [] if table is None else table.rows if rank is None else table.of_rank(rank)

    def add(self, table: Table, reason: str = "") -> None:
        """Adds a table. If it has no rows, it is recorded as absent instead, with this reason."""
        if table.rows:
            self.tables[table.name] = table
        else:
            self.absent[table.name] = reason or "; ".join(table.notes) or "nothing was recorded"


@dataclass(kw_only=True)
class Explanation:
    """The files of the passes, and the tables made from them. Findings are based on both."""

    passes: Passes
    tables: Tables


def explained(folders: Sequence[Path], *, mask: Callable[[str], str] = str) -> Explanation:
    """Returns the explanation of one configuration, masked. If a file cannot be read, its tables are absent; never raises."""
    passes = read_passes(folders, mask)
    made = _OfTraces(passes)
    for rank in sorted(passes.traces):
        made.add(rank, mask)
    tables = made.tables()
    for which, several in ((LINES, lines_tables(passes.lines)), (MEMORY, memory_tables(passes.memory))):
        reasons = passes.absent.get(which, [])
        for table in several:
            table.notes += reasons if passes.by_pass[which] else []
            tables.add(table, EMPTY.get(table.name, "") if passes.by_pass[which] else "; ".join(reasons))
    tables.add(ranks_table(passes, made.breakdowns), "; ".join(passes.absent.get(LINES, [])))
    return Explanation(passes=passes, tables=tables)


def with_earlier(made: Explanation, earlier: Tables) -> Explanation:
    """Returns an explanation with new tables, except the tables made from traces, which are taken from `earlier`.

    The traces have been removed since the earlier tables were made.
    """
    kept = {name: table for name, table in earlier.tables.items() if name in (*TRACE_TABLES, "ranks")}
    if "breakdown" not in kept:
        return made
    tables = {**made.tables.tables, **kept}
    absent = {**made.tables.absent, **{name: why for name, why in earlier.absent.items() if name in TRACE_TABLES}}
    made.passes.absent.pop(TRACE, None)
    absent = {name: why for name, why in absent.items() if name not in tables}
    return dataclasses.replace(made, tables=dataclasses.replace(earlier, tables=tables, absent=absent))


# Traces --------------------------------------------------------------------------------------------------------------------


class _OfTraces:
    """Collects the tables that are made from traces, one rank at a time, so that only one trace is in memory."""

    def __init__(self, passes: Passes) -> None:
        self._passes = passes
        self._made = {name: Table(name=name, title=title, columns=columns) for name, (title, columns) in TRACE_TABLES.items()}
        self._found = Tables()
        self.breakdowns: dict[int, Breakdown] = {}

    def add(self, rank: int, mask: Callable[[str], str]) -> None:
        document, path = self._passes.traced[rank], self._passes.traces[rank]
        try:
            trace = read_trace(path, mask)
            trace.left_out = document.left_out
            host = host_of(trace)
            found = breakdown(trace, host)
        except Unreadable as error:
            self._passes.miss(TRACE, f"rank {rank}: {error}")
            return
        self._found.traces[rank] = str(path)
        self.breakdowns[rank] = found
        peaks = documented_peaks(trace.device_name) or measured_peaks(document.peaks)
        operators = operators_of(trace, host)
        self._add_breakdown(rank, trace, document)
        self._extend("operators", rank, operator_rows(trace, host, operators, rank=rank, peaks=peaks))
        if trace.has_device:
            self._extend("kernels", rank, kernel_rows(trace, host, rank=rank))
        else:
            self._note("kernels", rank, _why_no_kernels(document))
        flops, source = self._flops(rank, operators.a_step(operators.flops))
        step = Step(
            seconds=self._step_s(rank), flops=flops, flops_from=source, num_bytes=operators.a_step(operators.num_bytes),
            busy_s=sum(found.seconds[name] for name in ON_DEVICE) if found.is_gpu else None,
            operators=self._made["operators"].of_rank(rank), kernels=self._made["kernels"].of_rank(rank),
        )  # fmt: skip
        row = {"rank": rank, "device": trace.device_name or document.device, **roofline_row(step, peaks)}
        self._made["roofline"].rows.append(row)
        if not self._found.timeline:
            self._found.timeline, self._found.timeline_rank = timeline(trace, host), rank

    def tables(self) -> Tables:
        """Returns the tables, and why others are absent."""
        for table in self._made.values():
            table.notes += self._passes.absent.get(TRACE, [])
            self._found.add(table)
        return self._found

    def _note(self, name: str, rank: int, note: str) -> None:
        self._made[name].notes.append(f"rank {rank}: {note}" if len(self._passes.traces) > 1 else note)

    def _extend(self, name: str, rank: int, made: tuple[list[Row], list[str]]) -> None:
        rows, notes = made
        self._made[name].rows += rows
        for note in notes:
            self._note(name, rank, note)

    def _add_breakdown(self, rank: int, trace: Trace, document: Traced) -> None:
        found = self.breakdowns[rank]
        self._made["breakdown"].rows += [
            {
                "rank": rank, "category": name, "seconds": seconds, "share_frac": found.shares[name],
                "steps": len(found.by_step),
            }
            for name, seconds in found.seconds.items()
            if seconds or name == OTHER
        ]  # fmt: skip
        for note in (*document.notes, *trace.notes):
            self._note("breakdown", rank, note)
        self._note_distortion(rank, document)
        if document.device == "cuda" and not found.is_gpu:
            self._note("breakdown", rank, f"shows only what the host did: {_why_no_kernels(document)}")
        if found.shares[OTHER] > MAX_OTHER_FRAC:
            self._found.other_parts[rank] = found.other_parts
            self._note("breakdown", rank, self._other_note(rank, found))

    def _note_distortion(self, rank: int, document: Traced) -> None:
        if not document.plain_step_s:
            return
        ratio = self._found.distortion[rank] = document.step_s / document.plain_step_s
        if ratio <= MAX_DISTORTION:
            return
        words = f"the profiler makes a step {ratio:.1f} times as long"
        on_gpu = "the host's seconds are longer than without it, but not the GPU's"
        on_cpu = "the shares are not those of a step without it"
        for name in ("breakdown", "operators"):
            self._note(name, rank, f"{words}, so {on_gpu if self.breakdowns[rank].is_gpu else on_cpu}")

    def _other_note(self, rank: int, found: Breakdown) -> str:
        where = "; ".join(f"{seconds * 1e3:.3g} ms {place}" for place, seconds in found.other_parts)
        document = self._passes.lines.get(rank)
        own = [line for line in document.lines if line.is_own and line.where == MAIN] if document else []
        lines = [line for line in own if line.phase == "other"]
        top = max(lines, key=lambda line: line.self_s, default=None)
        named = f"; the program's slowest line there is {top.file}:{top.line}, {top.self_s * 1e3:.3g} ms" if top else ""
        return f"{percent_text(found.shares[OTHER], digits=1)} of the step is in category other: {where}{named}"

    def _step_s(self, rank: int) -> float:
        """Returns the seconds of a step without a profiler if they are known, else of a profiled step.

        The pass "trace" runs the plain program before its profiler starts. The pass "lines" runs without a profiler, but makes
        Python a bit slower. If both are known, the smaller time counts.
        """
        lines, traced = self._passes.lines.get(rank), self._passes.traced[rank]
        known = [seconds for seconds in (step_s(lines) if lines else 0.0, traced.plain_step_s) if seconds]
        return min(known, default=self.breakdowns[rank].step_s)

    def _flops(self, rank: int, by_shapes: float | None) -> tuple[float | None, str]:
        """Returns a step's FLOPs and their source: counted by the pass "memory", or else computed from shapes.

        The pass "memory" counts the FLOPs of one step. They are scaled to the number of samples of an average step.
        """
        memory, lines = self._passes.memory.get(rank), self._passes.lines.get(rank)
        if memory is None or memory.flops is None:
            return by_shapes, TRACE if by_shapes is not None else ""
        scale = 1.0
        if lines and lines.steps and memory.samples and lines.unit == memory.unit:
            scale = lines.samples / lines.steps / memory.samples or 1.0
        return memory.flops * scale, MEMORY


def _why_no_kernels(document: Traced) -> str:
    if document.device != "cuda":
        return "the program ran on the CPU"
    told = next((note for note in document.notes if "CUPTI" in note), "") or "the trace holds no events of the device"
    return told + (f"; {PRIVILEGES_REMEDY}" if PRIVILEGES in told else "")


# Files ---------------------------------------------------------------------------------------------------------------------


def write_tables(tables: Tables, folder: Path) -> list[Path]:
    """Writes all tables as CSV and JSON into `<folder>/explain` and returns the files.

    Raises:
        OSError: they cannot be written.
    """
    target = folder / FOLDER
    target.mkdir(exist_ok=True, mode=0o700)
    written = []
    for name, table in tables.tables.items():
        write_text(target / f"{name}.csv", table.as_csv())
        write_json(target / f"{name}.json", dataclasses.asdict(table))
        written += [target / f"{name}.csv", target / f"{name}.json"]
    index = dataclasses.asdict(dataclasses.replace(tables, tables={}))
    write_json(target / INDEX, {**index, "schema": SCHEMA, "tables": list(tables.tables)})
    return [*written, target / INDEX]


def read_tables(folder: Path) -> Tables:
    """Returns the tables that `write_tables` wrote; a table that cannot be read counts as absent.

    Raises:
        OSError: there is no index of tables, or it cannot be read.
        ValueError: that file is not an index of tables, or is of another version.
    """
    target = folder / FOLDER
    index = read_json(target / INDEX)
    if not isinstance(index, Mapping) or index.get("schema") != SCHEMA:
        raise ValueError(f"{target / INDEX}: not an index of an explanation's tables, or one of another version")
    try:
        check(index, {"tables": [text], "timeline": [{"start_s": number, "seconds": number}]})
        found = from_json({**index, "tables": {}}, Tables)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{target / INDEX}: {error}") from None
    for name in index["tables"]:
        try:
            raw = read_json(target / f"{Path(name).name}.json")
            found.tables[name] = Table.from_json(raw, COLUMNS.get(name, {}), NEVER_NULL.get(name, ()))
        except (OSError, ValueError) as error:
            found.absent[name] = f"{name}.json cannot be read: {error}"
    return found
