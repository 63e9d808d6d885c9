"""Keeps messages of kineto, the library that torch.profiler uses, out of the program's log."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
import warnings
from typing import Iterator, List

CHATTER = re.compile(rb"^(\[rank\d+\]:)?(USDT:|(INFO|WARNING|ERROR|STAGE|VERBOSE)[: ]|\[W\d|\S*\s*\S*ActivityProfiler)")
REFUSED = re.compile(rb"CUPTI_ERROR_\w+")
NO_KERNELS = "GPU kernels are not known: {}"


@contextlib.contextmanager
def quiet(notes: List[str]) -> Iterator[None]:
    """Holds back standard error, then passes on all lines that are not kineto's. Notes errors of CUPTI, which records kernels.

    Also drops Python's warnings: torch 2.11 warns that its profiler forgets the events of earlier cycles.
    """
    with contextlib.suppress(Exception):  # the program may have closed it
        sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as written:
        os.dup2(written.fileno(), 2)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            written.seek(0)
            for line in written:
                if refused := REFUSED.search(line):
                    notes.append(NO_KERNELS.format(refused.group().decode()))
                elif not CHATTER.match(line):
                    os.write(2, line)
