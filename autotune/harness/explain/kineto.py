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
    with contextlib.suppress(Exception):  # the program may have closed its stderr
        sys.stderr.flush()
    with contextlib.ExitStack() as held:
        try:
            kept = os.dup(2)
            held.callback(os.close, kept)
            written = held.enter_context(tempfile.TemporaryFile())
        except OSError:  # the program has closed its stderr, or there is no temporary folder: nothing is held back
            yield
            return
        os.dup2(written.fileno(), 2)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        finally:
            os.dup2(kept, 2)
            written.seek(0)
            for line in written:
                if refused := REFUSED.search(line):
                    notes.append(NO_KERNELS.format(refused.group().decode()))
                elif not CHATTER.match(line):
                    os.write(2, line)
