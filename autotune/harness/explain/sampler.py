"""Samples which line of Python a thread executes, from a separate thread.

A sample counts for the time since the previous sample. So if the sampled thread holds the interpreter's lock and a sample comes
late, the sample counts for all of that time. The intervals vary, so that they do not synchronise with the program. Signals and
`faulthandler` were tried: they slow programs down, or crash them.
"""

from __future__ import annotations

import collections
import functools
import gc
import itertools
import operator
import os
import random
import sys
import threading
import time
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

from .documents import MAIN, THREAD, WORKER, Line
from .sources import HARNESS, OWN, Sources, name_of, text_of

SWITCH_S = 0.0005  # the interpreter's switch interval while sampling: running Python code delays a sample by at most this
# A thread whose innermost frame is in one of these files waits for other threads, so its time does not count.
IDLE = ("threading.py", "queue.py", "selectors.py", "connection.py", "synchronize.py", "socket.py")
MAX_LINES = 300  # lines that are returned for each of MAIN, WORKER and THREAD
# A sampler that uses more than MAX_COST of a core samples less often; its interval grows at most MAX_FACTOR-fold.
MAX_COST, MAX_FACTOR = 0.01, 2.5

Key = Tuple[str, str, Any, int]  # phase, where, code, line


class LineSampler(threading.Thread):
    """Samples the thread that starts it, at intervals. In the training process, it also samples the other threads.

    Attributes:
        num_samples: number of samples taken of the thread that started the sampler.
        cpu_s: CPU seconds that the sampler itself used.
        collected_s: seconds of garbage collections that happened to run in the sampler's thread, added by `lines.Collections`.
        phases_s: phase -> sampled seconds.

    Args:
        sources: determines whose code a frame runs.
        interval_s: mean seconds between two samples.
        phase: returns the phase that the thread is in; "" while its time does not count.
        where: MAIN or WORKER.
    """

    def __init__(self, sources: Sources, interval_s: float, phase: Callable[[], str], where: str = MAIN) -> None:
        super().__init__(name="autotune-sampler", daemon=True)
        self._sources, self._interval_s, self._phase, self._where = sources, interval_s, phase, where
        self._thread = threading.get_ident()
        self._is_over = False
        self.num_samples, self.cpu_s, self.collected_s = 0, 0.0, 0.0
        self.phases_s: Dict[str, float] = {}
        self._self_s: Dict[Key, float] = {}
        self._total_s: Dict[Key, float] = {}
        self._inner_s: Dict[Key, float] = {}  # seconds of library lines that were the innermost lines of all
        self._callees: Dict[Key, Dict[Any, float]] = {}
        self._switch_s = 0.0
        self.after_sample: Optional[Callable[[], None]] = None

    def start(self) -> None:
        """Starts to sample the calling thread."""
        self._switch_s = sys.getswitchinterval()
        sys.setswitchinterval(min(SWITCH_S, self._switch_s))
        super().start()

    def stop(self) -> None:
        """Stops sampling; called once, by the thread that is sampled."""
        self._is_over = True
        self.join()
        sys.setswitchinterval(self._switch_s)

    def run(self) -> None:
        """Samples until `stop` is called."""
        draw, clock, interval_s = random.Random(0).uniform, time.perf_counter, self._interval_s
        last_s = began_s = clock()
        while not self._is_over:
            time.sleep(draw(0.5, 1.5) * interval_s)
            now_s = clock()
            phase = self._phase()
            if phase:
                self._sample(phase, now_s - last_s)
            last_s = now_s
            self.cpu_s = time.thread_time() - self.collected_s
            if self.cpu_s > MAX_COST * (now_s - began_s):  # for example because system calls are slow
                interval_s = min(1.1 * interval_s, MAX_FACTOR * self._interval_s)
            if self.after_sample is not None:
                self.after_sample()

    # --- one sample ---

    def _sample(self, phase: str, elapsed_s: float) -> None:
        self.num_samples += 1
        self.phases_s[phase] = self.phases_s.get(phase, 0.0) + elapsed_s
        for thread in threads() if self._where == MAIN else [self._thread]:
            if thread == self.ident:
                continue
            stack = stack_of(thread)
            if thread == self._thread:
                self._note(stack, phase, self._where, elapsed_s)
            elif stack and os.path.basename(stack[0][0].co_filename) not in IDLE:
                self._note(stack, phase, THREAD, elapsed_s)

    def _note(self, stack: List[Tuple[Any, Optional[int]]], phase: str, where: str, elapsed_s: float) -> None:
        kinds, kind_of = self._sources.kinds, self._sources.kind
        inner = own = None
        known = set()
        for code, number in stack:
            line = number or code.co_firstlineno  # frames that torch.compile has made may have no line
            kind = kinds.get(code) or kind_of(code)
            if kind is HARNESS:
                continue
            if inner is None:
                inner = (phase, where, code, line)
            if kind is OWN:
                key = (phase, where, code, line)
                own = own or key
                known.add(key)
        for key in known:
            self._total_s[key] = self._total_s.get(key, 0.0) + elapsed_s
        if own is not None:
            self._self_s[own] = self._self_s.get(own, 0.0) + elapsed_s
        if inner is None or where == THREAD or (own is not None and own[2] is inner[2]):
            return
        self._inner_s[inner] = self._inner_s.get(inner, 0.0) + elapsed_s
        if own is not None:
            callees = self._callees.setdefault(own, {})
            callees[inner[2]] = callees.get(inner[2], 0.0) + elapsed_s

    # --- result ---

    def lines(self, num_steps: float, scale: Optional[Dict[str, float]] = None) -> List[Line]:
        """Returns the lines, those with the most seconds first: at most MAX_LINES for each of MAIN, WORKER and THREAD.

        Args:
            num_steps: number of steps by which the seconds are divided.
            scale: phase -> factor by which the sampled seconds are multiplied, to agree with those of the clock.
        """
        scale = scale or {}

        def made(key: Key, self_s: float, total_s: float, *, is_own: bool) -> Line:
            phase, where, code, number = key
            factor = scale.get(phase, 1.0) / num_steps
            file = code.co_filename if code.co_filename.startswith("<") else os.path.abspath(code.co_filename)
            callees = self._callees.get(key, {}) if is_own else {}
            most = max(callees, key=lambda each: callees[each], default=None)
            is_itself = 2 * sum(callees.values()) < self_s
            callee = "" if most is None or is_itself else f"{os.path.basename(most.co_filename)}:{name_of(most)}"
            text = text_of(file, number)
            return Line(file, number, name_of(code), text, phase, where, is_own, self_s * factor, total_s * factor, callee)

        own = [made(key, self._self_s.get(key, 0.0), total_s, is_own=True) for key, total_s in list(self._total_s.items())]
        own += [made(key, self_s, self_s, is_own=False) for key, self_s in list(self._inner_s.items())]
        return most_of_each(own)


def most_of_each(lines: List[Line]) -> List[Line]:
    """Returns at most MAX_LINES lines of each `where`, sorted by seconds. If there are more, it drops library lines first."""
    found: List[Line] = []
    for where in (MAIN, WORKER, THREAD):
        here = sorted((line for line in lines if line.where == where), key=lambda line: (-line.self_s, -line.total_s))
        found += sorted(here, key=lambda line: not line.is_own)[:MAX_LINES]
    return sorted(found, key=lambda line: -line.self_s)


def stack_of(thread: int) -> List[Tuple[Any, Optional[int]]]:
    """Returns (code, line) of a thread's frames, innermost first; [] if the thread has ended. A line may be unknown."""
    stack: List[Tuple[Any, Optional[int]]] = []
    innermost = map(operator.methodcaller("get", thread), _frames())
    frames = itertools.accumulate(itertools.chain(innermost, itertools.repeat("f_back")), getattr)
    _undisturbed(map(stack.append, map(_PLACE, itertools.takewhile(_IS_FRAME, frames))))
    return stack


def threads() -> List[int]:
    """Returns the threads that run Python code."""
    found: List[int] = []
    _undisturbed(map(found.extend, _frames()))
    return found


def _frames() -> Iterator[Dict[int, Any]]:
    """Yields once: thread -> its innermost frame."""
    return itertools.islice(iter(sys._current_frames, None), 1)


def _undisturbed(looking: Iterator[Any]) -> None:
    """Consumes an iterator that reads other threads' frames, in one call of C code, during which no other thread runs.

    If a thread continued while its frames are read, freed memory would be read, and the process might crash. So all steps must
    be functions written in C. The garbage collector must be off, because until Python 3.11 it may run Python code whenever
    memory is allocated. It is turned off and on within the same call, because another thread might change it in between.
    """
    restore: List[Callable[[], None]] = []
    was_on = map(_CALL, (gc.isenabled,))
    steps = (map(restore.append, map(_RESTORING.__getitem__, was_on)), map(_CALL, (gc.disable,)), looking, map(_CALL, restore))
    collections.deque(itertools.chain.from_iterable(steps), maxlen=0)


_PLACE = operator.attrgetter("f_code", "f_lineno")
_IS_FRAME = functools.partial(operator.is_not, None)
_CALL = operator.methodcaller("__call__")
_RESTORING = (gc.disable, gc.enable)  # `gc.isenabled()` is the index of the function that restores this state
