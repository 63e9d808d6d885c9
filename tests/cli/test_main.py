import os
import subprocess
import sys

import pytest

from autotune import __version__
from autotune.cli import app
from autotune.cli import main as cli_main
from autotune.cli.main import main, split
from autotune.launchers.environment import own_environment
from tests.support.rows import more

COMMANDS = sorted(app.build().commands)


def test_words_after_the_first_dashes_are_the_command():
    assert split(["run", "a=1", "--", "python", "x.py", "--", "-v"]) == (["run", "a=1"], ["python", "x.py", "--", "-v"])


def test_without_dashes_there_is_no_command():
    assert split(["list"]) == (["list"], None)


def test_help_option_after_the_dashes_belongs_to_the_program():
    assert split(["run", "--", "python", "x.py", "--help"])[0] == ["run"]


def test_version(cli):
    assert cli("--version").stdout == f"autotune {__version__}\n"


def test_help_lists_every_command(cli):
    ended = cli("--help")
    assert ended.returncode == 0
    assert {"run", "resume", "show", "explain"} <= set(COMMANDS)
    for name in COMMANDS:
        assert f" {name} " in ended.stdout, name


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_help_page(capsys, name):
    assert main([name, "--help"]) == 0
    assert f"autotune {name}" in capsys.readouterr().out


def examples():
    """Returns (command, example) for every example in the help of a command."""
    commands = app.build().commands.items()
    return [(name, line.strip()) for name, command in commands for line in command.help.splitlines() if line[:4] == "    "]


def test_every_example_in_a_help_page_is_on_a_separate_line(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("NO_COLOR", "1")
    found = examples()
    assert len(found) > 20
    for name, example in found:
        assert main([name, "--help"]) == 0
        assert example in [line.strip() for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize("words", [["list"], ["list", "--help"]])
@pytest.mark.parametrize(
    ("name", "size"),
    [("COLUMNS", "\u00b2"), *more(("COLUMNS", "0"), ("COLUMNS", "9" * 20), ("LINES", "\u00b280"), ("TERMINAL_WIDTH", "a"))],
)
def test_invalid_terminal_size_in_the_environment_is_ignored(cli, name, size, words):
    del cli.environment["COLUMNS"]
    ended = cli(*words)
    cli.environment[name] = size
    again = cli(*words)
    assert (ended.returncode, ended.stderr, bool(ended.stdout)) == (0, "", True)
    assert (again.returncode, again.stderr, again.stdout) == (0, "", ended.stdout)


@pytest.mark.parametrize("words", [["--help"], ["run", "--help"], ["list"], ["show", "--help"]])
def test_help_and_list_load_no_heavy_library(cli, words):
    code = (
        "import sys; from autotune.cli.main import main; main(sys.argv[1:]);"
        "heavy = ('torch', 'mlflow', 'optuna', 'hydra', 'omegaconf', 'numpy', 'psutil');"
        "print([m for m in heavy if m in sys.modules], file=sys.stderr)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, *words], cwd=cli.cwd, env=cli.environment, capture_output=True, text=True, check=True
    )
    assert ended.stderr == "[]\n"


def test_internal_error_prints_one_line_and_writes_its_traceback_to_a_file(monkeypatch, capsys):
    def broken(*_):
        raise RuntimeError("the moon is full")

    monkeypatch.setattr(cli_main, "_run", broken)
    assert main(["list"]) == 1
    said = capsys.readouterr().err
    assert "internal error: RuntimeError: the moon is full" in said
    file = said.split("traceback is in ")[1].split(";")[0]
    with open(file, encoding="utf-8") as log:
        assert "Traceback" in log.read()
    os.unlink(file)


def test_debug_option_prints_the_traceback_of_an_internal_error_without_secrets(monkeypatch, capsys):
    def broken(*_):
        raise RuntimeError("no page at http://me:s3cret@host")

    monkeypatch.setattr(cli_main, "_run", broken)
    assert main(["--debug", "list"]) == 1
    said = capsys.readouterr().err
    assert "Traceback (most recent call last)" in said
    assert "RuntimeError: no page at http://***@host" in said
    assert "s3cret" not in said


def test_interrupt_exits_with_status_130_and_says_so(monkeypatch, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("autotune.cli.show.print_studies", interrupted)
    assert main(["list"]) == 130
    assert capsys.readouterr().err == "autotune: interrupted\n"


@pytest.mark.parametrize("is_buffered", [True, False])
@pytest.mark.parametrize("words", ["show --json", "list", "list --json"])
def test_closed_pipe_causes_no_error(cli, words, is_buffered):
    from tests.support.studies import make_study

    make_study(cli.cwd / "runs")
    ended = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {sys.executable} -m autotune {words} | true"],
        cwd=cli.cwd,
        env={**cli.environment, "PYTHONUNBUFFERED": "" if is_buffered else "1"},
        capture_output=True,
        text=True,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


@pytest.mark.parametrize("words", [["list"], ["list", "--json"]])
def test_full_disk_gives_a_one_line_message(cli, words):
    environment = {**cli.environment, "PYTHONUNBUFFERED": ""}
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "autotune", *words], cwd=cli.cwd, env=environment, stdout=full, stderr=subprocess.PIPE
        )
    assert ended.returncode == 1
    assert ended.stderr.decode().splitlines() == [
        "autotune: output: cannot be written, the disk is full (No space left on device). Free some space and try again."
    ]


@pytest.mark.parametrize(
    ("closed", "words", "code"), [("2>&-", "show nosuch", 2), (">&-", "list", 0), ("<&- >&- 2>&-", "list", 0)]
)
def test_closed_standard_streams_print_nothing_and_keep_their_descriptors(tmp_path, closed, words, code):
    numbers = "import os, sys; [os.fstat(n) for n in range(3)]; assert None not in (sys.stdin, sys.stdout, sys.stderr)"
    program = f"import sys; from autotune.cli.main import main; code = main(); {numbers}; sys.exit(code)"
    line = f'exec "$0" -P -c "$1" {words} {closed}'
    ended = subprocess.run(
        ["sh", "-c", line, sys.executable, program], cwd=tmp_path, env=own_environment(), capture_output=True, text=True
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (code, "", "")


def test_configuration_is_printed_as_yaml(cli):
    ended = cli("run", "model=resnet18", "loader.num_workers=2", "--cfg")
    assert ended.returncode == 0, ended.stderr
    assert "num_workers: 2" in ended.stdout


def test_searchpath_names_the_configuration_folders_in_the_order_they_are_searched(cli):
    for number, name in ((34, "mine"), (50, "other")):
        (cli.cwd / name / "model").mkdir(parents=True)
        (cli.cwd / name / "model" / "resnet18.yaml").write_text(f"name: resnet{number}\n", encoding="utf-8")
    where = ["--config-dir", "mine", "--config-dir", "other"]
    paths = cli("run", *where, "--info", "searchpath", "model=resnet18").stdout.splitlines()
    assert paths[:2] == [str(cli.cwd / "mine"), str(cli.cwd / "other")]
    assert paths[2].endswith("conf")
    assert len(paths) == 3
    assert "name: resnet34" in cli("run", *where, "--cfg", "model=resnet18").stdout


def test_call_without_arguments_prints_the_help(cli):
    ended = cli()
    assert ended.returncode == 0
    assert ended.stderr == ""
    assert "Usage: autotune [OPTIONS] COMMAND" in ended.stdout


def test_help_of_run_lists_the_keys_with_their_defaults(cli):
    said = cli("run", "--help").stdout
    for words in ("study.budget.minutes=8", "loader.*", "num_workers", "autotune knobs", "tracker.uri=null"):
        assert words in said
    assert max(map(len, said.splitlines())) <= 80


def test_runs_folder_with_characters_of_the_hydra_grammar_is_used_unchanged(cli):
    ended = cli("run", "--runs-dir", "my runs, [2]", "--cfg", "model=resnet18")
    assert ended.returncode == 0, ended.stderr
    assert "runs_dir: my runs, [2]" in ended.stdout
