"""Checkpoints that trials write over: with real files, and a real process that writes to them."""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from autotune.launchers.user_files import UserFiles

PRECIOUS = b"precious\0" * 1000
WRITE = "import sys; file = open(sys.argv[1], 'wb'); file.write(b'worthless'); file.close()"
APPEND = "import sys; file = open(sys.argv[1], 'r+b'); file.seek(0, 2); file.write(b'worthless'); file.close()"
REPLACE = "import os, sys; open('new', 'wb').write(b'worthless'); os.replace('new', sys.argv[1])"
REMOVE = "import os, sys; os.remove(sys.argv[1])"
READ = "import sys; open(sys.argv[1], 'rb').read()"


@pytest.fixture
def cwd(tmp_path):
    folder = tmp_path / "work"
    (folder / "out").mkdir(parents=True)
    (tmp_path / "place").mkdir()
    return folder


def run(cwd, code, file, argv=(), ours=()):
    """Runs a program beside the watch; returns (paths put back, names left)."""
    ours = set(ours)
    files = UserFiles(argv, str(cwd), cwd.parent / "place", ours)
    program = subprocess.Popen([sys.executable, "-S", "-c", code, str(file)], cwd=cwd)
    while program.poll() is None:
        files.look()
        time.sleep(0.01)
    assert program.returncode == 0
    left = files.left()
    assert ours >= set(left)
    return files.restore(), left


@pytest.mark.parametrize("code", [WRITE, APPEND, REPLACE, REMOVE])
@pytest.mark.parametrize(
    ("file", "argv"),
    [
        ("named", ["python", "--output", "named"]),
        ("named", ["python", "--output=named"]),
        ("here.pt", []),
        ("out/best.ckpt", ["--output_dir", "out"]),
    ],
)
def test_a_checkpoint_is_put_back_as_it_was(cwd, code, file, argv):
    path = cwd / file
    path.write_bytes(PRECIOUS)
    path.chmod(0o640)
    before = path.stat()
    assert run(cwd, code, path, argv)[0] == [str(path)]
    after = path.stat()
    assert path.read_bytes() == PRECIOUS
    assert (after.st_mode, after.st_mtime_ns, after.st_uid) == (before.st_mode, before.st_mtime_ns, before.st_uid)
    assert list((cwd.parent / "place").iterdir()) == []


def test_what_is_only_read_is_not_copied(cwd):
    (cwd / "data.bin").write_bytes(PRECIOUS)
    files = UserFiles(["--data", "data.bin"], str(cwd), cwd.parent / "place", set())
    subprocess.run([sys.executable, "-S", "-c", READ, "data.bin"], cwd=cwd, check=True)
    files.look()
    assert list((cwd.parent / "place").iterdir()) == []
    assert files.restore() == []


def test_text_that_people_change_meanwhile_is_left_to_them(cwd):
    (cwd / "config.yaml").write_text("lr: 0.1")
    assert run(cwd, WRITE, cwd / "config.yaml", ["--config", "config.yaml"]) == ([], {})
    assert (cwd / "config.yaml").read_bytes() == b"worthless"


def test_a_file_that_somebody_is_writing_is_left_to_them(cwd):
    path = cwd / "other.pt"
    with path.open("wb") as file:
        file.write(PRECIOUS)
        file.flush()
        assert run(cwd, WRITE, path)[0] == []


def test_what_an_earlier_trial_left_is_not_the_user_s(cwd):
    path = cwd / "checkpoint.pt"
    assert run(cwd, WRITE, path)[1] == {"checkpoint.pt": len(b"worthless")}
    assert run(cwd, APPEND, path, ours={"checkpoint.pt"}) == ([], {})
    assert path.read_bytes() == b"worthless" * 2


def test_new_folders_are_left_with_the_bytes_in_them(cwd):
    code = "import os, sys; os.makedirs('logs/a'); open('logs/a/b', 'w').write('1234'); os.mkdir('__pycache__')"
    assert run(cwd, code, "x")[1] == {"logs": 4}


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: becomes a user who may have no lease on the file")
def test_a_file_without_a_lease_is_copied_beforehand():
    with tempfile.TemporaryDirectory() as folder:  # pytest's own are closed to other users
        path = Path(folder) / "foreign.pt"
        path.write_bytes(PRECIOUS)
        path.chmod(0o666)
        Path(folder).chmod(0o777)
        os.seteuid(65534)
        try:
            files = UserFiles([], folder, Path(folder), set())
            path.write_bytes(b"worthless")  # nothing makes the writer wait
            assert files.restore() == [str(path)]
        finally:
            os.seteuid(0)
        assert path.read_bytes() == PRECIOUS


def test_a_run_s_folder_beside_older_ones_is_left(cwd):
    (cwd / "logs" / "version_0").mkdir(parents=True)
    code = "import os; os.mkdir('logs/version_1'); open('logs/version_1/b', 'w').write('1234')"
    assert run(cwd, code, "x")[1] == {"logs/version_1": 4}


def test_what_a_program_leaves_among_the_studies_is_told_from_them(cwd):
    runs, study = cwd / "runs", cwd / "runs" / "train"
    place = study / "trials" / "0000"
    place.mkdir(parents=True)
    files = UserFiles([], str(cwd), place, set())
    (study / "trials" / "0001").mkdir()
    (runs / "mlflow.db-wal").write_text("ours")
    (runs / "other" / "trials").mkdir(parents=True)
    (runs / "Nov21_host").mkdir()
    (runs / "Nov21_host" / "events").write_text("123")
    assert files.left() == {"runs/Nov21_host": 3}
