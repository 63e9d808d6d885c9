"""`autotune export` as users run it: the file, and on standard error what it cannot say."""

import json

import yaml

from autotune.testing.studies import make_study


def test_a_file_that_ends_in_json_is_json_and_standard_error_says_what_is_missing(cli):
    make_study(cli.cwd / "runs")
    ended = cli("export", "resnet18", "--format", "hf", "-o", "tuned/hf.json")
    assert ended.returncode == 0, ended.stderr
    assert json.loads((cli.cwd / "tuned" / "hf.json").read_text())["bf16"] is True
    assert ended.stdout == ""
    first, *others = ended.stderr.splitlines()
    assert first == "wrote tuned/hf.json"
    assert "not expressible in hf; `autotune apply` sets these, too:" in others
    assert any(line.startswith("  layout.channels_last=true: ") for line in others)


def test_without_a_file_it_is_yaml_with_comments_on_standard_output(cli):
    make_study(cli.cwd / "runs")
    ended = cli("export", "--format", "accelerate")
    assert yaml.safe_load(ended.stdout)["mixed_precision"] == "bf16"
    assert ended.stdout.startswith("# autotune: the best configuration found for resnet18")
    assert "# Load: accelerate launch --config_file" in ended.stdout


def test_help_names_every_format(cli):
    said = " ".join(cli("export", "--help").stdout.replace("│", " ").split())
    assert "yaml, env, python, hf, lightning, accelerate or deepspeed" in said
