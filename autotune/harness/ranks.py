"""Measures what communication costs the ranks of a trial; runs after the window so as not to disturb it.

Exposed communication is the time that a step waits for collectives: from the end of the backward pass's own computation to the
end of the last all-reduce. On the CPU, the broadcast of buffers before the forward pass is added. The wait after the backward
pass comes from the timers of DistributedDataParallel (events on a GPU, the clock on the CPU), which run for every hundredth
step anyway. If a program averages gradients more than once in a step, only the last backward pass counts. Bandwidth comes from
an all-reduce of as many bytes as the gradients have, while the ranks are otherwise idle. Without DistributedDataParallel,
neither exposed communication nor bandwidth is known.
"""

from __future__ import annotations

import datetime
import time
from typing import Any, Dict, List, Optional

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as Wrapped

from . import members
from .knobs.parallel import ParallelKnobs
from .patches import replace_of_object

MIN_STEPS, MAX_STEPS = 1, 6  # steps observed after the window, in addition to `num_ahead` (last_step.py)
LOOK_S = 1.0  # about how many seconds to observe if steps are short
MAX_PROBE_BYTES = 32 << 20  # largest all-reduce; beyond this, bandwidth hardly depends on the size
PROBES = 4  # number of all-reduces; the first is discarded
PROBE_S = 5.0  # timeout of each all-reduce, because a rank may have ended meanwhile


class Communication:
    """Observes the collectives of this process's DistributedDataParallel modules after `begin`."""

    def __init__(self, parallel: ParallelKnobs) -> None:
        self._parallel = parallel
        self._exposed_s: List[float] = []
        self._buffers_s = 0.0
        self._bandwidth_bytes_per_s: Optional[float] = None
        self.is_looking = False

    def num_steps(self, step_s: float) -> int:
        """Returns how many steps to observe, in addition to `num_ahead` (last_step.py); 0 without DistributedDataParallel."""
        return max(MIN_STEPS, min(MAX_STEPS, int(LOOK_S / max(step_s, 1e-9)))) if self._parallel.living else 0

    def begin(self, *, is_compiled: bool) -> None:
        """Starts the timers after the window.

        In a compiled program, the broadcast of buffers is not timed, because compiled graphs might keep the patch for it.
        """
        try:
            for wrapper in self._parallel.living:
                Wrapped._set_ddp_runtime_logging_sample_rate(wrapper, 1)  # type: ignore[no-untyped-call]
                if not is_compiled and next(members.parameters(wrapper)).device.type == "cpu":
                    self._time_buffers(wrapper)
            self.is_looking = True
        except Exception:  # a wrapper without timers (torch's reducer in Python): the cost stays unknown
            self._exposed_s = []

    def _time_buffers(self, wrapper: Any) -> None:
        def around(sync: Any) -> Any:
            def timed() -> None:
                begin_s = time.monotonic()
                sync()
                self._buffers_s += time.monotonic() - begin_s

            return timed

        replace_of_object(wrapper, "_sync_buffers", around)

    def step_done(self) -> None:
        """Records the communication of a step; called after each observed step."""
        buffers_s, self._buffers_s = self._buffers_s, 0.0
        logged: Any = Wrapped._get_ddp_logging_data
        timers: List[Dict[str, Any]] = [logged(wrapper) for wrapper in self._parallel.living]
        ns = sum(each["backward_comm_time"] - each["backward_compute_comm_overlap_time"] for each in timers if _is_timed(each))
        if any(map(_is_timed, timers)):
            self._exposed_s.append(max(0.0, ns / 1e9) + buffers_s)

    def summary(self) -> Dict[str, Any]:
        """Returns {"exposed_s", "num_steps", "gradient_bytes", "bandwidth_bytes_per_s"}; {} if nothing is known."""
        seen = self._exposed_s[1:]  # the timers report the previous step, so the first value is from before `begin`
        if not seen:
            return {}
        return {
            "exposed_s": sum(seen) / len(seen),
            "num_steps": len(seen),
            "gradient_bytes": self._gradient_bytes(),
            "bandwidth_bytes_per_s": self._bandwidth_bytes_per_s,
        }

    def _gradient_bytes(self) -> int:
        compressed_bytes = self._parallel.bytes_an_element
        parameters = [p for wrapper in self._parallel.living for p in members.parameters(wrapper) if p.requires_grad]
        return sum(Tensor.numel(p) * (compressed_bytes or Tensor.element_size(p)) for p in parameters)

    def probe(self) -> bool:
        """Measures the bandwidth together with all other ranks; returns whether that was possible.

        The result must be written before this is called: if a rank has ended, the others wait here until the timeout.
        """
        if not self._exposed_s or not self._parallel.living:
            return False
        wrapper = self._parallel.living[0]
        device = next(members.parameters(wrapper)).device
        size = min(self._gradient_bytes(), MAX_PROBE_BYTES)
        seconds = []
        try:
            tensor = torch.zeros(max(1, size // 4), dtype=torch.float32, device=device)
            for _ in range(PROBES):
                begin_s = time.monotonic()
                await_end(dist.all_reduce(tensor, group=wrapper.process_group, async_op=True), device.type)
                seconds.append(time.monotonic() - begin_s)
        except RuntimeError:  # out of memory, or a rank has ended
            return False
        self._bandwidth_bytes_per_s = tensor.numel() * 4 / max(sorted(seconds[1:])[(PROBES - 1) // 2], 1e-9)
        return True


def await_end(work: Any, device_type: str) -> None:
    """Waits until a collective is done.

    Args:
        work: what torch.distributed returned for the collective.
        device_type: type of the device of the collective's tensor. On a GPU, the collective is polled, because NCCL's `wait`
            with a timeout checks only every 1 to 10 milliseconds.

    Raises:
        RuntimeError: the collective failed, or has not ended within PROBE_S.
    """
    if device_type != "cuda":
        work.wait(datetime.timedelta(seconds=PROBE_S))
        return
    until_s = time.monotonic() + PROBE_S
    while not work.is_completed():
        if time.monotonic() > until_s:
            raise RuntimeError(f"a collective has not ended within {PROBE_S:g} s")
    work.wait()


def _is_timed(timers: Dict[str, Any]) -> bool:
    return bool(timers.get("backward_comm_time", 0) > 0)
