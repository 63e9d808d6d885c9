"""Runs one probe; see the package docstring."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from autotune.machine.probes import data, gpus, host

PROBES: dict[str, Callable[..., dict[str, Any]]] = {"gpus": gpus.look, "host": host.look, "data": data.look}

if __name__ == "__main__":
    print(json.dumps(PROBES[sys.argv[1]](*sys.argv[2:])))
