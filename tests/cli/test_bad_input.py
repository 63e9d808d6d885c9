"""A user's mistakes end with exit code 2 and one message that names the nearest valid word, without a traceback."""

from pathlib import Path

import pytest

from autotune.cli.main import main
from tests.support.studies import make_study


def test_unknown_command_suggests_the_nearest_one(cli):
    assert "no such command, got 'rnu'. Did you mean 'run'?" in cli.refused("rnu")


def test_program_without_an_autotune_command_is_refused(cli):
    for words in (["--", "python", "train.py"], ["--debug", "--", "python"]):
        assert "COMMAND: missing before the --, got -- python ... To tune a program: autotune run -- " in cli.refused(*words)


@pytest.mark.parametrize(
    ("words", "option", "other"),
    [
        (["verify", "resnet18", "--long-minutes", "5"], "--long-minutes", "--long"),
        (["explain", "resnet18", "--finding", "2"], "--finding", "--fixed"),
        (["explain", "resnet18", "--pairs", "8"], "--pairs", "--fixed"),
        (["report", "resnet18", "--width", "360"], "--width", "--picture"),
    ],
)
def test_an_option_that_would_have_no_effect_is_refused(tmp_path, monkeypatch, capsys, words, option, other):
    monkeypatch.chdir(tmp_path)
    make_study(tmp_path / "runs")
    assert main(words) == 2
    assert f"{option}: has an effect only together with {other}, got {words[-1]}. Give both, or" in capsys.readouterr().err


def test_unknown_option_suggests_the_nearest_one(cli):
    message = cli.refused("show", "--jsn")
    assert "no such option, got '--jsn'. Did you mean '--json'?" in message
    assert "autotune show --help" in message


def test_option_without_its_value_is_refused(cli):
    message = cli.refused("list", "--runs-dir")
    assert message.startswith("autotune: list: option '--runs-dir' requires an argument. See `autotune list --help`")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["show", "--trial", "one"], "--trial: not a whole number, got 'one'. Allowed: whole numbers from 0."),
        (["show", "--trial=1.5"], "--trial: not a whole number, got '1.5'. Allowed: whole numbers from 0."),
        (["show", "--trial", "-1"], "--trial: out of range, got '-1'. Allowed: whole numbers from 0."),
        (["verify", "b.yaml", "--minutes", "x"], "--minutes: not a number, got 'x'. Allowed: numbers from 0.1."),
        (["ui", "--port", "70000"], "--port: out of range, got '70000'. Allowed: whole numbers from 1 to 65535."),
    ],
)
def test_invalid_number_is_refused_with_the_allowed_range(cli, words, said):
    assert cli.refused(*words) == f"autotune: {said} See `autotune {words[0]} --help`.\n"


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("modle=resnet18", "model"),
        ("dta=photos", "data"),
        ("modle.name=resnet18", "model.name"),
        ("serach_space=quick", "search_space"),
    ],
)
def test_mistyped_key_suggests_the_nearest_one(cli, word, meant):
    assert f"{word.partition('=')[0]}: there is no such key, got" in (said := cli.refused("run", word))
    assert f"Did you mean '{meant}'?" in said


def test_message_for_an_unknown_study_lists_the_existing_studies(cli):
    make_study(cli.cwd / "runs")
    message = cli.refused("show", "resnet19")
    assert "no such study in 'runs', got 'resnet19'" in message
    assert "resnet18" in message


def test_show_without_any_study_says_how_to_make_one(cli):
    assert "autotune run" in cli.refused("show")


def test_path_without_a_study_is_refused(cli):
    assert "no such study, got '../secrets'" in cli.refused("show", "../secrets")


def test_unknown_export_format_suggests_the_nearest_one(cli):
    make_study(cli.cwd / "runs")
    message = cli.refused("export", "resnet18", "--format", "ymal")
    assert "got 'ymal'. Did you mean 'yaml'?" in message


def test_unknown_tier_suggests_the_nearest_one(cli):
    make_study(cli.cwd / "runs")
    assert "got 'exakt'. Did you mean 'exact'?" in cli.refused("export", "--tier", "exakt")


def test_export_to_a_file_that_cannot_be_written_is_refused(cli):
    make_study(cli.cwd / "runs")
    assert "--output: cannot be written" in cli.refused("export", "-o", "/proc/best.yaml")


def test_damaged_summary_is_refused_without_a_traceback(cli):
    folder = make_study(cli.cwd / "runs")
    folder.summary_file.write_text("{", encoding="utf-8")
    assert "not a summary" in cli.refused("show")


def test_unknown_knob_suggests_the_nearest_one(cli):
    assert "loader.num_workers" in cli.refused("knobs", "loader.num_worker")


@pytest.mark.parametrize("host", ["192.0.2.7", "\u00e4" * 70, ""])
def test_ui_refuses_a_host_address_that_this_machine_does_not_have(tmp_path, monkeypatch, capsys, host):
    monkeypatch.chdir(tmp_path)
    assert main(["ui", "--host", host]) == 2
    assert f"--host: cannot be listened on, got {host!r} (" in capsys.readouterr().err


def test_port_in_use_is_refused(cli):
    import socket

    make_study(cli.cwd / "runs")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"--port: cannot be listened on, got {port}" in cli.refused("ui", "--port", str(port))


def test_ui_without_studies_says_how_to_make_one(cli):
    assert "autotune run" in cli.refused("ui")


@pytest.mark.parametrize("runs_dir", ["afile/runs", "/proc/runs"])
def test_runs_folder_that_cannot_be_written_is_refused(cli, runs_dir):
    (cli.cwd / "afile").write_text("", encoding="utf-8")  # not even root can make a file below a file
    (cli.cwd / "train.py").write_text("", encoding="utf-8")
    message = cli.refused("run", "--runs-dir", runs_dir, "--", "python", "train.py")
    assert "runs_dir: cannot be written" in message


@pytest.mark.thorough
def test_script_that_does_not_exist_is_refused(cli):
    assert "nope.py" in cli.refused("run", "--", "python", "nope.py")
    assert not (cli.cwd / "runs").exists()


def test_run_without_a_command_after_the_dashes_is_refused(cli):
    assert "no command after '--'" in cli.refused("run", "--")


def test_run_without_a_program_is_refused(cli):
    assert "autotune run -- python train.py" in cli.refused("run")


@pytest.mark.thorough
def test_all_problems_of_one_input_are_reported_at_once(cli):
    message = cli.refused("run", "model=resnet19", "loader.num_wrokers=4", "study.name=a/b")
    assert "resnet19" in message
    assert "num_wrokers" in message
    assert "a/b" in message


def test_runs_dir_given_twice_is_refused(cli):
    assert "given twice" in cli.refused("run", "--runs-dir", "a", "runs_dir=b", "model=resnet18")


def test_unknown_value_of_info_is_refused(cli):
    assert "Allowed: searchpath" in cli.refused("run", "--info", "everything", "model=resnet18")


def test_config_folder_that_does_not_exist_is_refused(cli):
    assert "no such folder" in cli.refused("run", "--config-dir", "nowhere", "--cfg", "model=resnet18")


def test_refused_commands_leave_no_files(cli):
    cli.refused("run", "model=resnet19")
    assert list(Path(cli.cwd).iterdir()) == []


@pytest.mark.parametrize("words", [["doctor", "x" * 9000], ["x" * 9000, "--", "python", "train.py"]])
def test_message_shortens_an_argument_of_thousands_of_characters(cli, words):
    message = cli.refused(*words)
    assert "x" * 80 + "..." in message
    assert len(message) < 600
