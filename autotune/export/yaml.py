"""Exports best.yaml: knob groups with plain values. Hydra and `autotune run --config-dir` read it as a global package."""

from __future__ import annotations

from typing import Any

import yaml

from autotune.config.literals import literal
from autotune.export.document import Exported
from autotune.export.winner import Winner
from autotune.plain_json import mapped
from autotune.plain_text import escaped_document, storable
from autotune.records import KnobValue

PACKAGE_LINE = "# @package _global_"
PROVENANCE = "# Where this file comes from. `autotune verify` and `autotune apply` read it; nothing in it is executed.\n"
PROVENANCE += "# `tier` is the highest tier that was allowed, `tier_of_changes` is the tier of what this file changes."


class _Quoted(str):
    """Text that is always quoted: YAML reads an unquoted `off` as False and an unquoted `1e5` as a number."""


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]  # libyaml's dumper, if PyYAML has it
    """Safe dumper that knows `_Quoted`."""


def _list(dumper: Any, items: list[Any]) -> yaml.Node:
    """Returns a list as a YAML node. A list of numbers, such as an interval, is written on one line."""
    are_numbers = all(isinstance(item, int | float) for item in items)
    node: yaml.Node = dumper.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=are_numbers)
    return node


_Dumper.add_representer(list, _list)
_Dumper.add_representer(_Quoted, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", str(text), style='"'))


def render(winner: Winner) -> Exported:
    """Returns the file's text: package line, comments, knob groups with remarks, and provenance."""
    lines = [PACKAGE_LINE, *(f"# {line}" for line in winner.headline)]
    groups: dict[str, list[str]] = {}
    for key, value in winner.knobs.items():
        group, _, name = key.partition(".")
        remark = winner.remarks.get(key)
        pair = _dump({name: _quoted(value, is_text=group == "env")}).rstrip("\n")
        groups.setdefault(group, []).append(f"  {pair}  # {remark}" if remark else f"  {pair}")
    for group, pairs in groups.items():
        lines += ["", f"{group}:", *pairs]
    return Exported(text="\n".join([*lines, "", PROVENANCE, _dump({"provenance": mapped(winner.provenance, _quoted_text)})]))


def _dump(document: dict[str, Any]) -> str:
    return escaped_document(str(yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1 << 20)))


def _quoted(value: KnobValue, *, is_text: bool = False) -> KnobValue:
    return _Quoted(literal(str(value))) if is_text or isinstance(value, str) else value


def _quoted_text(value: Any) -> Any:
    # Texts may contain the user's command line. `literal` escapes "${", which OmegaConf would take for a reference.
    return _Quoted(literal(storable(value))) if isinstance(value, str) else value
