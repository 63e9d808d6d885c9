"""Reads a trace of torch.profiler (Chrome's format as Kineto writes it) into compact columns.

The file is decompressed and parsed event by event. So memory does not grow with the size of the file, but with the number of
events that are kept (about 150 bytes each) and of different names and shapes. The format is defined by pytorch/kineto,
libkineto/src/output_json.cpp.
"""

from __future__ import annotations

import codecs
import gzip
import json
import marshal
import math
import zlib
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from autotune.errors import Unreadable
from autotune.explain.intervals import Floats, Ints, Mask
from autotune.plain_text import plain

# Limits, so that a damaged or huge file cannot use up the memory.
MAX_EVENTS = 2_000_000  # events that are kept; a pass profiles at most 200,000
MAX_TEXT_BYTES = 4 << 30  # bytes of the decompressed file
MAX_VALUE_CHARS = 32 << 20  # characters of one event
MAX_INTERNED_BYTES = 128 << 20  # bytes of all different names, and likewise of all different shapes
MAX_NAME_CHARS = 2_000  # characters of a name; the longest C++ kernel names seen had 1,500
BLOCK_BYTES = 1 << 20
MAX_ELEMENTS = 1 << 62  # of a tensor

OPERATOR, ANNOTATION, RUNTIME, KERNEL, COPY, SET = range(6)
_CATEGORIES = {
    "cpu_op": OPERATOR, "Operator": OPERATOR, "user_annotation": ANNOTATION, "cuda_runtime": RUNTIME, "Runtime": RUNTIME,
    "cuda_driver": RUNTIME, "kernel": KERNEL, "Kernel": KERNEL, "gpu_memcpy": COPY, "Memcpy": COPY, "gpu_memset": SET,
    "Memset": SET,
}  # fmt: skip
HOST = (OPERATOR, ANNOTATION, RUNTIME)
DEVICE = (KERNEL, COPY, SET)
STEP = "ProfilerStep#"
_WITH_VALUES = ("conv", "attention")  # operators whose FLOPs depend on more than shapes: strides, groups, causal or not
_AUTOGRAD = "autograd::engine::evaluate_function"


@dataclass(kw_only=True)
class Trace:
    """One rank's events, sorted by start and then longest first. All columns have the same length.

    Attributes:
        starts_s, ends_s: seconds since the first event.
        categories: OPERATOR, ANNOTATION, ...
        names: index into `texts`.
        threads: index into `lanes`; for device events the lane is (device, stream).
        correlations: number that a runtime call shares with the device event that it caused; -1 for events without one.
        details: index into `arguments`; -1 for events without arguments.
        texts: the different names, masked.
        lanes: the different (process, thread) pairs, as texts.
        arguments: the different arguments of events: {"dims", "types", "values"} of operators, {"registers", "shared_bytes",
            "grid", "block", "occupancy_percent"} of kernels, {"bytes"} of copies.
        device_name: name of the first device; "" on the CPU.
        num_events: number of events of all kinds in the file; `num_skipped` of them had no usable name or time.
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
    num_events: int = 0
    num_skipped: int = 0
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
        """Returns which events have a name that `accept` accepts; it is called once for each different name."""
        accepted = np.array([bool(accept(text)) for text in self.texts], dtype=bool)
        return accepted[self.names] if len(self) else np.zeros(0, dtype=bool)

    @property
    def has_device(self) -> bool:
        """Whether anything ran on a GPU."""
        return bool(self.is_of(*DEVICE).any())

    @property
    def main_thread(self) -> int:
        """Lane of the training thread: the one with the steps' ranges, else with the most operators; -1 in an empty trace."""
        steps = self.is_of(ANNOTATION) & self.is_named(lambda name: name.startswith(STEP))
        candidates = self.threads[steps] if steps.any() else self.threads[self.is_of(OPERATOR)]
        return int(np.bincount(candidates).argmax()) if len(candidates) else -1

    def autograd_threads(self) -> list[int]:
        """Returns the lanes, other than the training thread, that run the backward pass."""
        engine = self.is_of(OPERATOR) & self.is_named(lambda name: name.startswith(_AUTOGRAD))
        return [int(lane) for lane in np.unique(self.threads[engine]) if lane != self.main_thread]

    def steps(self) -> Floats:
        """Returns start and end of each step, shape (steps, 2); empty if the trace has no ranges of steps."""
        found = self.is_of(ANNOTATION) & self.is_named(lambda name: name.startswith(STEP))
        return np.column_stack((self.starts_s[found], self.ends_s[found]))


def read_trace(path: Path, mask: Callable[[str], str] = str) -> Trace:
    """Returns a trace.

    Args:
        path: the JSON file, which may be compressed by gzip.
        mask: removes secrets from names.

    Raises:
        Unreadable: the file does not exist, is cut short or damaged, is not JSON or no trace, or exceeds the limits above.
    """
    columns = _Columns()
    try:
        with path.open("rb") as raw:
            is_compressed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            text = _Text(gzip.GzipFile(fileobj=raw) if is_compressed else raw)  # type: ignore[arg-type]
            _read_document(text, columns)
        return columns.as_trace(mask)
    except FileNotFoundError:
        raise Unreadable(f"{path.name}: not there") from None
    except EOFError:
        raise Unreadable(f"{path.name}: cut short after {columns.num_events:,} events") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise Unreadable(f"{path.name}: damaged after {columns.num_events:,} events: {error}") from None
    except RecursionError:
        raise Unreadable(f"{path.name}: not a trace: nested too deeply") from None
    except (OSError, ValueError) as error:
        raise Unreadable(f"{path.name}: {error}") from None


# Parsing -------------------------------------------------------------------------------------------------------------------


class _Text:
    """Text of a JSON document, read block by block; `value` parses the next value of it."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw, self._decode = raw, codecs.getincrementaldecoder("utf-8")("replace").decode
        self._scan = json.JSONDecoder(strict=False).raw_decode
        self._buffer, self._at, self._num_bytes, self._is_over = "", 0, 0, False

    def next(self) -> str:
        """Returns the next character that is not blank, without consuming it.

        Raises:
            EOFError: there is none.
        """
        while True:
            buffer, at, end = self._buffer, self._at, len(self._buffer)
            while at < end and buffer[at] in " \t\r\n":
                at += 1
            self._at = at
            if at < end:
                return buffer[at]
            if not self._read():
                raise EOFError

    def skip(self, allowed: str) -> str:
        """Consumes and returns the next character, one of `allowed`.

        Raises:
            ValueError: the next character is another one.
        """
        found = self.next()
        if found not in allowed:
            raise ValueError(f"not JSON: {found!r} where {' or '.join(map(repr, allowed))} should be")
        self._at += 1
        return found

    def value(self) -> Any:
        """Returns the next value.

        Raises:
            EOFError: the text ends within it.
            ValueError: it is not JSON, or longer than MAX_VALUE_CHARS.
        """
        self.next()
        while True:
            problem = ""
            try:
                value, end = self._scan(self._buffer, self._at)
                if end < len(self._buffer) or self._is_over:  # at the end of a block, "12" may be the start of "123"
                    self._at = end
                    return value
            except json.JSONDecodeError as error:
                problem, is_cut = error.msg, error.msg.startswith("Unterminated") or self._is_at_end(error.pos)
            if not self._read() and problem:
                raise EOFError if is_cut else ValueError(f"not JSON: {problem}")

    def _is_at_end(self, at: int) -> bool:
        return at >= len(self._buffer.rstrip()) - len("fals")

    def _read(self) -> bool:
        """Appends another block; False at the end of the file."""
        if len(self._buffer) - self._at > MAX_VALUE_CHARS:
            raise ValueError(f"not a trace: no event ends within {MAX_VALUE_CHARS >> 20} MiB")
        if self._is_over:
            return False
        block = self._raw.read(BLOCK_BYTES)
        self._num_bytes += len(block)
        if self._num_bytes > MAX_TEXT_BYTES:
            raise ValueError(f"larger than {MAX_TEXT_BYTES >> 30} GiB; profile fewer steps")
        self._buffer, self._at = self._buffer[self._at :] + self._decode(block, not block), 0
        self._is_over = not block
        return not self._is_over


def _read_document(text: _Text, columns: _Columns) -> None:
    """Reads {"traceEvents": [...], ...} or the bare list of events."""
    if text.next() == "[":
        _read_events(text, columns)
        return
    text.skip("{")
    has_events = False
    while text.next() != "}":
        key = text.value()
        text.skip(":")
        if key == "traceEvents":
            _read_events(text, columns)
            has_events = True
        else:
            columns.add_property(key, text.value())
        if text.next() == ",":
            text.skip(",")
    if not has_events:
        raise ValueError("not a trace: it has no traceEvents")


def _read_events(text: _Text, columns: _Columns) -> None:
    text.skip("[")
    while text.next() != "]":
        columns.add(text.value())
        if text.next() != "]":
            text.skip(",")
    text.skip("]")


# Columns -------------------------------------------------------------------------------------------------------------------


class _Interned:
    """Gives equal values the same number. Once MAX_INTERNED_BYTES are used, new values get -1."""

    def __init__(self) -> None:
        self.numbers: dict[Any, int] = {}
        self._num_bytes = 0
        self.is_full = False

    def number(self, value: str | bytes) -> int:
        found = self.numbers.get(value)
        if found is not None:
            return found
        self._num_bytes += len(value) + 100  # about 100 bytes for the dictionary's own entry
        if self._num_bytes > MAX_INTERNED_BYTES:
            self.is_full = True
            return -1
        return self.numbers.setdefault(value, len(self.numbers))


class _Columns:
    """Collects the columns of a trace."""

    def __init__(self) -> None:
        self.starts, self.durations = array("d"), array("d")
        self.categories, self.names, self.threads, self.details = array("b"), array("i"), array("i"), array("i")
        self.correlations = array("q")
        self.texts, self.arguments = _Interned(), _Interned()
        self.lanes: dict[tuple[str, str], int] = {}
        self.device_name = ""
        self.num_events = self.num_skipped = 0

    def add_property(self, key: Any, value: Any) -> None:
        """Takes a property of the whole trace."""
        if key == "deviceProperties" and isinstance(value, list) and value and isinstance(value[0], dict):
            self.device_name = str(value[0].get("name", ""))

    def add(self, event: Any) -> None:
        """Takes an event if it is of a known category; raises ValueError if there are too many."""
        self.num_events += 1
        if not isinstance(event, dict):
            self.num_skipped += 1
            return
        category = _CATEGORIES.get(str(event.get("cat", "")), -1) if event.get("ph") == "X" else -1
        if category < 0:
            return
        try:
            self._append(category, event)
        except (TypeError, ValueError, OverflowError, KeyError, AttributeError):
            self.num_skipped += 1
        if len(self.starts) > MAX_EVENTS:
            raise ValueError(f"more than {MAX_EVENTS:,} events; profile fewer steps")

    def _append(self, category: int, event: dict[str, Any]) -> None:
        start, duration, name = float(event["ts"]), float(event["dur"]), str(event["name"])
        if not (math.isfinite(start) and 0 <= duration < math.inf):
            raise ValueError
        arguments = event.get("args") or {}
        correlation = arguments.get("correlation", -1)
        correlation = correlation if isinstance(correlation, int) and 0 <= correlation < 2**63 else -1
        kept = _kept_arguments(category, name, arguments)
        lane = (str(event.get("pid", "")), str(event.get("tid", "")))
        name_number = self.texts.number(name[:MAX_NAME_CHARS])
        if name_number < 0:
            raise ValueError
        self.names.append(name_number)
        self.details.append(self.arguments.number(marshal.dumps(kept, 2)) if kept else -1)
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
            texts=[_clean(text, mask) for text in self.texts.numbers],
            lanes=[(_clean(process, mask), _clean(thread, mask)) for process, thread in self.lanes],
            arguments=[_usable(marshal.loads(kept)) for kept in self.arguments.numbers],
            device_name=_clean(self.device_name, mask),
            num_events=self.num_events,
            num_skipped=self.num_skipped,
            notes=self._notes(),
        )

    def _notes(self) -> list[str]:
        notes = []
        if self.num_skipped:
            notes.append(f"{self.num_skipped:,} of {self.num_events:,} events have no usable name or time and are left out")
        if self.arguments.is_full:
            notes.append("there are too many different shapes; those of later operators are left out")
        return notes


def _kept_arguments(category: int, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    if category == OPERATOR:
        return _shapes(name, arguments)
    if category == KERNEL:
        found = {kept: arguments.get(written) for kept, written in _LAUNCH.items()}
        return {key: value for key, value in found.items() if value is not None}
    if category in (COPY, SET):
        return {"bytes": arguments["bytes"]} if "bytes" in arguments else {}
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
    """Returns an event's arguments without those that are not as the profiler writes them."""
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
    """Whether a value is a tensor's shape, or a list of shapes: the argument is a list of tensors then."""
    if not isinstance(value, list):
        return False
    if all(isinstance(size, int) and 0 <= size < MAX_ELEMENTS for size in value):
        return math.prod(value) < MAX_ELEMENTS
    return all(isinstance(shape, list) and _is_shape(shape) for shape in value)


def _clean(text: str, mask: Callable[[str], str]) -> str:
    """Returns a masked text without control characters, and without lone surrogates, which cannot be written to a file."""
    return mask(plain(text)).encode("utf-8", "replace").decode()
