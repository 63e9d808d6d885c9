"""The wheel installed by pipx and by uv, as a command and into an environment, runs outside the checkout.

The test installs pipx and uv from the package index into a new environment. The real dependencies, such as torch, have 6 GB, so
empty wheels of the same names and versions replace them, and their modules come from the running environment. The test proves
that the installers accept the wheel and its requirements and put the command on the path, and that autotune's configuration,
recipes and harness work there. It does not prove that the real packages fit together: .ci/run does.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.packaging.test_install import ROOT, build

pytestmark = pytest.mark.thorough
TOOLS = ("pipx", "uv")


class Place:
    """A folder with the installers, the wheel, and everything that they write.

    Attributes:
        path: the folder.
        tools: folder of the commands `pipx` and `uv`.
        wheel: path of autotune's wheel.
        stand_ins: folder of the empty wheels that replace autotune's dependencies.
        commands: folder of the installed commands.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.tools, self.commands = path, path / "tools" / "bin", path / "commands"
        venv.create(path / "tools", symlinks=True)
        install = [sys.executable, "-m", "pip", "--python", str(self.tools / "python"), "install", "--quiet", *TOOLS]
        made = subprocess.run(install, capture_output=True, text=True, timeout=300, check=False)
        if made.returncode:
            pytest.skip(f"no package index: misses pipx and uv ({made.stderr.strip().splitlines()[-1]})")
        self.wheel, self.stand_ins = build("build_wheel", path / "dist"), path / "stand-ins"
        _stand_ins(self.stand_ins)

    def run(self, *command: str | Path, cwd: Path | None = None) -> str:
        """Runs a command in an environment that does not refer to the running one; returns its output."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
        own = {
            "HOME": self.path, "PIPX_HOME": self.path / "pipx", "PIPX_BIN_DIR": self.commands,
            "UV_TOOL_DIR": self.path / "uv", "UV_TOOL_BIN_DIR": self.commands, "UV_CACHE_DIR": self.path / "cache",
            "UV_PYTHON_DOWNLOADS": "never", "UV_LINK_MODE": "copy",
        }  # fmt: skip
        done = subprocess.run(
            [str(word) for word in command], cwd=cwd or self.path, env={**kept, **{key: str(at) for key, at in own.items()}},
            capture_output=True, text=True, timeout=300, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("installers"))


def _stand_ins(folder: Path) -> None:
    """Writes an empty wheel for every dependency, in the version that constraints.txt pins."""
    folder.mkdir()
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    for requirement in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]:
        name = re.split(r"[<>=\[ ]", requirement)[0]
        stem = f"{name.replace('-', '_')}-{pinned[name]}"
        with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{stem}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {pinned[name]}\n")
            wheel.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{stem}.dist-info/RECORD", "")


def _pipx(place: Place) -> Path:
    options = f"--no-index --find-links {place.stand_ins}"
    place.run(place.tools / "pipx", "install", "--python", sys.executable, f"--pip-args={options}", place.wheel)
    return place.commands / "autotune"


def _uv_tool(place: Place) -> Path:
    options = ("--python", sys.executable, "--no-index", "--find-links", place.stand_ins)
    place.run(place.tools / "uv", "tool", "install", *options, place.wheel)
    return place.commands / "autotune"


def _uv_pip(place: Place) -> Path:
    python = place.path / "environment" / "bin" / "python"
    place.run(place.tools / "uv", "venv", "--python", sys.executable, python.parent.parent)
    options = ("--python", python, "--no-index", "--find-links", place.stand_ins)
    place.run(place.tools / "uv", "pip", "install", *options, place.wheel)
    return python.with_name("autotune")


def _borrow(command: Path) -> Path:
    """Makes the running environment's libraries visible to an installed command's interpreter; returns the interpreter."""
    python = Path(command.read_text().split()[0].removeprefix("#!"))
    (own,) = (python.parent.parent / "lib").glob("python3.*/site-packages")
    (own / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


@pytest.mark.parametrize("install", [_pipx, _uv_tool, _uv_pip])
def test_installed_command_inspects_a_training_outside_the_checkout(
    install: Callable[[Place], Path], place: Place, tmp_path: Path
) -> None:
    shutil.rmtree(place.commands, ignore_errors=True)
    command = install(place)
    python = _borrow(command)
    where = place.run(python, "-c", "import autotune; print(autotune.__file__)", cwd=tmp_path)
    assert Path(where).is_relative_to(python.parent.parent)
    assert "loader.num_workers" in place.run(command, "knobs", cwd=tmp_path)
    seen = place.run(command, "inspect", "model=mlp", cwd=tmp_path)
    assert str(Path(where.strip()).parent / "programs" / "tabular.py") in seen
    assert "precision.amp" in seen
