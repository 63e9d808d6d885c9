"""`autotune inspect`: runs a few steps of a program under the harness and says what was found and what can be turned."""

from __future__ import annotations

import dataclasses
import os
import secrets
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from autotune.cli.terminal import console, print_json
from autotune.errors import NothingWorked
from autotune.wording import bytes_text, command_text, value_text

if TYPE_CHECKING:
    from autotune.config.compose import Composed
    from autotune.harness.protocol import RankResult
    from autotune.launchers.base import Ended, Launch

POLL_S = 0.1
TAIL_LINES = 15


def inspect(overrides: list[str], *, command: list[str] | None, config_dirs: tuple[Path, ...], as_json: bool) -> int:
    """Prints what was detected in a program, and which knobs it can turn.

    Raises:
        BadInput: what was asked for cannot be done.
        NothingWorked: the program did not come to its first optimizer steps; says why, with the end of its log.
    """
    from autotune.config.compose import compose
    from autotune.machine import host_facts

    facts = host_facts()
    composed = compose(overrides, command=command, config_dirs=config_dirs, facts=facts)
    with tempfile.TemporaryDirectory(prefix="autotune-inspect-") as folder:
        launch = _launch(composed, Path(folder) / "trials" / "0000", facts)
        ended = _run(launch, is_quiet=as_json)
    result = _result(ended, launch, composed)
    argv = composed.secrets.words(launch.argv)
    rows = _rows(result, composed, facts)
    if as_json:
        document = composed.secrets.document(dataclasses.asdict(result))
        print_json({"command": argv, "result": document, "knobs": rows})
    else:
        _print(result, rows, argv)
    return 0


def _launch(composed: Composed, folder: Path, facts: dict[str, Any]) -> Launch:
    from autotune.harness.protocol import Spec
    from autotune.knobs.catalogue import knob
    from autotune.launchers.base import Launch
    from autotune.study.settings import compile_cache, deadlines, device_environment, memory_cap_bytes

    config, pinned = composed.config, composed.space.pinned
    passed = {key: {**composed.command.placeholders, **pinned}[key] for key in composed.command.placeholders}
    spec = Spec(
        trial=0,
        nonce=secrets.token_hex(8),
        folder=os.path.abspath(folder),
        mode="inspect",
        knobs={key: value for key, value in pinned.items() if key not in passed},
        passed=passed,
        device=config.device.kind,
        memory_limit_bytes=memory_cap_bytes(config.device, facts),
    )
    env = {**device_environment(config.device), **compile_cache(folder.parent.parent), **config.env}
    for key, value in pinned.items():
        env.update(knob(key).environment(value))
    return Launch(
        argv=composed.command.argv(composed.hidden.reveal({**composed.command.placeholders, **pinned})),
        cwd=composed.command.cwd,
        env=composed.hidden.environment(env),
        folder=folder,
        spec=spec,
        deadlines=deadlines(config.measure, max_s=None),
    )


def _run(launch: Launch, *, is_quiet: bool) -> Ended:
    from autotune.launchers.local import LocalLauncher

    launcher = LocalLauncher()
    running = launcher.start(launch)
    out = console(stderr=True)
    try:
        with out.status("starting the program") as status:
            while (ended := running.poll()) is None:
                progress = running.progress()
                if progress and not is_quiet:
                    status.update(f"{progress.phase}, step {progress.step}")
                time.sleep(POLL_S)
            return ended
    finally:
        running.stop("inspection is over")
        launcher.close()


def _result(ended: Ended, launch: Launch, composed: Composed) -> RankResult:
    from autotune.failures import classify

    if ended.results and ended.results[0].status != "failed" and ended.results[0].detected:
        return ended.results[0]
    outcome, reason = classify(ended.facts(launch.spec))
    tail = "\n".join(str(ended.evidence.get("log_tail", "")).strip().splitlines()[-TAIL_LINES:])
    said = f"{outcome}: {reason}" if reason else f"{outcome}: the program took no optimizer step"
    shown = f". The end of its log:{os.linesep}{tail}" if tail else ""
    raise NothingWorked(composed.secrets.text(f"the program could not be inspected, {said}{shown}"))


def _rows(result: RankResult, composed: Composed, facts: dict[str, Any]) -> list[dict[str, Any]]:
    from autotune.knobs.catalogue import CATALOGUE
    from autotune.machine import circumstances

    here = circumstances(facts, result, is_recipe=composed.command.is_recipe)
    rows = []
    for key, knob in CATALOGUE.items():
        why_not = result.applicability.get(key) or knob.blocked(here)
        tried = [] if why_not else knob.domain(here)
        value = result.observed.get(key, composed.command.placeholders.get(key))
        rows.append({"knob": key, "value": value, "can_be_turned": not why_not, "reason": why_not or "", "values": tried})
    return rows


def _print(result: RankResult, rows: list[dict[str, Any]], argv: list[str]) -> None:
    out = console()
    found = Table.grid(padding=(0, 2, 0, 0))
    found.add_column(no_wrap=True, style="quiet")
    found.add_column(overflow="fold")
    for name, text in _findings(result, argv):
        if text:
            found.add_row(name, Text(text))
    out.print(found)
    out.print()
    table = Table(box=None, header_style="quiet", padding=(0, 2, 0, 0), pad_edge=False, expand=True)
    table.add_column("knob", no_wrap=True, style="key")
    table.add_column("now", no_wrap=True)
    table.add_column("can be turned", ratio=1, overflow="fold")
    for row in rows:
        values = ", ".join(value_text(v) for v in row["values"]) or "when you list values"
        what = Text(values) if row["can_be_turned"] else Text(f"no: {row['reason']}", style="quiet")
        table.add_row(row["knob"], Text(value_text(row["value"])), what)
    out.print(table)


def _findings(result: RankResult, argv: list[str]) -> list[tuple[str, str]]:
    found, facts, memory = result.detected, result.facts, result.memory
    loader, precision = found.get("loader") or {}, found.get("precision") or {}
    counts = found.get("num_parameters") or []
    modules = [f"{name} ({n:,} parameters)" for name, n in zip(found.get("modules") or [], counts, strict=False)]
    modules = modules or [str(name) for name in found.get("modules") or []]
    peak = bytes_text(memory.get("peak_bytes")) if memory.get("peak_bytes") else ""
    return [
        ("program", command_text(argv)),
        ("torch", " ".join(str(facts[key]) for key in ("torch", "interpreter") if facts.get(key))),
        ("device", str(found.get("device") or facts.get("device") or "")),
        ("processes", str(found.get("world_size") or result.world_size)),
        ("modules", ", ".join([*modules, *map(str, found.get("wrappers") or [])])),
        ("optimizer", ", ".join(map(str, found.get("optimizers") or []))),
        ("precision", _precision(precision)),
        ("loader", _loader(loader) or "no DataLoader reaches the optimizer"),
        ("counted in", f"{result.unit}{f', from {result.unit_source}' if result.unit_source else ''}"),
        ("memory", peak),
    ]


def _loader(loader: dict[str, Any]) -> str:
    if not loader:
        return ""
    extras = {k: v for k, v in loader.items() if k not in ("site", "ordinal", "dataset") and v is not None}
    words = [str(loader.get("dataset") or ""), *(f"{key} {value_text(value)}" for key, value in extras.items())]
    return f"{', '.join(word for word in words if word)}; made at {_near(str(loader.get('site')))}"


def _near(site: str) -> str:
    """Returns "train.py:7" for a file of the working directory, the path as it is for others."""
    return site.removeprefix(f"{os.getcwd()}{os.sep}")


def _precision(precision: Any) -> str:
    if not isinstance(precision, dict):
        return str(precision or "")
    parameters = precision.get("parameters")
    kinds = ", ".join(map(str, parameters)) if isinstance(parameters, list | tuple | dict) else str(parameters or "")
    return f"autocast {value_text(precision.get('autocast'))}{f', parameters {kinds}' if kinds else ''}"
