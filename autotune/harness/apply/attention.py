"""Which kernels compute torch's scaled_dot_product_attention: set by torch's switches, read from the loss's autograd graph.

A fused kernel leaves a node of its own name there; `math` leaves none, and neither does a compiled module.
"""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Set

from ..protocol import APPLIED, NOT_APPLICABLE, OVERRIDDEN, KnobReport

KEY = "backend.sdpa"
KINDS = ("flash", "mem_efficient", "cudnn", "math")
NODES = {"Flash": "flash", "Efficient": "mem_efficient", "Cudnn": "cudnn"}  # words in ScaledDotProduct...Backward0 -> kind
MAX_NODES = 100_000
UNSEEN = "no fused scaled_dot_product_attention was seen in the backward pass"


def enabled() -> List[str]:
    """Returns the kinds that torch's switches allow."""
    import torch

    ask = {kind: getattr(torch.backends.cuda, f"{kind}_sdp_enabled", None) for kind in KINDS}
    return [kind for kind, is_enabled in ask.items() if is_enabled is not None and is_enabled()]


def observe() -> str:
    """Returns the knob's value that the switches stand for: a kind that is allowed alone or beside `math`, else "default"."""
    fused = [kind for kind in enabled() if kind != "math"]
    return fused[0] if len(fused) == 1 else "default" if fused else "math"


def apply(knobs: Dict[str, Any]) -> None:
    """Allows one kind of kernel; `math` stays allowed, for inputs that the kind cannot take. "default" leaves all as it is."""
    import torch

    value = knobs.get(KEY, "default")
    if value == "default":
        return
    for kind in KINDS:
        switch = getattr(torch.backends.cuda, f"enable_{kind}_sdp", None)  # cuDNN's came with torch 2.5
        if switch is not None:
            switch(kind in (value, "math"))


def seen(node: Any) -> Set[str]:
    """Returns the kinds of fused kernels in the graph behind a loss.

    Args:
        node: its grad_fn; None where it has none.
    """
    found: Set[str] = set()
    waiting, known = [node], {node}
    while waiting and len(known) < MAX_NODES:
        node = waiting.pop()
        if node is None:
            continue
        name = node.name()
        if name.startswith("ScaledDotProduct"):
            found.update(kind for word, kind in NODES.items() if word in name)
        for before, _ in node.next_functions:
            if before not in known:
                known.add(before)
                waiting.append(before)
    return found


def verify(knobs: Dict[str, Any], kinds: Optional[Set[str]], *, is_compiled: bool) -> Dict[str, KnobReport]:
    """Returns the report of the knob.

    Args:
        knobs: the trial's knobs.
        kinds: what the first loss was computed with; None where nobody looked.
        is_compiled: whether modules are compiled, which hides what they call.
    """
    if KEY not in knobs:
        return {}
    asked, value = knobs[KEY], observe()
    if value != asked:
        why = f"the process allows {', '.join(enabled())}, {asked!r} was asked"
        return {KEY: KnobReport(OVERRIDDEN, why, value)}
    if asked in NODES.values() and kinds is not None and not is_compiled and kinds != {asked}:
        ran = f"it ran {', '.join(sorted(kinds))}" if kinds else UNSEEN
        return {
            KEY: KnobReport(NOT_APPLICABLE, f"the {asked} kernel takes no such inputs, or there is no attention: {ran}", None)
        }
    return {KEY: KnobReport(APPLIED, "", asked)}


def applicability(kinds: Optional[Set[str]], *, is_compiled: bool) -> Dict[str, str]:
    """Returns why the knob cannot be turned in this program (from the baseline)."""
    return {KEY: UNSEEN} if kinds is not None and not kinds and not is_compiled else {}
