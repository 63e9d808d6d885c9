"""Only the module `patches` replaces functions of torch and of the program, and it can restore all of them."""

from __future__ import annotations

import ast
import contextlib
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from autotune.harness.modules import Nesting
from autotune.harness.patches import Patches
from tests.harness.conftest import REPOSITORY
from tests.harness.forks import Forks

HARNESS = REPOSITORY / "autotune" / "harness"
# Files that set attributes other than functions: an exception's note, a norm's momentum, a fork's interpreter state.
SET_BY_NAME = {"patches.py", "knobs/base.py", "warm_server.py"}


class Base:
    def inherited(self) -> str:
        return "own"


class Owner(Base):
    @staticmethod
    def static() -> str:
        return "own"

    def method(self) -> str:
        return "own"


def around(word: str) -> Any:
    return lambda below: lambda *args: f"{word}({below(*args)})"


@pytest.fixture
def patches() -> Any:
    made = Patches()
    yield made
    made.uninstall_all()


@pytest.mark.parametrize("name", ["method", "inherited", "static"])
def test_uninstalled_patch_leaves_its_owner_unchanged(patches: Patches, name: str) -> None:
    before = dict(vars(Owner))
    patch = patches.install(Owner, name, (lambda below: lambda *_: "ours") if name == "static" else around("ours"))
    assert "ours" in getattr(Owner(), name)()
    assert patch.uninstall()
    assert dict(vars(Owner)) == before


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_patches_of_one_function_can_be_uninstalled_in_any_order(patches: Patches, order: tuple[int, ...]) -> None:
    before = dict(vars(Owner))
    made = [patches.install(Owner, "method", around(word)) for word in "abc"]
    assert Owner().method() == "c(b(a(own)))"
    there = list("abc")
    for number in order:
        assert made[number].uninstall()
        there.remove("abc"[number])
        assert Owner().method() == "".join(f"{word}(" for word in reversed(there)) + "own" + ")" * len(there)
    assert dict(vars(Owner)) == before


@contextlib.contextmanager
def wrapped_by_the_program(own: Any) -> Iterator[None]:
    """Wraps the method as a program does that knows nothing of patches; restores `own` at the end."""
    below = Owner.method
    Owner.method = lambda self: f"theirs({below(self)})"  # type: ignore[method-assign]
    try:
        yield
    finally:
        Owner.method = own  # type: ignore[method-assign]


def test_patch_that_the_program_has_wrapped_stays_in_place(patches: Patches) -> None:
    own = Owner.method
    patch = patches.install(Owner, "method", around("ours"))
    with wrapped_by_the_program(own):
        assert not patch.uninstall()
        assert not patch.is_active
        assert Owner().method() == "theirs(ours(own))"
        patch.install()  # it is still called, so it is not installed twice
        assert Owner().method() == "theirs(ours(own))"
        assert patches.uninstall_all() == ["Owner.method"]


def test_replacement_by_the_program_between_two_patches_stays_in_place(patches: Patches) -> None:
    own = Owner.method
    lower = patches.install(Owner, "method", around("a"))
    with wrapped_by_the_program(own):
        upper = patches.install(Owner, "method", around("b"))
        assert not lower.uninstall()
        assert Owner().method() == "b(theirs(a(own)))"
        assert upper.uninstall()
        assert Owner().method() == "theirs(a(own))"


def test_uninstalled_patch_can_be_installed_again(patches: Patches) -> None:
    lower, upper = (patches.install(Owner, "method", around(word)) for word in "ab")
    assert lower.uninstall()
    lower.install()
    assert Owner().method() == "a(b(own))"
    assert upper.uninstall()
    assert Owner().method() == "a(own)"


def test_patches_reach_modules_that_imported_the_function_before(patches: Patches) -> None:
    source, library, other = (types.ModuleType(name) for name in ("source", "library", "other"))
    original = source.save = library.keep = lambda: "own"  # type: ignore[attr-defined]
    other.keep = lambda: "own"  # type: ignore[attr-defined]
    patch = patches.install(source, "save", around("a"))
    patches.install(source, "save", around("b"))
    patches.reach([library, other])
    assert (library.keep(), other.keep()) == ("b(a(own))", "own")
    patch.uninstall()
    patches.uninstall_all()
    assert source.save is original  # type: ignore[attr-defined]


def test_each_thread_counts_its_own_module_calls() -> None:
    nesting, seen = Nesting(), []
    nesting.depth += 1
    thread = threading.Thread(target=lambda: seen.append(nesting.depth))
    thread.start()
    thread.join()
    assert (seen, nesting.depth) == ([0], 1)


def test_replacement_of_module_calls_by_another_library_survives_uninstalling(run: Callable[[str], str]) -> None:
    done = run(
        """
        own = torch.nn.Module.__call__
        session.modules.uninstall()
        assert torch.nn.Module.__call__ is not own
        session.modules.look()
        ours = torch.nn.Module.__call__
        torch.nn.Module.__call__ = lambda *args, **kwargs: ours(*args, **kwargs)
        theirs = torch.nn.Module.__call__
        session.modules.uninstall()
        assert torch.nn.Module.__call__ is theirs
        assert torch.nn.Linear(2, 2)(torch.zeros(1, 2)).shape == (1, 2)
        print("kept")
        """
    )
    assert done == "kept"


def test_uninstalling_all_patches_restores_every_function(run: Callable[[str], str]) -> None:
    done = run(
        """
        changed = differences()
        assert len(changed) > 25, changed
        assert patches.uninstall_all() == []
        assert differences() == [], differences()
        print("as it was")
        """
    )
    assert done == "as it was"


@pytest.mark.thorough
def test_patched_functions_of_torch_can_still_be_pickled_and_called(run: Callable[[str], str]) -> None:
    done = run(
        """
        import pickle
        for function in (torch.save, torch.utils.data.get_worker_info, torch.nn.utils.clip_grad_norm_):
            assert pickle.loads(pickle.dumps(function)) is function
        assert float(torch.nn.utils.get_total_norm(tensors=[torch.ones(4)])) == 2.0
        print("found")
        """
    )
    assert done == "found"


@pytest.fixture
def run(forks: Forks, tmp_path: Path) -> Callable[[str], str]:
    """Returns a function that runs code in a process whose session has all knobs that replace functions.

    The function returns what the code prints.
    """

    def run_code(body: str) -> str:
        script = tmp_path / "script.py"
        script.write_text(SESSION + "\n".join(line.removeprefix("        ") for line in body.splitlines()))
        done = forks.run([str(script)], tmp_path, [{"PYTHONPATH": str(REPOSITORY)}])
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return run_code


SESSION = """
import dataclasses, inspect, os, sys, tempfile, types
import torch, torch.utils.data, torch.distributed
from torch.nn import parallel
from autotune.harness import guarded_files, protocol
from autotune.harness.patches import patches
from autotune.harness.session import Session

def owners():
    modules = [module for name, module in sys.modules.items() if name == "os" or name.split(".")[0] == "torch"]
    kinds = {}
    for module in modules:
        for value in list(vars(module).values()) if isinstance(module, types.ModuleType) else []:
            if inspect.isclass(value):
                kinds[id(value)] = value
    return [*modules, *kinds.values()]

before = [(owner, dict(vars(owner))) for owner in owners()]

def differences():
    found = []
    for owner, then in before:
        now = vars(owner)
        found += [f"{owner}.{name}" for name in {*then, *now} if callable(now.get(name, then.get(name)))
                  and then.get(name) is not now.get(name) and not name.startswith("_lazy")]
    return found

folder = tempfile.mkdtemp()
knobs = {"loader.non_blocking": True, "loader.device_prefetch": True, "threads.interop": 1,
         "step.accumulation": 2, "optimizer.set_to_none": False, "precision.amp": "bf16"}
spec = protocol.Spec(trial=1, nonce="n", folder=folder, knobs=knobs)
protocol.write_json(os.path.join(folder, protocol.SPEC_FILE), spec)
guarded_files.keep(folder)
guarded_files.torch_is_there()
session = Session(os.path.join(folder, protocol.SPEC_FILE))
session.torch_is_there()
session.is_over = True
"""


@pytest.mark.parametrize("path", sorted(HARNESS.rglob("*.py")), ids=lambda path: str(path.relative_to(HARNESS)))
def test_only_the_module_patches_replaces_functions(path: Path) -> None:
    replaced = _replaced(path)
    if str(path.relative_to(HARNESS)) in SET_BY_NAME:
        assert replaced, "it sets no attribute any more: remove it from SET_BY_NAME"
    else:
        assert replaced == []


def _replaced(path: Path) -> list[str]:
    """Returns the assignments of a file to attributes of what it imports, and its calls of `setattr`."""
    tree = ast.parse(path.read_text())
    imported = {alias.asname or alias.name.split(".")[0] for node in ast.walk(tree) for alias in _names(node)}
    replaced = [ast.unparse(node) for node in ast.walk(tree) for target in _targets(node) if _is_of(target, imported)]
    return [line for line in replaced if not line.startswith(("torch.backends.", "boot.", "state."))]


def _names(node: ast.AST) -> list[ast.alias]:
    return node.names if isinstance(node, (ast.Import, ast.ImportFrom)) else []


def _targets(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Assign):
        return [each for target in node.targets for each in (target.elts if isinstance(target, ast.Tuple) else [target])]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "setattr":
        return [node.func]
    return []


def _is_of(target: ast.expr, imported: set[str]) -> bool:
    """Whether an assignment's target is an attribute of something imported, or a call is `setattr`."""
    if isinstance(target, ast.Name):
        return target.id == "setattr"
    while isinstance(target, ast.Attribute):
        if isinstance(target.value, ast.Name):
            return target.value.id in imported
        target = target.value
    return False
