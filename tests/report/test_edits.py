"""After a single edit of summary.json, each command reads the file or names the wrong place, without an internal error."""

import copy
import json
import math
import random
import shutil

import pytest

from autotune.cli import show
from autotune.cli.explain import print_why
from autotune.cli.export import export
from autotune.cli.main import main
from autotune.cli.report import Asked, report
from autotune.errors import BadInput
from autotune.export.formats import FORMATS
from autotune.run_dir import StudyFolder

VALUES = (7, -1, 10**400, math.nan, "x", None, [], [1], {}, {"a": 1}, True, 0.5)
NUM_EDITS = 25
ROOT = 25  # seed of the random choice of edits


def places(document, at=()):
    """Yields the path of every value in a document."""
    items = document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    for key, value in items:
        yield (*at, key)
        yield from places(value, (*at, key))


def edited(document, place, value):
    made = copy.deepcopy(document)
    inner = made
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return made


@pytest.fixture
def study(complete, tmp_path, monkeypatch):
    """A study with little more than its summary, so that its report is made quickly."""
    monkeypatch.chdir(tmp_path)
    made = tmp_path / "runs" / "s"
    shutil.copytree(complete.path, made, ignore=shutil.ignore_patterns("explain", "*.log", "*.html", "compile_cache"))
    return made


def commands(folder, number):
    """Yields the actions of the commands that read a summary. `number` chooses the format and the way to show a study."""
    yield lambda: show.print_study(folder, as_json=number % 4 == 0)
    yield lambda: print_why(folder, None, as_json=False)
    yield lambda: export(folder, format_=FORMATS[number % len(FORMATS)], tier=None, output=None, as_json=False)
    yield lambda: report(Asked(studies=[str(folder.path)], runs=folder.path.parent, output="x.html"), as_json=False)


@pytest.mark.thorough
def test_no_single_edit_of_a_summary_ends_in_an_internal_error(study, capsys):
    whole = json.loads((study / "summary.json").read_text())
    edits = [(place, value) for place in places(whole) for value in VALUES]
    assert len(edits) > 5000
    named = {}
    for number, (place, value) in enumerate(random.Random(ROOT).sample(edits, NUM_EDITS)):
        (study / "summary.json").write_text(json.dumps(edited(whole, place, value)))
        show.print_studies(study.parent, as_json=False)
        for run in commands(StudyFolder(study), number):
            try:
                run()
            except BadInput as error:
                if "not a summary, got: " in str(error):
                    named[place, repr(value)] = str(error)
                    break
    for (place, _), message in named.items():
        assert f"s/summary.json: not a summary, got: {place[0]}" in message
    assert NUM_EDITS / 4 < len(named) < NUM_EDITS  # the others leave a summary that can be shown
    assert capsys.readouterr().out.count("unreadable: summary.json: ") == len(named)


@pytest.mark.parametrize("key", ["precision.amp", "loader.num_workers", "loader.batch_size"])
@pytest.mark.parametrize("value", [3, "x", True, -1.5])
def test_best_configuration_with_an_invalid_knob_value_is_not_exported(study, capsys, key, value):
    file = study / "summary.json"
    whole = json.loads(file.read_text())
    whole["best"]["overrides"][key] = value
    file.write_text(json.dumps(whole))
    is_value = (key, value) in (("loader.num_workers", 3), ("loader.batch_size", 3))
    for form in ("yaml", "hf", "lightning", "deepspeed"):
        assert main(["export", "s", "-f", form]) == (0 if is_value else 2)
        assert is_value or f"autotune: {key}: " in capsys.readouterr().err
    assert main(["report", "s"]) == 0
