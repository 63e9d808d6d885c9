"""Counts the FLOPs of one step, by operator and module, with torch's FlopCounterMode."""

from __future__ import annotations

from typing import Any, Dict, List

from .documents import BACKWARD
from .products import Products

WRAPPERS = ("module", "_orig_mod")


class StepFlops:
    """Counts from `begin` to `end`, in the calling thread and in the backward passes that it starts.

    Attributes:
        total: FLOPs of the step.
        forward: FLOPs of its forward passes.
        products: its matrix products and convolutions.
    """

    def __init__(self) -> None:
        self.total = self.forward = 0.0
        self.products = Products()
        self._counts: Dict[str, int] = {}
        self._mode: Any = None
        self._is_backward, self._begun = False, 0.0

    def begin(self) -> None:
        """Starts to count."""
        self._mode = _counting_mode()(self._counts, self.products)
        self._mode.__enter__()

    def end(self) -> None:
        """Stops counting."""
        self._mode.__exit__(None, None, None)
        self.total = float(self._mode.get_total_flops())
        self.entered("")

    def entered(self, phase: str) -> None:
        """Notes a new phase of the step."""
        if (phase == BACKWARD) == self._is_backward:
            return
        now = float(self._mode.get_total_flops())
        if phase == BACKWARD:
            self.forward += now - self._begun
        self._is_backward, self._begun = phase == BACKWARD, now

    def by_operator(self) -> List[Dict[str, Any]]:
        """Returns [{"operator", "flops", "count"}], the most FLOPs first."""
        total = {str(operator): flops for operator, flops in self._mode.get_flop_counts().get("Global", {}).items()}
        rows = [{"operator": name, "flops": float(n), "count": self._counts.get(name, 0)} for name, n in total.items()]
        return sorted(rows, key=lambda row: -row["flops"])

    def by_module(self, num_roots: int) -> Dict[str, float]:
        """Returns module -> FLOPs, without those of the modules inside it.

        Args:
            num_roots: number of root modules; if there are several, names begin with the class of their root.
        """
        counts = self._mode.get_flop_counts()
        whole = {name: float(sum(each.values())) for name, each in counts.items() if name != "Global"}
        own = dict(whole)
        for name, flops in whole.items():
            parent = name.rpartition(".")[0]
            while parent and parent not in own:
                parent = parent.rpartition(".")[0]
            if parent:
                own[parent] -= flops
        found: Dict[str, float] = {}
        for name, flops in own.items():
            plain = plain_name(name if num_roots > 1 else name.partition(".")[2])
            found[plain] = found.get(plain, 0.0) + max(0.0, flops)
        return found


def plain_name(name: str) -> str:
    """Returns a module's name without the parts that wrappers such as DistributedDataParallel add."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def _counting_mode() -> Any:
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    aten = torch.ops.aten
    on_cpu = {  # torch counts no FLOPs of the CPU's attention; the arguments are those of the GPU's
        aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: aten._scaled_dot_product_flash_attention_backward,
    }

    class Counting(FlopCounterMode):
        """Also counts the calls of each operator, and notes products."""

        def __init__(self, counts: Dict[str, int], products: Products) -> None:
            super().__init__(display=False)
            self._calls, self._products = counts, products
            for name, alike in on_cpu.items():
                self.flop_registry.setdefault(name, self.flop_registry[alike])

        def _count_flops(self, func_packet: Any, out: Any, args: Any, kwargs: Any) -> Any:
            before = self.get_total_flops()
            out = super()._count_flops(func_packet, out, args, kwargs)  # type: ignore[no-untyped-call]
            if func_packet in self.flop_registry:
                self._calls[str(func_packet)] = self._calls.get(str(func_packet), 0) + 1
                if not kwargs:
                    self._products.note(func_packet, args, float(self.get_total_flops() - before))
            return out

    return Counting
