"""How each family of knobs is set in the process and read back; joined to the tuner's side by the key."""

from __future__ import annotations

import contextlib
from typing import Iterator

APPLYING = "autotune_knob"  # attribute of an exception


@contextlib.contextmanager
def applying(key: str) -> Iterator[None]:
    """Names the knob in whatever is raised while it is set: the search need not guess which of several it was."""
    try:
        yield
    except Exception as error:
        with contextlib.suppress(Exception):
            setattr(error, APPLYING, key)
        raise
