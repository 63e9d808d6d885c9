"""Sets which kernels torch's scaled_dot_product_attention may use, and reads from the autograd graph which ones ran.

A fused kernel adds a node with its own name to the graph of the loss. The unfused kind, `math`, and compiled modules add none.
"""

from __future__ import annotations

import itertools
from typing import Any, Dict, List, Optional, Set

import torch

from .. import members
from ..protocol import APPLIED, NOT_APPLICABLE, OVERRIDDEN, KnobReport
from .base import KnobHandler

KEY = "backend.sdpa"
KINDS = ("flash", "mem_efficient", "cudnn", "math")
# Part of a graph node's name -> kind. The whole name is "ScaledDotProductFlashAttentionBackward0", for example.
NODES = {"Flash": "flash", "Efficient": "mem_efficient", "Cudnn": "cudnn"}
MAX_NODES = 100_000  # maximum number of nodes of a loss's graph that are searched
UNSEEN = "no fused scaled_dot_product_attention was seen in the backward pass"


def enabled() -> List[str]:
    """Returns the kinds that torch's switches allow."""
    ask = {kind: getattr(torch.backends.cuda, f"{kind}_sdp_enabled", None) for kind in KINDS}
    return [kind for kind, is_enabled in ask.items() if is_enabled is not None and is_enabled()]


class AttentionKnobs(KnobHandler):
    """Sets the kernels of scaled_dot_product_attention."""

    keys = (KEY,)

    def on_torch(self) -> None:
        """Allows one kind of kernel, and `math` for inputs that the kind does not support. "default" changes nothing."""
        value = self.asked.get(KEY, "default")
        if value == "default":
            return
        for kind in KINDS:
            switch = getattr(torch.backends.cuda, f"enable_{kind}_sdp", None)  # cuDNN's exists since torch 2.5
            if switch is not None:
                switch(kind in (value, "math"))

    on_activate = on_torch  # again: the program may have changed the switches

    def observe(self) -> Dict[str, Any]:
        """Returns the knob's value as torch's switches show it.

        That is the fused kind if exactly one is allowed, "math" if none is, and "default" if several are.
        """
        fused = [kind for kind in enabled() if kind != "math"]
        return {KEY: fused[0] if len(fused) == 1 else "default" if fused else "math"}

    @property
    def _ran(self) -> Optional[Set[str]]:
        """Kinds of the fused kernels in the first loss's graph; None if unknown, for example because a module is compiled."""
        losses = self._context.losses
        return None if losses is None or self._context.modules.is_compiled() else losses.attention

    def applicability(self) -> Dict[str, str]:
        """Returns why the knob cannot be changed in this program."""
        return {KEY: UNSEEN} if self._ran is not None and not self._ran else {}

    def _verify(self, key: str, asked: Any) -> KnobReport:
        value, ran = self.observe()[KEY], self._ran
        if value != asked:
            return KnobReport(OVERRIDDEN, f"{asked!r} was requested, but the process allows {', '.join(enabled())}", value)
        if asked in NODES.values() and ran is not None and ran != {asked}:
            seen_in_loss = f"{', '.join(sorted(ran))} ran" if ran else UNSEEN
            why = f"the {asked} kernel does not support the inputs, or there is no attention: {seen_in_loss}"
            return KnobReport(NOT_APPLICABLE, why, None)
        return KnobReport(APPLIED, "", asked)


def seen(node: Any) -> Set[str]:
    """Returns the kinds of fused kernels in the autograd graph of a loss, from its grad_fn."""
    names = (each.name() for each in itertools.islice(members.nodes_of(node), MAX_NODES))
    fused = [name for name in names if name.startswith("ScaledDotProduct")]
    return {kind for name in fused for word, kind in NODES.items() if word in name}
