"""`autotune export` as users run it: the file, and on standard error the settings that it cannot express."""

import json
import os
import subprocess
import sys

import pytest
import yaml

from autotune.cli.main import main
from tests.support.rows import more
from tests.support.studies import make_study


def test_json_output_file_contains_json_and_inexpressible_settings_are_listed(cli):
    make_study(cli.cwd / "runs")
    ended = cli("export", "resnet18", "--format", "hf", "-o", "tuned/hf.json")
    assert ended.returncode == 0, ended.stderr
    assert json.loads((cli.cwd / "tuned" / "hf.json").read_text())["bf16"] is True
    assert ended.stdout == ""
    first, *others = ended.stderr.splitlines()
    assert first == "wrote tuned/hf.json, in the new folder tuned"
    assert "not expressible in hf, but set by `autotune apply` and included in --format yaml:" in others
    assert any(line.startswith("  layout.channels_last=true: ") for line in others)


def test_export_without_a_file_prints_commented_yaml(cli):
    make_study(cli.cwd / "runs")
    ended = cli("export", "--format", "accelerate")
    assert yaml.safe_load(ended.stdout)["mixed_precision"] == "bf16"
    assert ended.stdout.startswith("# autotune: the best configuration found for resnet18")
    assert "# Load: accelerate launch --config_file" in ended.stdout


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["--tier", "numerics"], "best-numerics.yaml"),
        *more(([], "best.yaml"), (["--format", "python"], "best.py"), (["--format", "deepspeed"], "ds_config.json")),
    ],
)
def test_export_to_a_folder_uses_the_usual_file_name(cli, words, name):
    make_study(cli.cwd / "runs")
    (cli.cwd / "out").mkdir()
    for folder in ("out", "out/"):
        ended = cli("export", *words, "-o", folder)
        assert ended.returncode == 0, ended.stderr
        assert ended.stderr.startswith(f"wrote out/{name}\n")
    assert [path.name for path in (cli.cwd / "out").iterdir()] == [name]


@pytest.mark.parametrize(
    "words",
    [("export", "-f", "deepspeed"), *(pytest.param(words, marks=pytest.mark.thorough) for words in (("export",), ("report",)))],
)
def test_a_file_is_replaced_only_if_autotune_wrote_it_or_with_force(cli, words):
    make_study(cli.cwd / "runs")
    file = cli.cwd / "out"
    file.write_text("# mine\n")
    message = "--output: the file exists and does not look like one of autotune's, got 'out'. Give another file, or --force"
    assert message in cli.refused(*words, "-o", "out")
    assert file.read_text() == "# mine\n"
    written = cli(*words, "-o", "out", "--force")
    assert written.returncode == 0, written.stderr
    assert "wrote out" in written.stdout + written.stderr
    once = file.read_text()
    assert "# mine" not in once
    assert cli(*words, "-o", "out").returncode == 0, "the file is autotune's own now"
    if words[-1] != "deepspeed":  # JSON has no comment that says who wrote it
        file.write_text(once + "\n")
        assert cli(*words, "-o", "out").returncode == 0
    file.write_text("")
    assert cli(*words, "-o", "out").returncode == 0, "an empty file may be replaced"


@pytest.mark.thorough
@pytest.mark.parametrize("encoding", ["utf-8:strict", "ascii:strict"])
def test_names_that_the_terminal_cannot_show_are_escaped(cli, encoding):
    cli.cwd /= os.fsdecode(b"caf\xe9")
    make_study(cli.cwd / "runs")
    cli.environment["PYTHONIOENCODING"] = encoding
    name = os.fsdecode("ü".encode() + b"\xff.html")
    shown = "wrote \\xfc\\udcff.html\n" if encoding == "ascii:strict" else "wrote ü\\udcff.html\n"
    assert cli.start("report", "-o", name).communicate()[0] == shown  # a fork would keep this process's encoding
    assert (cli.cwd / name).exists()
    assert json.loads(cli("report", "-o", name, "--json").stdout)["file"] == name
    assert cli("sync", "--uri", "none").returncode == 0


def test_export_notes_a_tier_without_measurements_on_standard_error(cli):
    folder = make_study(cli.cwd / "runs")
    summary = folder.read_summary()
    summary["best_by_tier"]["exact"] = {**summary["baseline"], "overrides": {}}
    summary["trials"] = [trial for trial in summary["trials"] if trial["tier"] != "exact" or not trial["changed"]]
    folder.write_summary(summary)
    ended = cli("export", "--tier", "exact", "-o", "exact.yaml")
    assert ended.returncode == 0
    assert "note: Up to tier exact, only the baseline was measured" in ended.stderr
    assert "exact tried only with others: workers 2" in " ".join(cli("show").stdout.replace("\u2502", "").split())
    summary["best"]["overrides"].pop("loader.num_workers")
    folder.write_summary(summary)
    assert "exact nothing tried" in " ".join(cli("show").stdout.split())


def test_tiers_are_shown_only_if_one_changes_something(cli):
    folder = make_study(cli.cwd / "runs")
    summary = folder.read_summary()
    baseline = {**summary["baseline"], "overrides": {}}
    summary |= {"best_by_tier": {"exact": baseline, "numerics": baseline, "training": summary["best"]}}
    folder.write_summary(summary)
    shown = " ".join(cli("show").stdout.replace("\u2502", "").split())
    assert "exact tried only with others: workers 2 numerics 16.8 samples/s 1.00x unchanged training 40.6" in shown
    summary |= {"best": baseline, "best_by_tier": dict.fromkeys(("exact", "numerics", "training"), baseline)}
    folder.write_summary(summary)
    assert "best by tier" not in cli("show").stdout


def test_env_file_that_sets_nothing_says_so_and_names_the_complete_format(cli):
    make_study(cli.cwd / "runs")
    ended = cli("export", "--format", "env", "-o", "best.env")
    assert ended.returncode == 0, ended.stderr
    assert "export " not in (cli.cwd / "best.env").read_text()
    said = ended.stderr.splitlines()
    assert "note: No setting of this configuration is an environment variable, so this file sets nothing." in said
    assert "not expressible in env, but set by `autotune apply` and included in --format yaml:" in said
    left_out = {line.partition("=")[0].strip() for line in said if line.startswith("  ")}
    assert left_out == {"precision.amp", "layout.channels_last", "loader.batch_size", "loader.num_workers"}


@pytest.mark.parametrize(("words", "status"), [("export", 2), ("export -o best.yaml", 0), ("report -o -", 2)])
def test_closed_standard_output_is_refused_if_it_is_to_get_the_text(cli, words, status):
    make_study(cli.cwd / "runs")
    line = f'exec "$0" -m autotune {words} >&-'
    ended = subprocess.run(
        ["sh", "-c", line, sys.executable], cwd=cli.cwd, env=cli.environment, stderr=subprocess.PIPE, text=True
    )
    assert ended.returncode == status, ended.stderr
    assert ("--output: standard output is closed" in ended.stderr) is (status == 2)


def test_sync_of_all_studies_prints_one_json_document(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        make_study(tmp_path / "runs", name)
    assert main(["sync", "--all", "--uri", "none", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [
        {"study": name, "uri": "none", "written": 0, "present": 0} for name in ("a", "b")
    ]


def test_sync_of_all_studies_names_those_with_another_address(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STORE", "none")
    for name, uri in (("a", "${oc.env:STORE}"), ("b", "http://***@host")):
        make_study(tmp_path / "runs", name).config_file.write_text(f"tracker:\n  uri: {uri}\n")
    assert main(["sync", "--all", "--uri", "none"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("a: nothing is tracked")
    assert second == "b: skipped, since its tracker.uri is 'http://***@host'"


def test_help_names_every_format(cli):
    said = " ".join(cli("export", "--help").stdout.replace("│", " ").split())
    assert "yaml, env, python, hf, lightning, accelerate or deepspeed" in said
