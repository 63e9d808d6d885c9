"""Every accepted key is read somewhere. For knobs, tests/harness/test_knob_contract.py shows this."""

from __future__ import annotations

import ast
from pathlib import Path

import autotune
from autotune.config.keys import LEAVES
from autotune.config.recipe import EVERYWHERE, PARTS, SCRIPTS
from autotune.knobs.catalogue import CATALOGUE

PACKAGE = Path(autotune.__file__).parent
NO_READERS = ("config/schema.py", "config/checks.py", "config/recipe.py", "config/describe.py", "testing/", "programs/")
CARRIED = {"provenance"}  # origin of an exported file, kept in config.yaml for people
FROM_THE_FILE = {"tracker.experiment"}  # trackers/store.py reads it in config.yaml
ALIASES = {"screening": {"rules"}, "finals": {"rules"}, "constraints": {"keep"}}  # their names in the code that reads them


def reads() -> set[tuple[str, str]]:
    """Returns (name before the dot, name after it) for every attribute that the code reads."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        if path.relative_to(PACKAGE).as_posix().startswith(NO_READERS):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                owner = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
                found.add((owner, node.attr))
    return found


def test_every_key_is_read_somewhere() -> None:
    there = reads()
    unread = []
    flags = [EVERYWHERE, PARTS, *(script.flags for script in SCRIPTS.values())]  # keys that become a recipe's options
    passed_on = {key for table in flags for key in table.values()}
    for key in LEAVES.keys() - CATALOGUE.keys() - CARRIED - FROM_THE_FILE - passed_on:
        group, _, name = key.rpartition(".")
        owner = group.rpartition(".")[2] or "config"
        if not any((word, name) in there for word in {owner, *ALIASES.get(owner, ())}):
            unread.append(key)
    assert sorted(unread) == []
