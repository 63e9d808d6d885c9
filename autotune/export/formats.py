"""Exports the winner of a study as a file for other tools.

`yaml` is for autotune and Hydra; `env` and `python` are for shells and scripts. The other formats are configuration files of
training libraries. The libraries are not imported here: each format has a table of its library's keys, and a test compares
the table with the library.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import PurePath

from autotune.errors import BadInput, one_of
from autotune.export import accelerate, deepspeed, document, environment, huggingface, lightning, python, yaml
from autotune.export.document import Document, Exported
from autotune.export.winner import Winner, winner
from autotune.knobs import malloc
from autotune.records import Summary, Tier

TEXTS: dict[str, Callable[[Winner], Exported]] = {"yaml": yaml.render, "env": environment.render, "python": python.render}
DOCUMENTS: dict[str, Callable[[Winner], Document]] = {
    "hf": huggingface.document,
    "lightning": lightning.document,
    "accelerate": accelerate.document,
    "deepspeed": deepspeed.document,
}
FORMATS = (*TEXTS, *DOCUMENTS)
FILES = {
    "yaml": "best.yaml", "env": "best.env", "python": "best.py", "hf": "hf.yaml", "lightning": "lightning.yaml",
    "accelerate": "accelerate.yaml", "deepspeed": "ds_config.json",
}  # fmt: skip
JSON_ONLY = ("deepspeed",)


def render(summary: Summary, format: str, tier: Tier | None, *, file: str = "") -> Exported:
    """Returns the best configuration of a study in a format, and what the format cannot express.

    Args:
        summary: the study's summary.
        format: member of FORMATS.
        tier: highest tier whose knobs may be changed; None for the study's best.
        file: name of the output file, "" for none. A library's configuration is JSON if the name ends in ".json", as the
            libraries expect, and YAML otherwise; formats in JSON_ONLY are always JSON.

    Raises:
        BadInput: no such format, or the study has no winner yet.
    """
    check_format(format)
    found = winner(summary, tier)
    with malloc.as_on(summary["machine"]):  # the measured machine's allocators: this machine's may differ
        exported = TEXTS[format](found) if format in TEXTS else _configuration(found, format, file)
    if found.nothing and not exported.header:
        exported = replace(exported, notes=[*exported.notes, found.nothing])
    return exported


def _configuration(found: Winner, format: str, file: str) -> Exported:
    made = DOCUMENTS[format](found)
    is_json = format in JSON_ONLY or PurePath(file).suffix == ".json"
    return document.as_json(found, made) if is_json else document.as_yaml(found, made)


def check_format(format: str) -> None:
    """Checks the name of a format.

    Raises:
        BadInput: there is no such format.
    """
    if format not in FORMATS:
        raise BadInput(f"--format: no such format, got {format!r}. {one_of(format, FORMATS)}")


def file_name(format: str, tier: Tier | None) -> str:
    """Returns the usual name of a file in a format: "best.yaml", "best-exact.yaml" for the best of a tier."""
    path = PurePath(FILES[format])
    return path.name if tier is None else f"{path.stem}-{tier}{path.suffix}"
