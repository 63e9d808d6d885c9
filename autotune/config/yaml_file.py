"""Reads YAML files as plain values. Rejects tags (could run code), anchors (could fill memory) and duplicate keys."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import yaml

from autotune.errors import BadInput
from autotune.knobs.values import MAX_TEXT, shown

MAX_BYTES = 2**18  # a hundred times the largest known file; also limits the time for reading
MAX_DEPTH = 20
ALLOWED = "Give a YAML file of plain keys and values"
TEXT, TRUTH, WHOLE, FRACTION, DATE = (f"tag:yaml.org,2002:{name}" for name in ("str", "bool", "int", "float", "timestamp"))
NOT_DECIMAL = re.compile(r"[-+]?0[xb0-9_].*|.*:.*")
VARIABLES = "env"  # key of a mapping from environment variables to their values


class _Loader(yaml.SafeLoader):
    """Loader that accepts less than PyYAML's SafeLoader: it rejects what cannot be a knob's value, and names the line."""

    depth = 0

    def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
        """Leaves dates, 010 and 1:30 as text, as the command line does: YAML 1.1 reads the last two as 8 and as 90."""
        tag = super().resolve(kind, value, implicit)  # type: ignore[no-untyped-call]
        return TEXT if tag == DATE or (tag in (WHOLE, FRACTION) and NOT_DECIMAL.fullmatch(value)) else tag

    def construct_document(self, node: Any) -> Any:
        """Leaves the values of environment variables exactly as written: true, 1.10 and 1_000 are texts there."""
        for key, values in node.value if isinstance(node, yaml.MappingNode) else ():
            for _, value in values.value if key.value == VARIABLES and isinstance(values, yaml.MappingNode) else ():
                value.tag = TEXT if value.tag in (TRUTH, WHOLE, FRACTION) else value.tag
        return super().construct_document(node)

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
            raise _refused("anchors and aliases (& and *) are not read here: write the value out", event)
        if event.tag is not None:  # an explicit tag
            raise _refused(f"tags are not read here, found {event.tag!r}: write plain values", event)
        if isinstance(event, yaml.ScalarEvent) and len(event.value) > MAX_TEXT:
            raise _refused(f"a value of more than {MAX_TEXT} characters", event)
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise _refused(f"nested more than {MAX_DEPTH} levels deep", event)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        made = super().construct_mapping(node, deep)
        if len(made) < len(node.value):
            names = [key.value for key, _ in node.value]
            twice = next((name for name in names if names.count(name) > 1), names[-1])
            raise _refused(f"the key {twice!r} is given twice", node)
        return made


def read(path: Path, name: str, allowed: str = ALLOWED) -> Any:
    """Returns the content of a YAML file: mappings, lists, text, numbers, true, false, null.

    Args:
        path: the file.
        name: option or key with which the user named the file; the error message begins with it.
        allowed: what the error message asks for.

    Raises:
        BadInput: no such file, not a regular one, too large, not UTF-8, or not plain YAML.
    """
    try:
        return loaded(_text(path))
    except (OSError, ValueError) as error:
        raise BadInput(f"{name}: cannot be read, got {shown(str(path))} ({_reason(error)}). {allowed}.") from error


def loaded(text: str) -> Any:
    """Returns what a YAML text holds, as `read` does for a file.

    Raises:
        ValueError: it is not plain YAML; the message says why in one line.
    """
    try:
        return yaml.load(text, _Loader)
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(_reason(error)) from error


def _text(path: Path) -> str:
    if not os.path.isfile(path):  # reading a pipe could block, and reading a device may never end
        raise ValueError("it is not a file" if os.path.exists(path) else "there is no such file")
    with path.open("rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ValueError(f"it is larger than {MAX_BYTES // 1024} KiB")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 text, byte {error.start}") from error


def _refused(problem: str, found: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=found.start_mark)


def _reason(error: BaseException) -> str:
    """Returns one line on why a file is unusable, with the line number."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"line {error.problem_mark.line + 1}: {error.problem or error.context}"
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    return " ".join(str(error).split())
