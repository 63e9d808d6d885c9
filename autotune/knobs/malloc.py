"""Allocators of host memory: which of them this machine has, and the environment variables that make a process use one."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from autotune.harness.protocol import KEEPING

# File names of the libraries. If a folder has several, the last by name is used: libtcmalloc_minimal, not libtcmalloc.
LIBRARIES = {"jemalloc": re.compile(r"libjemalloc\.so(\.\d+)*"), "tcmalloc": re.compile(r"libtcmalloc(_minimal)?\.so(\.\d+)*")}
FOLDERS = ("/usr/lib/*-linux-gnu", "/usr/lib64", "/usr/lib", "/usr/local/lib", "/usr/local/lib64")
ANY = re.compile("|".join(f"({pattern.pattern})" for pattern in LIBRARIES.values()))

GLIBC, GLIBC_KEEP = "glibc", "glibc_keep"
FACT = "allocators"  # key among the facts of a node: what `installed_here` returns there


_on_node: list[Mapping[str, str]] = []  # what `run_on` was given; empty if trials run on this machine


def run_on(libraries: Mapping[str, str] | None) -> None:
    """Sets which allocators `installed` returns: those of the node on which trials run; None for those of this machine."""
    _on_node[:] = [] if libraries is None else [libraries]


@contextlib.contextmanager
def as_on(machine: Mapping[str, Any]) -> Iterator[None]:
    """Lets `installed` return the allocators of a study's machine within the context.

    Args:
        machine: the machine's facts. If they lack FACT, the machine is this one: only facts of a cluster's nodes contain it.
    """
    libraries, before = machine.get(FACT), list(_on_node)
    run_on(libraries if isinstance(libraries, dict) else None)
    try:
        yield
    finally:
        _on_node[:] = before


def installed() -> Mapping[str, str]:
    """Returns {allocator: path of its library} on the machine on which trials run."""
    return _on_node[0] if _on_node else installed_here()


@functools.cache
def installed_here() -> dict[str, str]:
    """Returns {allocator: path of its library}, searching the library folders of the system, conda and Python."""
    own = [Path(prefix) / "lib" for prefix in (os.environ.get("CONDA_PREFIX"), sys.prefix) if prefix]
    system = [folder for pattern in FOLDERS for folder in sorted(Path("/").glob(pattern.lstrip("/")))]
    return found_in([*system, *own])


def found_in(folders: Iterable[Path]) -> dict[str, str]:
    """Returns {allocator: path of its library}, from the first of these folders that has the library."""
    found: dict[str, str] = {}
    for folder in folders:
        try:
            names = sorted(os.listdir(folder))
        except OSError:
            continue
        for allocator, pattern in LIBRARIES.items():
            files = [name for name in names if pattern.fullmatch(name)]
            if files:
                found.setdefault(allocator, str(folder / files[-1]))
    return found


def variables_for(allocator: str, environment: Mapping[str, str], libraries: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment variables that make a process start with an allocator.

    Returns {} if the allocator is not installed, and for "glibc" if no other allocator is preloaded.

    Args:
        allocator: "jemalloc", "tcmalloc", "glibc" for the C library's own, or "glibc_keep" for the same with the variables
            `KEEPING`, so that it keeps freed memory.
        environment: the process's environment without this change; other preloaded libraries stay.
        libraries: installed allocator -> path of its library; no other allocator can be preloaded.
    """
    words = environment.get("LD_PRELOAD", "").replace(":", " ").split()
    others = [word for word in words if not ANY.fullmatch(os.path.basename(word))]
    if allocator in LIBRARIES:
        return {"LD_PRELOAD": ":".join([libraries[allocator], *others])} if allocator in libraries else {}
    unloaded = {"LD_PRELOAD": ":".join(others)} if others != words else {}
    return {**unloaded, **(KEEPING if allocator == GLIBC_KEEP else {})}
