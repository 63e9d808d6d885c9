"""The harness runs in the program's interpreter, which may be Python 3.9."""

import ast
from pathlib import Path

import pytest

from tests.harness.conftest import REPOSITORY

FILES = sorted((REPOSITORY / "autotune" / "harness").rglob("*.py"))


def evaluated(node: ast.AST) -> list[ast.AST]:
    """Returns the nodes that are evaluated at run time: all but annotations, which `from __future__` keeps as text."""
    found = [node]
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                found += evaluated(child)
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_file_of_the_harness_is_valid_python_3_9(path: Path) -> None:
    tree = ast.parse(path.read_text(), feature_version=(3, 9))
    annotated = [node for node in ast.walk(tree) if getattr(node, "returns", None) or isinstance(node, ast.AnnAssign)]
    futures = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module == "__future__"]
    assert futures or not annotated or "inject" in str(path)
    names = {"str", "int", "float", "bool", "None", "Any", "bytes", "dict", "list"}
    for node in evaluated(tree):
        assert not isinstance(node, ast.Match if hasattr(ast, "Match") else ())
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            sides = {ast.unparse(node.left), ast.unparse(node.right)}
            assert not sides & names, f"{path}:{node.lineno}: X | Y is evaluated here"
        if isinstance(node, ast.Call):
            assert not any(keyword.arg in ("slots", "kw_only", "strict") for keyword in node.keywords), node.lineno
        imported = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            imported = [node.module or ""]
        assert not [name for name in imported if name.split(".")[0] in ("autotune", "numpy", "psutil")]
