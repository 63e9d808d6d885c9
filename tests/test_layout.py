"""The modules of autotune do not import each other in circles. Most imports for type annotations count too."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import autotune

ROOT = Path(autotune.__file__).parent
IMPORTS_ONLY_TYPES = {"autotune.harness.context"}  # imports the rest of the harness only for annotations: no circle at run time


@cache
def modules() -> dict[str, Path]:
    found = {}
    for path in ROOT.rglob("*.py"):
        name = ".".join(("autotune", *path.relative_to(ROOT).with_suffix("").parts))
        found[name.removesuffix(".__init__")] = path
    return found


def imported(name: str) -> set[str]:
    """Returns the modules of autotune that a module imports, including imports in functions and most imports for types."""
    tree = ast.parse(modules()[name].read_text())
    typing = [node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    left_out = {id(each) for node in typing for each in ast.walk(node)} if name in IMPORTS_ONLY_TYPES else set()
    found: set[str] = set()
    for node in ast.walk(tree):
        if id(node) not in left_out:
            found |= {each for each in _targets(name, node) if each in modules()}
    return found - {name}


def _targets(name: str, node: ast.AST) -> set[str]:
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names}
    if not isinstance(node, ast.ImportFrom):
        return set()
    package = name if modules()[name].name == "__init__.py" else name.rpartition(".")[0]
    base = node.module or ""
    if node.level:
        above = package.split(".")[: len(package.split(".")) - node.level + 1]
        base = ".".join([*above, *([node.module] if node.module else [])])
    names = {f"{base}.{alias.name}" for alias in node.names}
    return {each if each in modules() else base for each in names}


def test_modules_have_no_circular_imports() -> None:
    graph = {name: imported(name) for name in modules()}
    graph["autotune"].discard("autotune.api")  # the package imports `autotune.api` only at the first use of `run` or `Study`
    done: set[str] = set()
    path: list[str] = []

    def follow(name: str) -> None:
        assert name not in path, " -> ".join([*path[path.index(name) :], name])
        if name in done:
            return
        path.append(name)
        for each in sorted(graph[name]):
            follow(each)
        done.add(path.pop())

    for name in graph:
        follow(name)
    assert len(done) > 200
