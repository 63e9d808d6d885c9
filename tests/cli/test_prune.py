"""`autotune prune`: what it finds, what it removes, and what it never touches."""

import errno
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from autotune.cli import prune
from autotune.cli.main import main
from autotune.owner import held
from autotune.quantities import bytes_text
from autotune.run_dir import StudyFolder
from autotune.trackers.store import LOCK_FILE
from tests.cli.conftest import Cli
from tests.faults.quick_study import QuickStudy, kill, measured
from tests.support.studies import make_study

MEBIBYTE = 2**20


def content(place: Path) -> dict[str, bytes]:
    """Returns {relative path: content} for the files below a folder. Does not follow links."""
    found = {}
    for at, _, names in os.walk(place):
        found |= {os.path.relpath(os.path.join(at, name), place): Path(at, name).read_bytes() for name in names}
    return found


def filled(runs: Path, name: str = "resnet18", **how: str) -> StudyFolder:
    """Makes a study with a compile cache, a trace whose tables were made, logs, leftovers and a copy of a user's checkpoint."""
    folder = make_study(runs, name, **how)
    trial = folder.trial_path(1)
    for file, size in (
        (folder.path / "compile_cache/aa/kernel.so", 3 * MEBIBYTE),
        (trial / "trace.rank0.json.gz", 2 * MEBIBYTE),
        (trial / "explain/tables.json", 100),
        (trial / "explained.trace.rank0.json", 100),
        (trial / "progress.jsonl", 5000),
        (trial / "kept/model.pt", MEBIBYTE),
        (folder.trial_path(2) / "trace.rank0.json.gz", 100),  # without tables
    ):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"x" * size)
    (folder.path / "owner.json").write_text("{}")
    return folder


@pytest.fixture
def private(cli: Cli, tmp_path: Path) -> Path:
    """A folder for temporary files that no other test writes to."""
    (tmp_path / "tmp").mkdir()
    cli.environment["TMPDIR"] = str(tmp_path / "tmp")
    return tmp_path / "tmp"


def test_prune_without_yes_reports_sizes_and_removes_nothing(cli, tmp_path, private):
    filled(tmp_path / "runs")
    before = content(tmp_path / "runs")
    ended = cli("prune")
    assert ended.returncode == 0, ended.stderr
    assert "3.01 MiB  2.00 MiB" in ended.stdout  # folders take space, too
    assert "5.05 MiB can be removed." in ended.stdout
    assert "Nothing was removed yet; --yes removes it." in ended.stdout
    assert max(map(len, ended.stdout.splitlines())) <= 80
    assert content(tmp_path / "runs") == before


@pytest.mark.thorough
@pytest.mark.parametrize("width", [40, 60, 80])
def test_a_narrow_terminal_shows_the_names_and_the_whole_sizes(tmp_path, monkeypatch, capsys, width):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("COLUMNS", str(width))
    for name in ("resnet18", "transformer"):
        filled(Path("runs"), name)
    assert main(["prune"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in rows[1:3]] == ["resnet18", "transformer"]
    assert all(row.split()[-2:] == ["5.05", "MiB"] for row in rows[1:3])
    assert ("traces" in rows[0]) is (width == 80)
    assert max(map(len, rows)) <= width


def test_prune_with_yes_removes_only_files_that_no_command_reads(cli, tmp_path, private):
    folder = filled(tmp_path / "runs")
    shown = {words: cli(*words).stdout for words in (("show", "--json"), ("show", "--trial", "1"), ("export",), ("list",))}
    shutil.copytree(folder.trial_path(1), folder.path / "trials" / "0001.bak")
    before = content(folder.path)
    assert cli("prune", "--yes").returncode == 0
    gone = before.keys() - content(folder.path).keys()
    logs = {f"trials/{number:04d}/{name}.log" for number in range(8) for name in ("stdout", "stderr")}
    other = {"compile_cache/aa/kernel.so", "trials/0001/trace.rank0.json.gz", "trials/0001/progress.jsonl"}
    assert gone == logs | other
    assert {words: cli(*words).stdout for words in shown} == shown
    assert cli("report").returncode == 0
    assert "Nothing to remove" in cli("prune").stdout


def test_json_counts_files_and_bytes_of_each_part(cli, tmp_path, private):
    filled(tmp_path / "runs")
    said = json.loads(cli("prune", "--json", "--yes").stdout)
    (study,) = said["found"]
    assert said["is_removed"]
    assert study["name"] == "resnet18"
    assert study["bytes_by_kind"]["traces"] == 2 * MEBIBYTE
    assert study["bytes"] == said["bytes"] == sum(study["bytes_by_kind"].values())
    assert study["files"] == 19


def test_a_study_that_may_be_resumed_keeps_its_compile_cache(cli, tmp_path, private):
    folder = filled(tmp_path / "runs", status="interrupted")
    assert cli("prune", "--yes").returncode == 0
    assert (folder.path / "compile_cache/aa/kernel.so").exists()
    assert not (folder.trial_path(1) / "trace.rank0.json.gz").exists()


def test_study_in_use_is_left_alone(cli, tmp_path, private):
    folder = filled(tmp_path / "runs")
    with folder.claimed():
        before = content(folder.path)
        for words in ([], ["--older-than", "0h"]):
            assert f"left alone  resnet18: process {os.getpid()}" in cli("prune", "--yes", *words).stdout
        assert f"process {os.getpid()} on host" in cli.refused("prune", "resnet18", "--yes")
        assert content(folder.path) == before


def test_named_studies_are_removed_whole_and_others_stay(cli, tmp_path, private):
    filled(tmp_path / "runs", "one")
    other = filled(tmp_path / "runs", "other")
    before = content(other.path)
    assert "Removed" in cli("prune", "one", "--yes").stdout
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["other"]
    assert content(other.path) == before


def test_study_that_holds_what_a_program_has_put_there_is_not_removed(cli, tmp_path, private):
    folder = filled(tmp_path / "runs", "train")
    (folder.path / "exp" / "weights").mkdir(parents=True)
    (folder.path / "exp" / "weights" / "best.pt").write_text("precious")
    (folder.path / "other.yaml").write_text("exported")
    before = content(folder.path)
    assert "move this first: exp, got 'train'." in cli.refused("prune", "train", "--yes")
    assert "move this first: exp" in cli("prune", "--older-than", "0h", "--yes").stdout
    assert content(folder.path) == before
    assert cli("prune", "--yes").returncode == 0
    assert (folder.path / "exp" / "weights" / "best.pt").read_text() == "precious"
    shutil.move(folder.path / "exp", tmp_path)
    assert cli("prune", "train", "--yes").returncode == 0
    assert not folder.path.exists()


def test_named_study_that_another_process_holds_is_not_called_removed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    lock = filled(Path("runs")).path / LOCK_FILE
    lock.touch()
    with held(lock):  # as `autotune sync` does
        assert main(["prune", "resnet18", "--yes"]) == 2
        assert main(["prune", "--older-than", "0d", "--yes"]) == 0, "no study was named"
    assert "left alone  resnet18: another process is working on it" in capsys.readouterr().out
    assert main(["prune", "resnet18", "--yes"]) == 0


def test_study_that_cannot_be_removed_does_not_count_as_removed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("one", "other"):
        filled(Path("runs"), name)
    remove = prune._remove_one

    def removed(path, **how):
        if path.name == "one":
            raise PermissionError(errno.EACCES, "Permission denied")
        remove(path, **how)

    monkeypatch.setattr(prune, "_remove_one", removed)
    size = bytes_text(prune.sizes(Path("runs/other"))[1])
    assert main(["prune", "one", "other", "--yes"]) == 2
    said = capsys.readouterr().out
    assert "not removed  runs/one: Permission denied" in said
    assert f"Removed {size}; the rest is listed above." in said


def test_studies_are_removed_by_age(cli, tmp_path, private):
    old, new = filled(tmp_path / "runs", "old"), filled(tmp_path / "runs", "new")
    long_ago = time.time() - 31 * 86_400
    for file in old.path.iterdir():
        os.utime(file, (long_ago, long_ago))
    assert "old" in cli("prune", "--older-than", "30d").stdout
    assert cli("prune", "--older-than", "30d", "--yes").returncode == 0
    assert not old.path.exists()
    assert new.best_file.exists()


def test_links_are_never_followed(cli, tmp_path, private):
    filled(tmp_path / "elsewhere", "far")
    folder = filled(tmp_path / "runs")
    (tmp_path / "runs/linked").symlink_to(tmp_path / "elsewhere/far")
    cache = tmp_path / "elsewhere/far/compile_cache"
    (folder.trial_path(3) / "scratch").symlink_to(cache)
    (folder.trial_path(3) / "loader0.bin").symlink_to(cache / "aa/kernel.so")
    (folder.path / "trials/0099").symlink_to(tmp_path / "elsewhere/far/trials/0001")
    before = content(tmp_path / "elsewhere")
    assert "linked: it is a link" in cli("prune", "--yes").stdout
    assert "it is a link" in cli.refused("prune", "linked", "--yes")
    assert cli("prune", "resnet18", "--yes").returncode == 0
    assert not folder.path.exists()
    assert content(tmp_path / "elsewhere") == before


def test_too_deeply_nested_folder_causes_no_internal_error(cli, tmp_path, private):
    cache = filled(tmp_path / "runs").path / "compile_cache"
    filled(tmp_path / "runs", "other")
    place = os.open(cache, os.O_RDONLY)
    for _ in range(1200):  # deeper than Python recurses; made one inside the other, because the whole path may be too long
        os.mkdir("d", dir_fd=place)
        below = os.open("d", os.O_RDONLY, dir_fd=place)
        os.close(place)
        place = below
    os.close(place)
    try:
        said = cli("prune")
        assert (said.returncode, said.stderr) == (0, "")
        said = cli("prune", "--yes")
        assert "internal error" not in said.stderr
        assert not cache.exists() or "compile_cache: nested too deeply for Python" in said.stdout
        assert not (tmp_path / "runs/other/compile_cache").exists()
    finally:
        subprocess.run(["rm", "-rf", cache], check=True)  # pytest would remove it far more slowly


def test_leftovers_of_killed_processes_are_removed_after_a_day(cli, tmp_path, private):
    two_days_ago = time.time() - 2 * 86_400
    for name in ("autotune-fault-abcdefgh.log", "autotune-slots-abc_e123", "autotune-settings", "tmpabcdefgh"):
        (private / name).mkdir()
        os.utime(private / name, (two_days_ago, two_days_ago))
    (private / "autotune-inspect-abcdefgh").mkdir()  # new
    assert cli("prune", "--yes").returncode == 0
    assert {path.name for path in private.iterdir()} == {
        "autotune-settings", "tmpabcdefgh", "autotune-inspect-abcdefgh"
    }  # fmt: skip


def test_temporary_folder_of_slots_in_use_is_left_alone(cli, private, monkeypatch):
    from autotune.launchers.slots import SlotsLauncher

    monkeypatch.setattr("tempfile.tempdir", str(private))
    launcher = SlotsLauncher([])
    (made,) = private.iterdir()
    two_days_ago = time.time() - 2 * 86_400
    os.utime(made, (two_days_ago, two_days_ago))
    assert cli("prune", "--yes").returncode == 0
    assert made.exists()
    launcher.close()


def test_interrupted_removal_is_finished_by_the_next_prune(cli, tmp_path, private):
    folder = filled(tmp_path / "runs")
    folder.path.rename(tmp_path / "runs/.resnet18.removed")
    assert "No study in runs" in cli("list").stdout
    filled(tmp_path / "runs")  # a new study of the same name
    assert cli("prune", "resnet18", "--yes").returncode == 0
    assert cli("prune", "--yes").returncode == 0
    assert list((tmp_path / "runs").iterdir()) == []


def test_name_of_two_studies_is_refused_and_removes_nothing(cli, tmp_path, private):
    filled(tmp_path / "runs")
    filled(tmp_path / "runs")
    before = content(tmp_path / "runs")
    assert "STUDY: ambiguous, got 'resnet18'" in cli.refused("prune", "--yes", "resnet18")
    assert content(tmp_path / "runs") == before


@pytest.mark.thorough
def test_a_killed_study_is_resumed_after_it_was_pruned(tmp_path, private):
    study = QuickStudy(tmp_path)
    tuner = study.start("study.budget.trials=3")
    study.wait_for_trial(2, tuner)
    kill(tuner)
    assert study.none_is_left()
    before = measured(study.folder.read_trials())
    assert "Removed" in study.say("prune", "--yes").stdout
    resumed = study.resume()
    resumed.communicate(timeout=90)
    assert (resumed.returncode, study.shown()["status"]) == (0, "complete")
    assert measured(study.folder.read_trials())[: len(before)] == before
    assert study.say("prune", "--yes").returncode == 0
