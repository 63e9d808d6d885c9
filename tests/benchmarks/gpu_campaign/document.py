"""The file of a campaign: findings, all measurements, and the machine.

{"schema", "is_dry", "machine": {...}, "versions": {...}, "goes": [{"at", "commit", "stages"}],
 "stages": {stage: {"findings": [...], "measured": {name: anything}}}}
"""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autotune.documents import write_json
from autotune.machine import host_facts
from autotune.machine.facts import comparable
from tests.benchmarks.commands import ROOT
from tests.benchmarks.reporting import LIBRARIES

SCHEMA = 1
FILE = "campaign.json"
FACTS = ("cpu_model", "num_cores", "memory_bytes", "isa", "kernel", "python", "gpus", "topology", "environment")


class Document:
    """`campaign.json` in the folder of the results; written after every measurement.

    Args:
        folder: folder of the results.
        is_dry: whether this is a dry run.

    Raises:
        SystemExit: the folder holds results of another machine, of other versions, or of a dry run.
    """

    def __init__(self, folder: Path, *, is_dry: bool) -> None:
        self.path = folder / FILE
        facts = host_facts()
        self.has_cuda = bool(facts["gpus"])
        self.values: dict[str, Any] = {
            "schema": SCHEMA,
            "is_dry": is_dry,
            "machine": {name: facts[name] for name in FACTS},
            "versions": versions(),
            "goes": [],
            "stages": {},
        }
        if self.path.exists():
            earlier = json.loads(self.path.read_text())
            for name, theirs in origin(earlier).items():
                if theirs != (ours := origin(self.values)[name]):
                    raise SystemExit(f"--out: {self.path} has {name} {theirs!r}, here it is {ours!r}. Give another folder.")
            self.values = {**earlier, "versions": self.values["versions"]}

    def begin(self, stages: list[str]) -> None:
        """Records another run of the command."""
        self.values["goes"].append(
            {"at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "commit": commit(), "stages": stages}
        )
        self.save()

    def findings(self, stage: str) -> list[dict[str, Any]]:
        """Returns the findings of a stage so far."""
        return list(self._stage(stage)["findings"])

    def write_findings(self, stage: str, findings: list[dict[str, Any]]) -> None:
        """Writes the findings of a stage."""
        self._stage(stage)["findings"] = findings
        self.save()

    def measured(self, stage: str) -> dict[str, Any]:
        """Returns all stored measurements of a stage, by name."""
        return dict(self._stage(stage)["measured"])

    def kept(self, stage: str, name: str, measure: Callable[[], Any]) -> Any:
        """Returns the stored measurement of a name; measures and stores it if there is none."""
        measured = self._stage(stage)["measured"]
        if name not in measured:
            measured[name] = json.loads(json.dumps(measure()))
            self.save()
        return measured[name]

    def save(self) -> None:
        """Writes the file atomically."""
        write_json(self.path, self.values)

    def _stage(self, stage: str) -> dict[str, Any]:
        return dict.setdefault(self.values["stages"], stage, {"findings": [], "measured": {}})


def origin(values: dict[str, Any]) -> dict[str, Any]:
    """Returns the facts (machine, versions, ...) that must be the same for all numbers of a document, by name."""
    fixed = {name: values["versions"][name] for name in LIBRARIES}
    return {"schema": values["schema"], "is_dry": values["is_dry"], **comparable(values["machine"]), **fixed}


def versions() -> dict[str, str]:
    """Returns the versions of the libraries that affect the numbers; "" for a library that is not installed."""
    found = {}
    for name in (*LIBRARIES, "triton", "transformers", "pytorch-autotune"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = ""
    return found


def commit() -> str:
    """Returns the checkout's commit, with "+" if files were changed since; "" if git does not report it."""
    try:
        told = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--abbrev=12"], cwd=ROOT, capture_output=True, text=True
        )
    except OSError:
        return ""
    return told.stdout.strip()
