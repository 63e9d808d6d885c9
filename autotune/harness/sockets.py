"""Finds and removes the sockets through which this process and its loader workers pass tensors.

Each socket is in a folder of the process that made it (`pymp-...`, multiprocessing.util.get_temp_dir). multiprocessing removes
the folder when that process exits normally. A process that is killed leaves the socket and the folder.
"""

from __future__ import annotations

import contextlib
import os
from typing import Iterable, List

FOLDER = "pymp-"  # prefix of multiprocessing's folders
BOUND = "/proc/net/unix"  # lists all sockets with a path: ... inode, path


def listening(pids: Iterable[int]) -> List[str]:
    """Returns the paths of multiprocessing's sockets that these processes hold; [] if the kernel does not list them."""
    paths = {}
    with contextlib.suppress(OSError), open(BOUND, errors="surrogateescape") as lines:
        for line in lines:
            words = line.rstrip("\n").split(None, 7)
            if len(words) == 8 and _folder(words[7]):
                paths[f"socket:[{words[6]}]"] = words[7]
    found = []
    for pid in pids if paths else ():
        with contextlib.suppress(OSError):  # the process has ended
            for number in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):  # it was closed
                    held = os.readlink(f"/proc/{pid}/fd/{number}")
                    if held in paths:
                        found.append(paths[held])
    return found


def remove(paths: Iterable[str]) -> None:
    """Removes sockets, and their folders if these are then empty; other processes may have sockets there."""
    for path in paths:
        with contextlib.suppress(OSError):
            os.unlink(path)
            os.rmdir(_folder(path))


def _folder(path: str) -> str:
    folder = os.path.dirname(path)
    return folder if os.path.basename(folder).startswith(FOLDER) else ""
