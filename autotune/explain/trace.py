"""Reads a trace of torch.profiler (Chrome's format as Kineto writes it) into compact columns.

Each event is dropped as soon as it is parsed. So memory contains only the text, the columns (about 150 bytes per event), and
the distinct names and shapes. The format is defined by pytorch/kineto, libkineto/src/output_json.cpp.
"""

from __future__ import annotations

import json
import marshal
import math
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from autotune.documents import read_bytes
from autotune.errors import Unreadable
from autotune.explain.intervals import Floats, Ints, Mask
from autotune.monitors.sealing import MAX_TEXT_BYTES
from autotune.plain_text import plain

# Limits, so that a damaged or huge file cannot use up the memory.
MAX_EVENTS = 2_000_000  # events that are kept; a pass profiles at most 200,000
MAX_NAME_CHARS = 2_000  # characters of a name; the longest C++ kernel names seen had 1,500
SKIPPED = "{:,} of {:,} events have no usable name or time and are left out"
MAX_ELEMENTS = 1 << 62  # largest number of elements of a tensor

OPERATOR, ANNOTATION, RUNTIME, KERNEL, COPY, SET = range(6)
_CATEGORIES = {
    "cpu_op": OPERATOR, "Operator": OPERATOR, "user_annotation": ANNOTATION, "cuda_runtime": RUNTIME, "Runtime": RUNTIME,
    "cuda_driver": RUNTIME, "kernel": KERNEL, "Kernel": KERNEL, "gpu_memcpy": COPY, "Memcpy": COPY, "gpu_memset": SET,
    "Memset": SET,
}  # fmt: skip
HOST = (OPERATOR, ANNOTATION, RUNTIME)
DEVICE = (KERNEL, COPY, SET)
STEP = "ProfilerStep#"
_WITH_VALUES = ("conv", "attention")  # operators whose FLOPs depend on more than shapes, such as strides
_AUTOGRAD = "autograd::engine::evaluate_function"


@dataclass(kw_only=True)
class Trace:
    """One rank's events, sorted by start and then longest first. All columns have the same length.

    Attributes:
        starts_s, ends_s: seconds since the first event.
        categories: OPERATOR, ANNOTATION, ...
        names: index into `texts`.
        threads: index into `lanes`; for device events the lane is (device, stream).
        correlations: number shared by a runtime call and the device event that it caused; -1 for other events.
        details: index into `arguments`; -1 for events without arguments.
        texts: the distinct names, masked.
        lanes: the distinct (process, thread) pairs, as texts.
        arguments: the distinct arguments of events: {"dims", "types", "values"} of operators, {"registers", "shared_bytes",
            "grid", "block", "occupancy_percent"} of kernels.
        device_name: name of the GPU that runs the most kernels; "" on the CPU.
        left_out: which steps do not count: 3 stands for "ProfilerStep#3".
        notes: what was left out.
    """

    starts_s: Floats
    ends_s: Floats
    categories: Ints
    names: Ints
    threads: Ints
    correlations: Ints
    details: Ints
    texts: list[str]
    lanes: list[tuple[str, str]]
    arguments: list[dict[str, Any]]
    device_name: str = ""
    left_out: Collection[int] = ()
    notes: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.starts_s)

    @property
    def seconds(self) -> Floats:
        """Durations in seconds."""
        return self.ends_s - self.starts_s

    def is_of(self, *categories: int) -> Mask:
        """Returns which events belong to any of these categories."""
        return np.isin(self.categories, categories)

    def is_named(self, accept: Callable[[str], Any]) -> Mask:
        """Returns which events have a name that `accept` accepts. Calls `accept` once for each name."""
        accepted = np.array([bool(accept(text)) for text in self.texts], dtype=bool)
        return accepted[self.names]

    def partners(self, events: Ints, others: Ints) -> Ints:
        """Returns, for each event, the position in `others` of the first event with the same correlation; -1 without one."""
        known, wanted = self.correlations[others], self.correlations[events]
        order = np.argsort(known, kind="stable")
        places = np.append(order, -1)[np.searchsorted(known, wanted, sorter=order)]
        return np.where((wanted >= 0) & (np.append(known, -1)[places] == wanted), places, -1)

    def arguments_of(self, event: int) -> dict[str, Any]:
        """Returns the arguments of an event; {} if it has none, or for event -1."""
        detail = int(self.details[event]) if event >= 0 else -1
        return self.arguments[detail] if detail >= 0 else {}

    def types_of(self, event: int) -> tuple[str, ...]:
        """Returns the types of an operator's inputs, as Kineto writes them; () if they are not known, or for event -1."""
        return tuple(map(str, self.arguments_of(event).get("types") or ()))

    @property
    def has_device(self) -> bool:
        """Whether anything ran on a GPU."""
        return bool(self.is_of(*DEVICE).any())

    @property
    def main_thread(self) -> int:
        """Lane with the ranges of the steps or, if there are no ranges, with the most operators; -1 in an empty trace."""
        steps = self.is_of(ANNOTATION) & self.is_named(lambda name: name.startswith(STEP))
        candidates = self.threads[steps] if steps.any() else self.threads[self.is_of(OPERATOR)]
        return int(np.bincount(candidates).argmax()) if len(candidates) else -1

    def autograd_threads(self) -> list[int]:
        """Returns the lanes that run the backward pass, except the training thread's lane."""
        engine = self.is_of(OPERATOR) & self.is_named(lambda name: name.startswith(_AUTOGRAD))
        return [int(lane) for lane in np.unique(self.threads[engine]) if lane != self.main_thread]

    def steps(self, *, are_left_out: bool = False) -> Floats:
        """Returns start and end of each step that counts, or of each that is left out, shape (steps, 2)."""
        left_out = {f"{STEP}{number}" for number in self.left_out}
        is_wanted = self.is_named(lambda name: name.startswith(STEP) and (name in left_out) == are_left_out)
        found = self.is_of(ANNOTATION) & is_wanted
        return np.column_stack((self.starts_s[found], self.ends_s[found]))


def read_trace(path: Path, mask: Callable[[str], str] = str) -> Trace:
    """Returns a trace, with its names masked. The JSON file may be compressed by gzip.

    Raises:
        Unreadable: the file does not exist, is cut short or damaged, is not JSON, is not a trace, or exceeds the limits above.
    """
    columns = _Columns()
    try:
        text, is_whole = _text_of(path)
        columns.parse(text)
        trace = columns.as_trace(mask)
    except FileNotFoundError:
        raise Unreadable(f"{path.name}: not there") from None
    except zlib.error as error:
        raise Unreadable(f"{path.name}: damaged: {error}") from None
    except json.JSONDecodeError as error:
        # If JSON was cut short, a string is unterminated, or the error lies in the last word, such as "fals".
        is_whole = not (error.msg.startswith("Unterminated") or error.pos >= len(text.rstrip()) - len("fals"))
        if is_whole:
            raise Unreadable(f"{path.name}: not JSON: {error}") from None
    except RecursionError:
        raise Unreadable(f"{path.name}: not a trace: nested too deeply") from None
    except (OSError, ValueError) as error:
        raise Unreadable(f"{path.name}: {error}") from None
    if not is_whole:
        raise Unreadable(f"{path.name}: cut short after {columns.num_events:,} events")
    return trace


def _text_of(path: Path) -> tuple[str, bool]:
    """Returns the decompressed text of a file, and whether it is whole.

    Raises:
        OSError: it cannot be read.
        ValueError: it is longer than MAX_TEXT_BYTES.
        zlib.error: it is damaged.
    """
    content, is_whole = read_bytes(path, MAX_TEXT_BYTES), True
    if content.startswith(b"\x1f\x8b"):
        archive = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)  # 16: gzip's format
        content = archive.decompress(content, MAX_TEXT_BYTES + 1)
        is_whole = archive.eof
    if len(content) > MAX_TEXT_BYTES:
        raise ValueError(f"larger than {MAX_TEXT_BYTES >> 20:,} MiB; profile fewer steps")
    return content.decode(errors="replace"), is_whole


# Columns -------------------------------------------------------------------------------------------------------------------

_TAKEN = object()  # replaces an event after it is parsed, so that only its columns stay in memory


class _Columns:
    """Collects the columns of a trace."""

    def __init__(self) -> None:
        self.starts, self.durations = array("d"), array("d")
        self.categories, self.names, self.threads, self.details = array("b"), array("i"), array("i"), array("i")
        self.correlations = array("q")
        self.texts: dict[str, int] = {}
        self.arguments: dict[bytes, int] = {}
        self.lanes: dict[tuple[str, str], int] = {}
        self.device_name = ""
        self.num_events = self.num_skipped = 0

    def parse(self, text: str) -> None:
        """Collects all events of {"traceEvents": [...], ...} or of a bare list.

        Raises:
            ValueError: it is not JSON, is not a trace, or has too many events.
        """
        document = json.loads(text, strict=False, object_hook=self._take)
        events = document.get("traceEvents") if isinstance(document, dict) else document
        if not isinstance(events, list):
            raise ValueError("not a trace: it has no traceEvents")
        self.num_events = len(events)
        self.num_skipped += sum(event is not _TAKEN and not isinstance(event, dict) for event in events)
        properties = document.get("deviceProperties") if isinstance(document, dict) else None
        if isinstance(properties, list):
            named = {str(one.get("id")): str(one.get("name", "")) for one in properties if isinstance(one, dict)}
            self.device_name = named.get(self._busiest_device()) or next(iter(named.values()), "")

    def _busiest_device(self) -> str:
        """Returns the number of the GPU with the most kernels; "" without kernels."""
        of_lane = np.bincount(np.array(self.threads)[np.array(self.categories) == KERNEL], minlength=len(self.lanes))
        num_kernels: Counter[str] = Counter()
        for (device, _), num in zip(self.lanes, of_lane, strict=True):
            num_kernels[device] += int(num)
        return max((device for device in num_kernels if num_kernels[device]), key=num_kernels.__getitem__, default="")

    def _take(self, parsed: dict[str, Any]) -> Any:
        """Collects the columns of an event and returns _TAKEN, or returns any other JSON object. Inner objects come first."""
        if "ph" not in parsed:
            return parsed  # arguments of an event, or the whole document
        self.num_events += 1
        category = _CATEGORIES.get(str(parsed.get("cat", "")), -1) if parsed["ph"] == "X" else -1
        if category < 0:
            return _TAKEN
        try:
            self._append(category, parsed)
        except (TypeError, ValueError, OverflowError, KeyError, AttributeError):
            self.num_skipped += 1
        if len(self.starts) > MAX_EVENTS:
            raise ValueError(f"more than {MAX_EVENTS:,} events; profile fewer steps")
        return _TAKEN

    def _append(self, category: int, event: dict[str, Any]) -> None:
        start, duration, name = float(event["ts"]), float(event["dur"]), str(event["name"])
        if not (math.isfinite(start) and 0 <= duration < math.inf):
            raise ValueError
        arguments = event.get("args") or {}
        correlation = arguments.get("correlation", -1)
        correlation = correlation if isinstance(correlation, int) and 0 <= correlation < 2**63 else -1
        kept = _kept_arguments(category, name, arguments)
        lane = (str(event.get("pid", "")), str(event.get("tid", "")))
        self.names.append(self.texts.setdefault(name[:MAX_NAME_CHARS], len(self.texts)))
        self.details.append(self.arguments.setdefault(marshal.dumps(kept, 2), len(self.arguments)) if kept else -1)
        self.starts.append(start)
        self.durations.append(duration)
        self.categories.append(category)
        self.threads.append(self.lanes.setdefault(lane, len(self.lanes)))
        self.correlations.append(correlation)

    def as_trace(self, mask: Callable[[str], str]) -> Trace:
        """Returns the sorted, masked trace."""
        starts_us, durations_us = np.array(self.starts), np.array(self.durations)
        order = np.lexsort((-durations_us, starts_us))
        starts_us, durations_us = starts_us[order], durations_us[order]
        starts_us -= starts_us[0] if len(starts_us) else 0.0

        def sorted_ints(column: array[int]) -> Ints:
            return np.array(column, dtype=np.int64)[order]

        return Trace(
            starts_s=starts_us * 1e-6,
            ends_s=(starts_us + durations_us) * 1e-6,
            categories=sorted_ints(self.categories),
            names=sorted_ints(self.names),
            threads=sorted_ints(self.threads),
            correlations=sorted_ints(self.correlations),
            details=sorted_ints(self.details),
            texts=[_clean(text, mask) for text in self.texts],
            lanes=[(_clean(process, mask), _clean(thread, mask)) for process, thread in self.lanes],
            arguments=[_usable(marshal.loads(kept)) for kept in self.arguments],
            device_name=_clean(self.device_name, mask),
            notes=[SKIPPED.format(self.num_skipped, self.num_events)] if self.num_skipped else [],
        )


def _kept_arguments(category: int, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    if category == OPERATOR:
        return _shapes(name, arguments)
    if category == KERNEL:
        found = {kept: arguments.get(written) for kept, written in _LAUNCH.items()}
        return {key: value for key, value in found.items() if value is not None}
    return {}


_LAUNCH = {
    "registers": "registers per thread", "shared_bytes": "shared memory", "grid": "grid", "block": "block",
    "occupancy_percent": "est. achieved occupancy %",
}  # fmt: skip


def _shapes(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    dims = arguments.get("Input Dims", arguments.get("Input dims"))
    if dims is None:
        return {}
    found = {"dims": dims, "types": arguments.get("Input type", [])}
    if any(word in name for word in _WITH_VALUES):
        found["values"] = arguments.get("Concrete Inputs", [])
    return found


def _usable(kept: dict[str, Any]) -> dict[str, Any]:
    """Returns an event's arguments, except those not in the profiler's format."""
    if "dims" not in kept:
        return {name: value for name, value in kept.items() if _is_size(value)}
    dims, types, values = (kept.get(name, []) for name in ("dims", "types", "values"))
    if not all(isinstance(each, list) for each in (dims, types, values)) or not all(map(_is_shape, dims)):
        return {}
    return {**kept, "types": [_clean(str(kind), str) for kind in types]}


def _is_size(value: Any) -> bool:
    """Whether a value is a number, or a list of whole numbers such as a grid."""
    return isinstance(value, int | float) or (isinstance(value, list) and all(isinstance(size, int) for size in value))


def _is_shape(value: Any) -> bool:
    """Whether a value is a tensor's shape, or a list of shapes for an argument that is a list of tensors."""
    if not isinstance(value, list):
        return False
    if all(isinstance(size, int) and 0 <= size < MAX_ELEMENTS for size in value):
        return math.prod(value) < MAX_ELEMENTS
    return all(isinstance(shape, list) and _is_shape(shape) for shape in value)


def _clean(text: str, mask: Callable[[str], str]) -> str:
    """Returns a masked text without control characters, and without lone surrogates, which cannot be written to a file."""
    return mask(plain(text)).encode("utf-8", "replace").decode()
