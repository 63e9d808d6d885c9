"""Collects the rank results of one trial, and rejects the results of any other trial."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from autotune.harness import protocol
from autotune.harness.protocol import RankResult, Spec

MAX_RESULT_BYTES = 64 << 20  # ten times the size of a result with a million steps
LOOK_FILE = ".look"
_NAME = re.compile(r"result\.rank(\d{1,6})\.json")


class RankResults:
    """The results read so far from a trial's folder. A result must have the trial's number and its attempt's random `nonce`.

    Attributes:
        by_rank: rank -> its result.
    """

    def __init__(self, folder: Path, spec: Spec) -> None:
        self.by_rank: dict[int, RankResult] = {}
        self._folder, self._spec = folder, spec
        self._problems: dict[str, str] = {}
        self._seen: dict[str, tuple[int, int, int]] = {}

    @property
    def problems(self) -> list[str]:
        """Why files could not be used, one sentence per file."""
        return list(self._problems.values())

    @property
    def missing(self) -> list[int]:
        """Ranks without a result; empty before the first result, because only a result tells how many ranks there are."""
        world_size = max((result.world_size for result in self.by_rank.values()), default=0)
        return [rank for rank in range(world_size) if rank not in self.by_rank]

    @property
    def is_complete(self) -> bool:
        """Whether every rank has a result."""
        return bool(self.by_rank) and not self.missing

    def refresh(self) -> None:
        """Changes the folder: else a network file system may show results from other nodes half a minute late."""
        with contextlib.suppress(OSError):
            (self._folder / LOOK_FILE).touch()
            (self._folder / LOOK_FILE).unlink()

    def collect(self) -> None:
        """Reads the results that are new or have changed since the last call."""
        try:
            entries = [entry for entry in os.scandir(self._folder) if _NAME.fullmatch(entry.name)]
        except OSError:
            return
        for entry in entries:
            try:
                status = entry.stat()
            except OSError:
                continue
            signature = (status.st_mtime_ns, status.st_size, status.st_ino)
            if self._seen.get(entry.name) != signature:
                self._seen[entry.name] = signature
                self._take(entry.name, status.st_size)

    def _take(self, name: str, size_bytes: int) -> None:
        self._problems.pop(name, None)
        try:
            if size_bytes > MAX_RESULT_BYTES:
                raise ValueError(f"{size_bytes} bytes, more than a result can have")
            result = protocol.read_result(str(self._folder / name))
            self._check(result, name)
        except (OSError, ValueError, TypeError, AttributeError, RecursionError, MemoryError) as error:
            self._problems[name] = f"{name} cannot be used: {error or type(error).__name__}"
        else:
            self.by_rank[result.rank] = result

    def _check(self, result: RankResult, name: str) -> None:
        numbers = (result.rank, result.world_size, result.trial)
        if not all(type(number) is int for number in numbers) or not 0 <= result.rank < result.world_size <= 1_000_000:
            raise ValueError(f"rank {result.rank!r} of {result.world_size!r} is not possible")
        if name != protocol.result_file(result.rank):
            raise ValueError(f"it contains rank {result.rank}")
        if (result.trial, result.nonce) != (self._spec.trial, self._spec.nonce):
            raise ValueError(
                f"it belongs to another trial or an earlier attempt (trial {result.trial}), not to this one "
                f"(trial {self._spec.trial})"
            )
