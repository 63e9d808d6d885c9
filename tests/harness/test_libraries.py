"""Which imports the harness reports for warm starts. The libraries are files in a folder site-packages; no torch is needed."""

import ast
import json
from pathlib import Path

import pytest

from tests.harness.conftest import INJECT, Trial

END = """
import sys
sys.modules["_autotune_harness.libraries"].end()
startup = sys.modules["_autotune_harness.state"].startup
print(startup["is_repeatable"])
print(list(startup["imports"]))
"""
LIBRARIES = {
    "first.py": "",
    "second.py": "import nested",
    "nested.py": "",
    "package/__init__.py": "",
    "package/part.py": "",
    "seeding.py": "import random; random.seed(1)",
    "drawing.py": "import random; random.random()",
    "drawing_too.py": "import random; random.random()",
    "starting.py": "import threading, time; threading.Thread(target=time.sleep, args=(0.2,)).start()",
    "looking.py": "import importlib.util; importlib.util.find_spec('local')",
    "plugged.py": "import own",
    "broken.py": "raise ImportError",
    "setting.py": "import os, warnings; os.environ['A'] = '1'; warnings.simplefilter('ignore')",
    "torch.py": "",
    "twin.py": "",
    "wandb.py": "",
    "edited.py": "",
    "edited-1.0.dist-info/direct_url.json": json.dumps({"url": "file:///", "dir_info": {}}),
    "edited-1.0.dist-info/RECORD": "edited.py,sha256=x,1\nedited-1.0.dist-info/RECORD,,\n",
}
OWN = {"own.py": "import second", "twin.py": "", "local/__init__.py": ""}


def printed(trial: Trial, tmp_path: Path, body: str) -> list[str]:
    """Returns what a program with this source prints, in which END is added."""
    installed, folder = tmp_path / "site-packages", tmp_path / "program"
    for place, files in ((installed, LIBRARIES), (folder, {**OWN, "train.py": body + END})):
        for name, source in files.items():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_text(source)
    run = trial(str(folder / "train.py"), env={"PYTHONPATH": f"{INJECT}:{installed}"}, is_fresh=True)
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()


def imports(trial: Trial, tmp_path: Path, body: str) -> list[str]:
    """Returns what the harness reports for a program with this source."""
    found: list[str] = ast.literal_eval(printed(trial, tmp_path, body)[-1])
    return found


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("import first, second", ["first", "second"]),
        ("import first\nfrom package import part", ["first", "package", "package.part"]),
        ("import own", ["second"]),  # the program's own module imports a library
        ("import first\ntry: import broken\nexcept ImportError: import second", ["first", "second"]),
        ("import setting, second", ["setting", "second"]),  # the server repeats what a library sets
        ("import random; random.seed(0); random.random(); import first", ["first"]),
        ("import logging, json; import first", ["first"]),
        ("import random, drawing, drawing_too, second", ["drawing", "drawing_too", "second"]),
        ("import first, random; random.seed(0)\nimport drawing, second", ["first"]),
        ("import edited, second", ["second"]),  # the user's own package, installed from a folder
    ],
)
def test_outermost_imports_of_libraries_are_noted_in_order(trial: Trial, tmp_path: Path, body: str, found: list[str]) -> None:
    assert imports(trial, tmp_path, body) == found


@pytest.mark.parametrize(
    "between",
    [
        "import os; os.environ['HF_HOME'] = '/tmp'",
        "import os; os.chdir('/')",
        "import sys; sys.path.append('/tmp')",
        "import warnings; warnings.simplefilter('error')",
        "import logging; logging.basicConfig()",
        "import sys; sys.meta_path.append(type('Finder', (), {})())",
        "import twin",  # hides a library of that name
        "import seeding",
        "import starting",
        "import looking",  # finds a folder beside the script, which the server does not have on its path
        "import plugged",  # imports the program's own code
        "import wandb",  # reads variables that differ between trials
    ],
)
def test_list_ends_before_an_import_that_a_server_cannot_repeat(trial: Trial, tmp_path: Path, between: str) -> None:
    assert imports(trial, tmp_path, f"import first\n{between}\nimport second\n") == ["first"]


@pytest.mark.parametrize(
    ("body", "is_repeatable"),
    [
        ("import first, setting, torch", True),
        ("import setting, os; os.environ['A'] = '2'\nimport torch", False),
        ("import setting\nimport seeding\nimport torch", False),
    ],
)
def test_start_is_repeatable_if_only_noted_imports_change_what_torch_reads(
    trial: Trial, tmp_path: Path, body: str, is_repeatable: bool
) -> None:
    assert printed(trial, tmp_path, body)[-2] == str(is_repeatable)
