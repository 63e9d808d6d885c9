"""Keeps the first results of a loader's stage and uses them again, also in workers that start later.

To measure what a stage costs, a trial skips it and uses its first results again (skipping.py). A program with short epochs
starts new workers every few steps. A worker that had to make these results itself would run the stage most of the time. So a
worker writes its results to a file when it ends, and the next workers begin with them.
"""

from __future__ import annotations

import contextlib
import copy
import glob
import io
import math
import os
import pickle
from collections.abc import MutableMapping
from typing import Any, Dict, Iterator, List, Tuple

KEPT = 16  # results of a stage that are kept in each process
KEPT_BYTES = 256 << 20  # once the results of a stage take this much memory, no more of them are kept
LEFT_BYTES = 64 << 20  # a worker saves at most this much for later workers
SENT_BYTES = KEPT_BYTES  # at most this much is sent to a worker that is not forked

# Identifies the same stage in all workers of a loader: its name, what else its results depend on, and how many such stages
# began earlier in the same worker. ("collate", 32, 0) is the first stage in a worker that collates 32 samples.
Place = Tuple[Any, ...]


class Again:
    """The first results of a stage, returned again one after the other once there are enough of them.

    Attributes:
        stage: the function or data set that makes the results. It is kept alive, because its `id` identifies its results.
        kind: what `kind_of` returns for `stage`.
        num_bytes: memory that the results take, as far as it is known.

    Args:
        stage: see above.
        most, most_bytes, most_s: no more results are kept once there are `most` results, they take `most_bytes` of memory, or
            making them took `most_s` seconds.
        least: this many results are kept even beyond these limits.
    """

    def __init__(
        self, stage: Any, most: int = KEPT, *, most_bytes: int = KEPT_BYTES, most_s: float = math.inf, least: int = 1
    ) -> None:
        self.stage, self.kind = stage, kind_of(stage)
        self._most, self._most_bytes, self._most_s, self._least = most, most_bytes, most_s, least
        self._results: List[Any] = []
        self.num_bytes = self._turn = self._num_before = 0
        self._seconds = 0.0

    @property
    def is_full(self) -> bool:
        """Whether no more results are to be kept."""
        num = len(self._results)
        is_enough = num >= self._most or self.num_bytes >= self._most_bytes or self._seconds >= self._most_s
        return num >= self._least and is_enough

    def keep(self, result: Any, seconds: float = 0.0) -> Any:
        """Keeps a result, which took some seconds to make, and returns it."""
        self._results.append(result)
        self.num_bytes += num_bytes_of(result)
        self._seconds += seconds
        return result

    def next(self) -> Any:
        """Returns the kept results in order, and starts over after the last.

        If the stage makes an image and a mask in turn, the results still alternate between images and masks.
        """
        result = self._results[self._turn % len(self._results)]
        self._turn += 1
        return result

    def new(self) -> List[Any]:
        """Returns the results that were made in this process, not taken over from another one."""
        return self._results[self._num_before :]

    def taken_over(self, stage: Any) -> Again:
        """Returns these results for the same stage in another process."""
        other = copy.copy(self)
        other.stage, other._results, other._num_before = stage, list(self._results), len(self._results)
        return other

    def __getstate__(self) -> Dict[str, Any]:
        return {**vars(self), "stage": None}  # a worker that is not forked makes its own stage


def kind_of(stage: Any) -> str:
    """Returns the name of a function or of an object's class; for a tuple, the names of all its items."""
    if type(stage) is tuple:
        return ", ".join(map(kind_of, stage))
    named = stage if hasattr(stage, "__qualname__") else type(stage)
    return f"{getattr(named, '__module__', '')}.{named.__qualname__}"


class Pixels:
    """The decoded pixels of a PIL image."""

    def __init__(self, image: Any) -> None:
        self.mode, self.size, self._im = image.mode, image.size, image.im

    def put_into(self, image: Any) -> None:
        """Puts these pixels into another image of the same mode, as if that image had been decoded."""
        image.tile, image.im, image._size = [], self._im, self.size
        image.readonly = 1  # PIL copies the pixels before it writes into the image

    def __reduce__(self) -> Any:
        from PIL import Image

        whole = Image.new(self.mode, (0, 0))
        whole.im, whole._size = self._im, self.size
        return _pixels, (self.mode, self.size, whole.tobytes())


def _pixels(mode: str, size: Tuple[int, int], raw: bytes) -> Pixels:
    from PIL import Image

    return Pixels(Image.frombytes(mode, size, raw))


class Known(Dict[Place, Again]):
    """Results that workers begin with.

    A forked worker inherits them. To any other worker, they are sent as plain bytes. If they were sent as tensors, each tensor
    would be moved to shared memory, which is small in a container. Each tensor would also need an open file, and a fork server
    passes on fewer than 256 open files.
    """

    def __reduce__(self) -> Any:
        return _unpacked, (dict(_packed(self, SENT_BYTES)),)


def _unpacked(known: Dict[Place, bytes]) -> Known:
    found = Known()
    for place, raw in known.items():
        with contextlib.suppress(Exception):  # the result's class cannot be unpickled here
            found[place] = pickle.loads(raw)
    return found


class Left:
    """Collects, in the training process, the results that the workers of one loader have saved so far.

    Args:
        prefix: the beginning of the paths of the files in which workers save results; the folder must exist.
    """

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.known = Known()

    def read(self) -> Known:
        """Returns the results that later workers can begin with, and removes the files."""
        for path in glob.glob(f"{glob.escape(self.prefix)}.*"):
            with contextlib.suppress(Exception), open(path, "rb") as file:  # the file may be incomplete
                for place, raw in pickle.load(file).items():
                    self._add(place, raw)
            with contextlib.suppress(OSError):
                os.remove(path)
        return self.known

    def _add(self, place: Place, raw: bytes) -> None:
        with contextlib.suppress(Exception):  # the result's class cannot be unpickled here
            other = pickle.loads(raw)
            again = self.known.setdefault(place, other)
            if again is other or again.kind != other.kind:
                return
            for result in other.new():
                if not again.is_full:
                    again.keep(result)


def leave(prefix: str, known: Dict[Place, Again]) -> None:
    """Saves this worker's new results for later workers, except those that cannot be pickled."""
    written = dict(_packed({place: again for place, again in known.items() if again.new()}, LEFT_BYTES))
    with contextlib.suppress(OSError):  # the trial is over, or the disk is full
        if written:
            with open(os.open(f"{prefix}.{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                pickle.dump(written, file)


def _packed(known: Dict[Place, Again], most: int) -> Iterator[Tuple[Place, bytes]]:
    """Yields the results that can be pickled, in at most `most` bytes in total."""
    left = most
    for place, again in known.items():
        with contextlib.suppress(Exception):  # too large, or raised by the program's classes
            buffer = _Buffer(left)
            _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(again)
            left -= buffer.tell()
            yield place, buffer.getvalue()


class _Buffer(io.BytesIO):
    """A file in memory that raises when it gets too large."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def write(self, data: Any) -> int:
        if self.tell() + memoryview(data).nbytes > self._most:
            raise OverflowError
        return super().write(data)


class _Pickler(pickle.Pickler):
    """Pickles a tensor without the rest of its storage: a sample may be a row of a tensor that holds the whole data set."""

    def reducer_override(self, value: Any) -> Any:
        from torch import Tensor, contiguous_format

        if isinstance(value, Tensor) and value.untyped_storage().nbytes() > value.nbytes:
            own: Any = value.clone(memory_format=contiguous_format)
            return own.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented


def copied(batch: Any) -> Any:
    """Returns a copy of a batch and of its tensors. Copying them takes no longer than the collating that is skipped."""
    if hasattr(batch, "clone"):
        return batch.clone()
    if isinstance(batch, MutableMapping):
        made = copy.copy(batch)
        for key, each in batch.items():
            made[key] = copied(each)
        return made
    if type(batch) in (list, tuple):
        return type(batch)(copied(each) for each in batch)
    if isinstance(batch, tuple) and hasattr(batch, "_make"):
        return batch._make(copied(each) for each in batch)
    return batch


def apart(result: Any) -> Any:
    """Returns a result with copies of its lists and dictionaries, but the same items. The program may change the copies."""
    if isinstance(result, MutableMapping):
        made = copy.copy(result)
        for key, each in result.items():
            if isinstance(each, (list, MutableMapping)):
                made[key] = apart(each)
        return made
    if type(result) is list:
        return [apart(each) for each in result] if result and isinstance(result[0], (list, MutableMapping)) else list(result)
    return tuple(apart(each) for each in result) if type(result) is tuple else result


def num_bytes_of(result: Any) -> int:
    """Returns roughly how many bytes of memory a result takes; 0 if unknown."""
    if isinstance(result, Pixels):
        return int(result.size[0] * result.size[1] * 4)
    if isinstance(result, dict):
        return sum(map(num_bytes_of, result.values()))
    if isinstance(result, (list, tuple)):
        return sum(map(num_bytes_of, result))
    size: Any = getattr(result, "nbytes", None)  # of tensors and arrays
    if isinstance(size, int):
        return size
    extent: Any = getattr(result, "size", None)  # of an image
    return extent[0] * extent[1] * 4 if isinstance(extent, tuple) and len(extent) == 2 else 0
