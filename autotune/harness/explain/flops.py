"""Counts the FLOPs of one step by module, with torch's FlopCounterMode."""

from __future__ import annotations

from typing import Any, Dict

import torch
from torch.utils.flop_counter import FlopCounterMode

from .padding import Padding
from .products import Products

WRAPPERS = ("module", "_orig_mod")
_aten = torch.ops.aten
# Torch has no FLOP formulas for attention on the CPU. Its arguments are the same as on a GPU, so the GPU's formulas are used.
ON_CPU = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _aten._scaled_dot_product_flash_attention_backward,
}
OF_TOKENS = {getattr(_aten, name): name for name in ("embedding", "_pack_padded_sequence")}


class Counting(FlopCounterMode):
    """A FlopCounterMode that also records products and tokens."""

    def __init__(self, products: Products, padding: Padding) -> None:
        super().__init__(display=False)
        self._products, self._padding = products, padding
        for name, alike in ON_CPU.items():
            self.flop_registry.setdefault(name, self.flop_registry[alike])

    def _count_flops(self, func_packet: Any, out: Any, args: Any, kwargs: Any) -> Any:
        before = self.get_total_flops()
        out = super()._count_flops(func_packet, out, args, kwargs)  # type: ignore[no-untyped-call]
        if func_packet in self.flop_registry and all(value is None for value in kwargs.values()):
            self._products.note(func_packet, args, float(self.get_total_flops() - before))
        if func_packet in OF_TOKENS:
            self._padding.note(OF_TOKENS[func_packet], args)
        return out


class StepFlops:
    """Counts FLOPs from `begin` to `end`, in the calling thread and in the backward passes that this thread starts.

    Attributes:
        total: FLOPs of the step.
        products: the operations of the step that `products.py` runs again and times.
        padding: the tokens of the step.
    """

    def __init__(self) -> None:
        self.total = 0.0
        self.products, self.padding = Products(), Padding()
        self._mode: Any = None

    def begin(self) -> None:
        """Starts to count."""
        self._mode = Counting(self.products, self.padding)
        self._mode.__enter__()

    def end(self) -> None:
        """Stops counting."""
        self._mode.__exit__(None, None, None)
        self.total = float(self._mode.get_total_flops())

    def by_module(self, num_roots: int) -> Dict[str, float]:
        """Returns module -> FLOPs without those of inner modules. With several roots, a name is like "Encoder.layers.0"."""
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
