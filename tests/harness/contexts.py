"""A stand-in for a trial's context, for tests of single knob handlers."""

from types import SimpleNamespace
from typing import Any


def context(knobs: dict[str, Any] | None = None, device: str = "cuda", **more: Any) -> Any:
    """Returns the context of a trial with these knobs.

    Args:
        knobs: key -> value.
        device: the type of device that the program trains on.
        more: further attributes of the context; `spec` is a dict of further attributes of the trial's spec.
    """
    spec = {
        "knobs": knobs or {},
        "passed": {},
        "target": None,
        "memory_limit_bytes": None,
        "device": device,
        **more.pop("spec", {}),
    }
    modules = SimpleNamespace(living=[], roots=[], reported=[], num_graphs=lambda: 0, is_compiled=lambda: False)
    modules.functions = SimpleNamespace(call_all_roots=False)
    modules.convolutions = SimpleNamespace(is_found=None)
    loaders = SimpleNamespace(training=None, workers=list)
    sharing = SimpleNamespace(num_stages=1, ranks_per_batch=lambda: 1)
    made = {
        "device": device,
        "device_index": None,
        "world_size": 1,
        "is_applying": True,
        "num_steps": 0,
        "modules": modules,
        "loaders": loaders,
        "sharing": sharing,
        "last_step": SimpleNamespace(is_announced=False),
    }
    return SimpleNamespace(**{**made, "spec": SimpleNamespace(**spec), **more})
