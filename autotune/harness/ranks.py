"""What communication costs the ranks of a trial, measured after its window so that the window stays as it was.

Exposed communication is what a step waits for in collectives: from the end of a backward pass's own computation to the end of
the last all-reduce, as DistributedDataParallel's own timers tell it (events on a GPU, the clock on the CPU; it keeps them
for every hundredth step anyway), and on the CPU the broadcast of buffers before a forward pass. Of the last backward pass
before a step, where a program averages more than once. Bandwidth: an all-reduce of as many bytes as the gradients have, with
the ranks at rest. Not known without DistributedDataParallel.
"""

from __future__ import annotations

import datetime
import time
from typing import Any, Dict, List, Optional

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as Wrapped

from . import members
from .knobs.parallel import ParallelKnobs
from .patches import replace_of_object

MIN_STEPS, MAX_STEPS = 1, 6  # looked at after the window, besides those that the last step is announced ahead
LOOK_S = 1.0  # about so long, where steps are short
MAX_PROBE_BYTES = 32 << 20  # of an all-reduce: bandwidth hardly depends on the size any more
PROBES = 4  # the first is left out
PROBE_S = 5.0  # for each: a rank may have ended meanwhile


class Communication:
    """Follows the collectives of this process's DistributedDataParallel modules, once asked to.

    Args:
        parallel: the modules.
    """

    def __init__(self, parallel: ParallelKnobs) -> None:
        self._parallel = parallel
        self._exposed_s: List[float] = []
        self._buffers_s = 0.0
        self._bandwidth_bytes_per_s: Optional[float] = None
        self.is_looking = False

    def num_steps(self, step_s: float) -> int:
        """Returns how many steps more to make than the announcement of the last takes; 0 without a wrapper.

        Args:
            step_s: seconds a step.
        """
        return max(MIN_STEPS, min(MAX_STEPS, int(LOOK_S / max(step_s, 1e-9)))) if self._parallel.living else 0

    def begin(self, *, is_compiled: bool) -> None:
        """Sets the timers going; called once the window is over.

        Args:
            is_compiled: graphs of the program may hold what would be changed for the buffers: they are left out then.
        """
        try:
            for wrapper in self._parallel.living:
                Wrapped._set_ddp_runtime_logging_sample_rate(wrapper, 1)  # type: ignore[no-untyped-call]
                if not is_compiled and next(members.parameters(wrapper)).device.type == "cpu":
                    self._time_buffers(wrapper)
            self.is_looking = True
        except Exception:  # a wrapper without timers (torch's reducer in Python): not known, and no reason to fail
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
        """Called after each step that is looked at."""
        buffers_s, self._buffers_s = self._buffers_s, 0.0
        logged: Any = Wrapped._get_ddp_logging_data
        told: List[Dict[str, Any]] = [logged(wrapper) for wrapper in self._parallel.living]
        ns = sum(each["backward_comm_time"] - each["backward_compute_comm_overlap_time"] for each in told if _is_timed(each))
        if any(map(_is_timed, told)):
            self._exposed_s.append(max(0.0, ns / 1e9) + buffers_s)

    def summary(self) -> Dict[str, Any]:
        """Returns {"exposed_s", "num_steps", "gradient_bytes", "bandwidth_bytes_per_s"}; {} where nothing is known."""
        seen = self._exposed_s[1:]  # the timers tell of the step before: when the first was made they were not going
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
        """Measures the bandwidth, together with all other ranks; returns whether there is something new to tell.

        The result is written before: a rank that has gone keeps the others here, until their time is up.
        """
        import torch
        import torch.distributed as dist

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
                work = dist.all_reduce(tensor, group=wrapper.process_group, async_op=True)
                work.wait(datetime.timedelta(seconds=PROBE_S))
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                seconds.append(time.monotonic() - begin_s)
        except RuntimeError:  # no memory for it, or a rank has gone: the rest is known
            return False
        self._bandwidth_bytes_per_s = tensor.numel() * 4 / max(sorted(seconds[1:])[(PROBES - 1) // 2], 1e-9)
        return True


def _is_timed(told: Dict[str, Any]) -> bool:
    return bool(told.get("backward_comm_time", 0) > 0)
