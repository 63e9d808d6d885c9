"""conf/ and search_spaces/ are found from an installed wheel and from an editable install.

hatchling's hooks, which pip calls, build both. pip installs them into a new virtual environment that uses the libraries of the
running one, so the tests need neither the network nor a second copy of torch.
"""

import functools
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.rows import more

ROOT = Path(__file__).parents[2]
NAMES = sorted(file.name for folder in ("conf", "search_spaces") for file in (ROOT / folder).rglob("*.yaml"))


def run(*command: str | Path, cwd: Path) -> str:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run([str(word) for word in command], cwd=cwd, env=kept, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(hook: str, folder: Path) -> Path:
    folder.mkdir()
    run(sys.executable, "-c", f"import hatchling.build as b; b.{hook}({str(folder)!r})", cwd=ROOT)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns a function that returns the wheel that one of hatchling's hooks builds, once for all tests."""
    folder = tmp_path_factory.mktemp("dist")
    return functools.cache(lambda hook: build(hook, folder / hook))


@pytest.fixture(scope="module", params=["build_wheel", *more("build_editable")])
def installed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, built: Callable[[str], Path]) -> Path:
    """Returns the interpreter of a virtual environment with autotune, installed from a wheel or as editable."""
    folder = tmp_path_factory.mktemp(request.param)
    place = folder / "venv"
    venv.create(place, symlinks=True)
    python = place / "bin" / "python"
    own = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip())
    (own / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")  # later on the path than `own`
    options = ("--no-deps", "--no-index", "--no-compile", "--ignore-installed", "--quiet", "--disable-pip-version-check")
    run(sys.executable, "-m", "pip", "--python", python, "install", *options, built(request.param), cwd=folder)
    return python


def test_the_installed_copy_composes_a_recipe_from_its_own_conf(installed: Path, tmp_path: Path) -> None:
    overrides = ["model=resnet50", "search_space=quick"]
    source = f"from autotune.config.compose import compose; print(compose({overrides}, command=None).yaml)"
    assert "resnet50" in run(installed, "-c", source, cwd=tmp_path)


def test_editable_install_reads_its_configuration_from_the_checkout(installed: Path, tmp_path: Path) -> None:
    source = "from autotune.config.locate import folder; print(folder('conf'), folder('search_spaces'))"
    is_editable = "build_editable" in str(installed)
    for place in run(installed, "-c", source, cwd=tmp_path).split():
        assert Path(place).is_relative_to(ROOT) == is_editable


def test_the_command_is_on_the_path_after_installation(installed: Path, tmp_path: Path) -> None:
    assert "loader.num_workers" in run(installed.parent / "autotune", "knobs", cwd=tmp_path)


def test_the_program_and_the_harness_are_files_that_another_interpreter_can_run(installed: Path, tmp_path: Path) -> None:
    source = "import autotune, pathlib; print(pathlib.Path(autotune.__file__).parent)"
    package = Path(run(installed, "-c", source, cwd=tmp_path).strip())
    for name in ("vision.py", "text.py", "tabular.py", "custom.py", "recipe_parts.py"):
        assert (package / "programs" / name).is_file()
    assert (package / "harness" / "inject" / "sitecustomize.py").is_file()


def test_a_wheel_holds_every_configuration_file_and_no_tests(built: Callable[[str], Path]) -> None:
    names = zipfile.ZipFile(built("build_wheel")).namelist()
    shipped = sorted(Path(name).name for name in names if name.startswith(("autotune/conf/", "autotune/search_spaces/")))
    assert shipped == NAMES
    assert not [name for name in names if name.startswith(("tests/", "runs/"))]
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert {"autotune/report/templates/page.html", "autotune/report/templates/style.css"} <= set(names)


def test_each_constraint_is_name_and_version_and_no_direct_dependency_is_missing() -> None:
    import re
    import tomllib

    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert [line for line in lines if not re.fullmatch(r"[a-z0-9-]+==[0-9][0-9a-z.]*", line)] == []
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = project["dependencies"] + project["optional-dependencies"]["dev"]
    names = {re.split(r"[<>=\[ ]", requirement)[0].lower() for requirement in wanted}
    assert names - {line.split("==")[0] for line in lines} == set()
