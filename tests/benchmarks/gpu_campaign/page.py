"""Writes the page of a campaign: every finding with its goals, and the machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from autotune.quantities import bytes_text
from tests.benchmarks.gpu_campaign.checks import Finding, goal_lines
from tests.benchmarks.gpu_campaign.document import Document
from tests.benchmarks.reporting import table

FILE = "campaign.md"


def write_page(folder: Path, document: Document, stages: Mapping[str, str]) -> None:
    """Writes the page next to the document.

    Args:
        folder: folder of the results.
        document: the campaign's document.
        stages: {name of a stage: its title}, in order.
    """
    (folder / FILE).write_text("\n".join(lines(document.values, stages)) + "\n", encoding="utf-8")


def lines(values: dict[str, Any], stages: Mapping[str, str]) -> Iterator[str]:
    """Yields the lines of the page."""
    is_dry = bool(values["is_dry"])
    yield "# What was measured on a GPU" if not is_dry else "# A dry run: small sizes, the numbers mean nothing"
    yield ""
    yield from machine(values)
    for stage, title in stages.items():
        entries = values["stages"].get(stage, {"findings": []})["findings"]
        yield from ["", f"## {stage}: {title}", ""]
        if not entries:
            yield "Not begun."
            continue
        findings = [Finding(**entry) for entry in entries]
        yield table(("", "check", "what was found", "seconds"), [_row(finding) for finding in findings])
        goals = [line for finding in findings for line in goal_lines(finding, is_dry=is_dry)]
        yield from ["", *(f"- {line}" for line in goals)] if goals else []
        for finding in findings:
            yield from ["", finding.detail] if finding.detail else []


def machine(values: dict[str, Any]) -> Iterator[str]:
    """Yields lines with the machine, the versions and the dates."""
    facts, goes = values["machine"], values["goes"]
    gpus = ", ".join(f"{gpu['name']} ({_size(gpu['memory_bytes'])}, driver {gpu['driver']})" for gpu in facts["gpus"])
    yield f"- GPU: {gpus or 'none'}"
    yield f"- host: {facts['cpu_model']}, {facts['num_cores']} cores, {_size(facts['memory_bytes'])}, kernel {facts['kernel']}"
    versions = ", ".join(f"{name} {version}" for name, version in values["versions"].items() if version)
    yield f"- versions: Python {facts['python']}, {versions}"
    commits = ", ".join(dict.fromkeys(go["commit"] for go in goes if go["commit"])) or "unknown"
    yield f"- measured {goes[0]['at']} to {goes[-1]['at']}, commit {commits}"


def _size(num_bytes: int | None) -> str:
    return bytes_text(num_bytes) if num_bytes else "memory unknown"


def _row(finding: Finding) -> tuple[str, str, str, str]:
    evidence = finding.evidence.replace("|", "/")
    return finding.status, finding.name, evidence, f"{finding.seconds:.0f}"
