import json
import re
import shlex
import subprocess
import sys

import pytest
from rich.console import Console
from rich.table import Table
from rich.text import Text

from autotune.cli import trials
from autotune.cli.main import main
from autotune.cli.terminal import THEME, Lines
from autotune.plain_text import plain
from autotune.run_dir import StudyFolder
from tests.support.rows import more
from tests.support.studies import make_study


def test_the_ranks_of_a_trial_fit_80_columns():
    entry = {"rank": 1, "rate_per_s": 92877.0, "data_wait_frac": 0.12, "exposed_s": 0.3, "step_s": 1.0}
    ranks = {"by_rank": [{**entry, "peak_memory_bytes": 911 << 20}], "stragglers": [1], "communication": None}
    console = Console(width=80, theme=THEME)
    with console.capture() as said:
        console.print(trials.ranks({"best": {"trial": 12}, "unit": "samples", "trials": [{"number": 12, "ranks": ranks}]}))
    assert "911 MiB" in said.get()
    assert "the other ranks wait for it" in said.get()


def test_list_looks_like_a_rich_table_except_for_trailing_blanks():
    header, rows = ["study", "started", "verdict"], [["net", "", "faster: 2.41x"], ["日本語", "2026-05-28 20:26", ""]]
    table = Table(box=None, header_style="quiet", padding=(0, 2, 0, 0), pad_edge=False)
    for name in header:
        table.add_column(name)
    for first, *others in rows:
        table.add_row(Text(first, style="name"), *map(Text, others))
    consoles = [Console(width=width, theme=THEME, force_terminal=True, color_system="standard") for width in (60, 60)]
    said = []
    for console, shown in zip(consoles, (Lines(header, rows), table), strict=True):
        with console.capture() as captured:
            console.print(shown)
        said.append([re.sub(r"(\s|\x1b\[[0-9;]*m)+$", "", line) for line in captured.get().splitlines()])
    assert [plain(line) for line in said[0]] == [plain(line) for line in said[1]]
    assert Lines(header, rows).width == 6 + 2 + 16 + 2 + 13
    assert all(line.startswith("\x1b[") for line in said[0])


@pytest.mark.parametrize("words", [["list"], ["prune"]])
def test_brackets_in_a_folder_name_are_not_read_as_markup(cli, words):
    ended = cli(*words, "--runs-dir", "x[b][/y]")
    assert ended.returncode == 0, ended.stderr
    assert " in x[b][/y]." in ended.stdout


def test_brackets_in_the_texts_of_a_study_are_not_read_as_markup(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    study = make_study(tmp_path / "runs").path.rename(tmp_path / "runs" / "a [b]")
    for file in (study / "trials" / "0001" / "trial.json", study / "summary.json"):
        document = json.loads(file.read_text())
        document["unit"] = "tokens[/u]"
        file.write_text(json.dumps(document))
    record = json.loads((study / "trials" / "0001" / "trial.json").read_text())
    record["knob_reports"] = {"precision.amp": {"status": "overridden", "reason": "[enforce fail at alloc.cpp] [/tmp]"}}
    record["knobs"]["env.LIST"] = "[a,b]"
    (study / "trials" / "0001" / "trial.json").write_text(json.dumps(record))
    assert main(["show", "a [b]", "--trial", "1"]) == 0
    said = capsys.readouterr().out
    assert "overridden: [enforce fail at alloc.cpp] [/tmp]" in said
    assert "[a,b]" in said
    assert main(["show", "a [b]"]) == 0
    said = capsys.readouterr().out
    assert "\u256d\u2500  a [b]  \u2500" in said
    assert "tokens[/u]/s" in said


@pytest.fixture
def study(cli):
    return make_study(cli.cwd / "runs")


def test_list_wraps_long_values_and_cuts_nothing(cli, study):
    with make_study(cli.cwd / "runs", "nanogpt", status="running", num_trials=2).claimed():
        said = cli("list").stdout
    assert "…" not in said
    assert "resnet18" in said
    assert "faster: 2.41x [2.36, 2.46]" in said
    assert "running" in said


def test_list_without_studies_says_how_to_make_one(cli):
    ended = cli("list")
    assert ended.returncode == 0
    assert "autotune run model=resnet18" in ended.stdout


def test_list_is_available_as_json(cli, study):
    assert [row["study"] for row in json.loads(cli("list", "--json").stdout)] == ["resnet18"]


def test_show_without_a_name_shows_the_study_that_was_created_last(cli, study):
    later = make_study(cli.cwd / "runs", "aaa")
    record = later.read_study()
    record.started_at -= 100  # the clock was set back
    later.write_study(record)
    assert [row["study"] for row in json.loads(cli("list", "--json").stdout)] == ["resnet18", "aaa"]
    assert cli("show").stdout.startswith("aaa")


@pytest.mark.thorough
def test_show_with_a_default_name_shows_the_latest_study_of_that_name(cli, study):
    make_study(cli.cwd / "runs")
    assert cli("show", "resnet18").stdout.startswith("resnet18-2")


def test_show_json_prints_the_stored_summary(cli, study):
    assert json.loads(cli("show", "--json").stdout) == study.read_summary()


def test_show_offers_no_export_for_a_running_study(cli):
    with make_study(cli.cwd / "runs", status="running", num_trials=1).claimed():
        said = cli("show").stdout
    assert "running" in said
    assert "autotune export" not in said


def test_show_of_a_study_without_trials_explains_no_columns(tmp_path, monkeypatch, capsys):
    make_study(tmp_path / "runs", status="interrupted", num_trials=0)
    monkeypatch.chdir(tmp_path)
    assert main(["show"]) == 0
    said = capsys.readouterr().out
    assert "no trial has ended" in said
    assert "rate of the training step alone" not in said


@pytest.mark.thorough
def test_next_commands_name_another_runs_folder(cli):
    make_study(cli.cwd / "elsewhere")
    assert "autotune ui --runs-dir elsewhere" in cli("show", "--runs-dir", "elsewhere").stdout


@pytest.mark.parametrize(("width", "absent"), [(80, "ratio, memory"), (None, ""), *more((60, "ratio, D, L, memory"), (96, ""))])
def test_columns_that_do_not_fit_are_named_below_the_table(cli, study, width, absent):
    cli.environment.pop("COLUMNS")
    if width:
        cli.environment["COLUMNS"] = str(width)
    shown = cli("show").stdout
    head = next(line for line in shown.splitlines() if line.startswith("trial "))
    missing = [name for name in ("ratio", "D", "L", "memory") if name not in head.split()]
    assert ", ".join(missing) == absent
    assert ("D: rate of the training step alone" in " ".join(shown.split())) == ("D" not in missing)
    said = f"width {width}: without {absent}; a terminal of 96 columns or --json shows them"
    assert (said in " ".join(shown.split())) == bool(absent)


def test_a_narrow_list_leaves_room_for_the_program(cli, study):
    make_study(cli.cwd / "runs", "transformer-with-a-long-name")
    cli.environment["COLUMNS"] = "50"
    head, *rows = cli("list").stdout.splitlines()
    assert head.split() == ["study", "program", "verdict"]
    assert "resnet18 on" in rows[0]


def test_export_goes_to_standard_output_or_a_file(cli, study):
    ended = cli("export", "resnet18")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("# @package _global_")
    assert "bf16" in ended.stdout
    assert cli("export", "-o", "mine.yaml").returncode == 0
    assert (cli.cwd / "mine.yaml").read_text() == ended.stdout


def test_export_of_a_running_study_is_refused(cli):
    make_study(cli.cwd / "runs", status="running", num_trials=1)
    assert "no winner" in cli.refused("export")


@pytest.mark.thorough
def test_sync_reports_what_it_wrote_or_how_to_complete_it(cli, study):
    assert "8 trials written, 0 already there" in cli("sync").stdout
    message = cli.refused("sync", "--uri", "http://127.0.0.1:9")
    assert "8 trials of resnet18 are not tracked yet, nothing is lost" in message
    assert "`autotune sync resnet18 --uri http://127.0.0.1:9` completes it" in message
    message = cli.refused("sync", "--uri", "http://me:s3cret@127.0.0.1:9")
    assert "`autotune sync resnet18 --uri URI` completes it" in message  # a command with *** in it would not work


def test_list_names_the_script_and_not_its_interpreter_at_eighty_columns(cli, study):
    record = study.read_study()
    record.title = "/home/somebody/.local/share/virtualenvs/project/bin/python3.11 train.py --epochs 90"
    study.write_study(record)
    assert "train.py" in cli("list").stdout


def test_printed_commands_work_unchanged_for_any_runs_folder(cli):
    make_study(cli.cwd / "my runs; [x]")
    cli.environment["COLUMNS"] = "120"
    said = cli("show", "--runs-dir", "my runs; [x]").stdout
    commands = [line.strip("\u2502 ").removeprefix("next").strip() for line in said.splitlines() if "autotune " in line]
    assert len(commands) == 4
    for command in commands[:3]:
        words = shlex.split(command)
        assert words[words.index("--runs-dir") + 1] == "my runs; [x]"
        assert cli(*(word for word in words[1:] if word != "--open")).returncode == 0


def test_knobs_are_listed_by_family_and_searched_ones_are_marked(cli):
    said = cli("knobs").stdout
    assert max(map(len, said.splitlines())) <= 80
    assert re.search(r"^\* loader\.num_workers +exact +processes that load data", said, re.MULTILINE)
    assert re.search(r"^  threads\.omp ", said, re.MULTILINE)
    assert "threads.mkl" not in cli("knobs", "nccl").stdout
    assert "When it helps" in cli("knobs", "loader.num_workers").stdout


def test_list_reads_each_document_of_every_study_once(tmp_path):
    for number in range(6):
        make_study(tmp_path / "runs", status="interrupted" if number % 2 else "complete")
    script = (
        "import collections, sys; from autotune.cli.main import main; opened = collections.Counter();"
        "sys.addaudithook(lambda name, said: opened.update([str(said[0])] if name == 'open' else []));"
        "main(['list']); print(*{f'{n} {f}' for f, n in opened.items() if 'runs/' in f}, sep='\\n', file=sys.stderr)"
    )
    ended = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.count("to continue") == 3
    opened = sorted(line for line in ended.stderr.splitlines() if "json" in line)
    names = ("owner.json", "study.json", "summary.json")
    assert [line for line in opened if "owner" not in line] == sorted(
        f"1 runs/{folder.name}/{name}" for folder in (tmp_path / "runs").iterdir() for name in names[1:]
    )
    assert all(line.startswith("1 ") for line in opened)


def test_outline_is_read_without_the_trials_of_the_summary(tmp_path, monkeypatch):
    folder = make_study(tmp_path / "runs")
    summary = {**folder.read_summary(), "num_trials": 8}
    folder.write_summary(summary)
    monkeypatch.setattr(StudyFolder, "read_summary", lambda _: pytest.fail("all of the summary was read"))
    assert folder.read_outline() == {**summary, "trials": []}


@pytest.mark.parametrize("end", [-1, -200], ids=["a byte short", "cut short"])
def test_an_outline_of_a_damaged_summary_is_refused(tmp_path, end):
    folder = make_study(tmp_path / "runs")
    folder.write_summary({**folder.read_summary(), "num_trials": 8})
    folder.summary_file.write_text(folder.summary_file.read_text()[:end])
    with pytest.raises(ValueError, match=r"delimiter|Expecting|Unterminated"):
        folder.read_outline()
