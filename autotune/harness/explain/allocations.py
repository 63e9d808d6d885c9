"""Follows the allocator for two steps: finds the highest sum of live allocations and, on a GPU, lists these allocations."""

from __future__ import annotations

import contextlib
import os
from typing import Any, Dict, List, Optional, Tuple

import torch
from torch.profiler import ProfilerAction, ProfilerActivity

from ..knobs import memory
from .kineto import quiet
from .sources import LIBRARY, OWN, Sources

MAX_ENTRIES = 200_000  # entries that the CUDA allocator keeps in its history; later ones take the place of the first ones
MAX_POINTS, MAX_ROWS = 500, 50  # points of the timeline, rows of the table of allocations at the peak
EARLIER, UNSEEN = "allocated before the observed steps", "no Python code, as in a backward pass"
# Actions of a trace that change the bytes allocated or reserved.
INSIDE = ("alloc", "free_completed", "segment_alloc", "segment_map", "segment_free", "segment_unmap")


class Allocations:
    """Records of an allocator.

    Attributes:
        peak_bytes: the highest sum of live allocations. On the CPU it is the peak of the second step and counts only what was
            allocated since the first step began, so parameters and optimizer state are not included.
        timeline, at_peak, fragmentation_frac, notes: as in `documents.Memory`.
        num_retries: the value of `documents.Memory.alloc_retries`.
    """

    def __init__(self) -> None:
        self.peak_bytes = 0
        self.timeline: List[List[float]] = []
        self.at_peak: List[Dict[str, Any]] = []
        self.fragmentation_frac: Optional[float] = None
        self.num_retries: Optional[int] = None
        self.notes: List[str] = []

    def begin(self) -> None:
        """Called as the first step begins."""

    def begin_second(self) -> None:
        """Called as the second step begins."""

    def end(self) -> None:
        """Called when the second step has ended; may be called again."""


class HostAllocations(Allocations):
    """Records of the CPU allocator, from the profiler."""

    def __init__(self) -> None:
        super().__init__()
        self._profiler: Any = None

    def begin(self) -> None:
        """See the base class."""
        earlier, activities = [torch.empty(1)], [ProfilerActivity.CPU]
        with quiet(self.notes):
            self._profiler = torch.profiler.profile(
                activities=activities, profile_memory=True, schedule=lambda _: ProfilerAction.RECORD
            )
            self._profiler.start()
            # torch warns once if memory that was allocated before the profiler began is freed. So some is freed here, where
            # `quiet` hides the warning.
            earlier.clear()

    def begin_second(self) -> None:
        """See the base class."""
        self._profiler.step()

    def end(self) -> None:
        """See the base class."""
        if self._profiler is None:
            return
        profiler, self._profiler = self._profiler, None
        with quiet(self.notes):
            profiler.stop()
        events = profiler.profiler.kineto_results.events()
        second_ns = next((each.start_ns() for each in events if each.name() == "ProfilerStep#1"), None)
        sizes = sorted((each.start_ns(), each.nbytes()) for each in events if each.name() == "[memory]")
        now = 0
        for moment_ns, size in sizes:
            now += size
            if second_ns is not None and moment_ns >= second_ns:
                self.peak_bytes = max(self.peak_bytes, now)


class DeviceAllocations(Allocations):
    """Records of CUDA's allocator, from its own history."""

    def __init__(self, index: Optional[int] = None) -> None:
        super().__init__()
        self._index = index
        self._retries_before = 0
        self._is_over = False

    def begin(self) -> None:
        """See the base class."""
        torch.cuda.synchronize(self._index)
        torch.cuda.reset_peak_memory_stats(self._index)
        self._retries_before = self._num_retries()
        try:
            torch.cuda.memory._record_memory_history(max_entries=MAX_ENTRIES, stacks="python")
        except Exception as error:  # for example, another allocator is in use
            self.notes.append(f"allocations at the peak are not known: {type(error).__name__}: {error}")

    def end(self) -> None:
        """See the base class."""
        if self._is_over:
            return
        self._is_over = True
        torch.cuda.synchronize(self._index)
        allocated, reserved = torch.cuda.memory_allocated(self._index), torch.cuda.memory_reserved(self._index)
        self.peak_bytes = int(torch.cuda.max_memory_allocated(self._index))
        self.num_retries = self._num_retries() - self._retries_before
        with contextlib.suppress(Exception):
            snapshot = torch.cuda.memory._snapshot()
            torch.cuda.memory._record_memory_history(enabled=None)
            traces = snapshot["device_traces"]
            device = torch.cuda.current_device() if self._index is None else self._index
            if device < len(traces) and traces[device]:
                self._reduce(traces[device], allocated, reserved)

    def _num_retries(self) -> int:
        return int(torch.cuda.memory_stats(self._index).get("num_alloc_retries", 0))

    def _reduce(self, entries: List[Dict[str, Any]], allocated: int, reserved: int) -> None:
        """Replays a trace. Its first entries may be lost, so the bytes at its end are given: `allocated` and `reserved`."""
        changes = [_change(entry) for entry in entries]
        history = History(allocated - sum(each[0] for each in changes), reserved - sum(each[1] for each in changes))
        history.replay(entries)
        self.timeline, self.fragmentation_frac = history.points(), history.fragmentation_frac
        self.at_peak = history.at_peak(Sources())


class History:
    """The entries of a CUDA allocator's trace, replayed from the bytes allocated and reserved when the trace began."""

    def __init__(self, allocated: int, reserved: int) -> None:
        self._allocated, self._reserved = allocated, reserved
        self._points: List[List[float]] = []
        self._living: Dict[int, Dict[str, Any]] = {}
        self._at_peak: List[Dict[str, Any]] = []
        self._peak = (-1, 0)  # allocated, reserved
        self._is_highest = False

    def replay(self, entries: List[Dict[str, Any]]) -> None:
        """Follows the trace, whose entries are in order."""
        began_us = entries[0].get("time_us", 0)
        for entry in (each for each in entries if each["action"] in INSIDE):
            self._replay(entry)
            self._points.append([(entry.get("time_us", 0) - began_us) / 1e6, self._allocated, self._reserved])
        self._keep_if_highest()

    def _replay(self, entry: Dict[str, Any]) -> None:
        action, (allocated, reserved) = entry["action"], _change(entry)
        if action == "free_completed":
            self._keep_if_highest()
            self._living.pop(entry["addr"], None)
        self._allocated += allocated
        self._reserved += reserved
        if action == "alloc":
            self._living[entry["addr"]] = entry
            if self._allocated > self._peak[0]:
                self._peak, self._is_highest = (self._allocated, self._reserved), True

    def _keep_if_highest(self) -> None:
        if self._is_highest:
            self._is_highest, self._at_peak = False, list(self._living.values())

    def points(self) -> List[List[float]]:
        """Returns [[seconds, allocated, reserved]]: the highest point of each of at most MAX_POINTS stretches of the trace."""
        stretch = -(-len(self._points) // MAX_POINTS) or 1
        parts = [self._points[at : at + stretch] for at in range(0, len(self._points), stretch)]
        return [max(part, key=lambda point: point[1]) for part in parts]

    @property
    def fragmentation_frac(self) -> Optional[float]:
        """(reserved - allocated) / reserved at the peak; None if nothing was allocated."""
        allocated, reserved = self._peak
        return None if allocated < 0 or reserved <= 0 else max(0.0, (reserved - allocated) / reserved)

    def at_peak(self, sources: Sources) -> List[Dict[str, Any]]:
        """Returns a row for each place in the code whose allocations were live at the peak, most bytes first."""
        found: Dict[Tuple[str, int, str], List[int]] = {}
        for entry in self._at_peak:
            total = found.setdefault(_place(entry.get("frames") or [], sources), [0, 0])
            total[0] += int(entry["size"])
            total[1] += 1
        earlier = self._peak[0] - sum(total[0] for total in found.values())
        if earlier > 0:
            found[("", 0, EARLIER)] = [earlier, 0]
        rows: List[Dict[str, Any]] = [
            {"file": file, "line": line, "function": function, "bytes": size, "count": count}
            for (file, line, function), (size, count) in found.items()
        ]
        return sorted(rows, key=lambda row: -row["bytes"])[:MAX_ROWS]


def _change(entry: Dict[str, Any]) -> Tuple[int, int]:
    """Returns by how many bytes an entry of a trace changes what is allocated and what is reserved."""
    action = entry["action"]
    if action not in INSIDE:
        return 0, 0
    size = int(entry["size"])
    if action in ("alloc", "free_completed"):
        return (size if action == "alloc" else -size), 0
    return 0, (size if action in ("segment_alloc", "segment_map") else -size)


def _place(frames: List[Dict[str, Any]], sources: Sources) -> Tuple[str, int, str]:
    """Returns the place of the innermost frame in the program's own code, else in a library; UNSEEN if there is neither.

    Args:
        frames: a recorded stack, innermost frame first.
        sources: determines whose code a file contains.
    """
    known = [each for each in frames if os.path.isabs(each["filename"])]
    own = [each for each in known if sources.kind_of_file(each["filename"]) == OWN]
    others = [each for each in known if sources.kind_of_file(each["filename"]) == LIBRARY]
    first = next(iter([*own, *others]), None)
    return ("", 0, UNSEEN) if first is None else (first["filename"], int(first["line"]), str(first["name"]))


def recorder(device: str, index: Optional[int]) -> Allocations:
    """Returns the object that follows the allocator of a device; see `TrialContext` for device and index."""
    if device != "cuda":
        return HostAllocations()
    if memory.is_counted(index):
        return DeviceAllocations(index)
    unknown = Allocations()
    unknown.notes.append(f"allocations are not known: {memory.REPLACED}")
    return unknown
