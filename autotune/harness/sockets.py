"""Sockets at which this process and its loader workers hand tensors over, and what multiprocessing would remove of them.

Each is in a folder of its maker's (`pymp-...`, multiprocessing.util.get_temp_dir), which goes when that process ends in order.
A process that is ended at once leaves both.
"""

from __future__ import annotations

import contextlib
import os
from typing import Iterable, List

FOLDER = "pymp-"  # how the names of multiprocessing's folders begin
BOUND = "/proc/net/unix"  # every socket that has a path: ... inode, path


def listening(pids: Iterable[int]) -> List[str]:
    """Returns the paths of multiprocessing's sockets that these processes hold; none where the kernel does not tell."""
    paths = {}
    with contextlib.suppress(OSError), open(BOUND, errors="surrogateescape") as lines:
        for line in lines:
            words = line.rstrip("\n").split(None, 7)
            if len(words) == 8 and _folder(words[7]):
                paths[f"socket:[{words[6]}]"] = words[7]
    found = []
    for pid in pids if paths else ():
        with contextlib.suppress(OSError):  # it has ended
            for number in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):  # it was closed
                    held = os.readlink(f"/proc/{pid}/fd/{number}")
                    if held in paths:
                        found.append(paths[held])
    return found


def remove(paths: Iterable[str]) -> None:
    """Removes sockets, and each folder that is empty then: another process may have its own in it."""
    for path in paths:
        with contextlib.suppress(OSError):
            os.unlink(path)
            os.rmdir(_folder(path))


def _folder(path: str) -> str:
    folder = os.path.dirname(path)
    return folder if os.path.basename(folder).startswith(FOLDER) else ""
