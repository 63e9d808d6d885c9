"""Trials do not change the user's files: tested with real files, a real keeper and real processes that write."""

import atexit
import errno
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from autotune.errors import AutotuneError
from autotune.harness import protocol
from autotune.launchers import guarded, writers
from autotune.launchers.environment import mark_of
from autotune.launchers.guarded import Guarded
from autotune.launchers.keeper import Trial
from autotune.launchers.user_files import Folders, UserFiles
from autotune.launchers.writers import Processes
from tests.harness.forks import OwnForks
from tests.support.rows import more
from tests.support.waiting import PATIENCE_S, wait_until

PRECIOUS = b"precious\0" * 1000
WRITE = "import sys; file = open(sys.argv[1], 'wb'); file.write(b'worthless'); file.close()"
APPEND = "import sys; file = open(sys.argv[1], 'r+b'); file.seek(0, 2); file.write(b'worthless'); file.close()"
HARNESS = f"import os, sys; sys.path.insert(0, {str(Path(protocol.__file__).parents[2])!r})\n"
HARNESS += "from autotune.harness.guarded_files import keep, torch_is_there; keep(os.environ['PLACE'])\n"
REPLACE = HARNESS + "open('new', 'wb').write(b'worthless'); os.replace('new', sys.argv[1])"
PATHLIB = HARNESS + "import pathlib; pathlib.Path('new').write_bytes(b'worthless'); pathlib.Path('new').rename(sys.argv[1])"
MOVE = HARNESS + "import shutil; open('new', 'wb').write(b'worthless'); shutil.move('new', sys.argv[1])"
REMOVE = HARNESS + "os.remove(sys.argv[1])"
RENAME_AWAY = HARNESS + "os.rename(sys.argv[1], 'old'); assert open('old', 'rb').read(8) == b'precious'"
TORCH = HARNESS + f"sys.path.append({str(Path(torch.__file__).parents[1])!r}); import torch; torch_is_there()\n"
SAVE = TORCH + "torch.save(torch.zeros(1), sys.argv[1])"
SAVE_AND_RENAME = TORCH + "torch.save(torch.zeros(1), 'new'); os.replace('new', sys.argv[1])"
SAVE_FILE = TORCH + "from safetensors.torch import save_file; save_file({'a': torch.zeros(1)}, filename=sys.argv[1])"
COPY = HARNESS + "import shutil; open('new', 'wb').write(b'worthless'); shutil.copy2('new', sys.argv[1])"
READ = "import sys; open(sys.argv[1], 'rb').read()"
WITHOUT_HARNESS = (
    "import os, sys, time; file = open('new', 'wb'); time.sleep(0.3); file.write(b'worthless'); file.close()\n"
    "os.system('mv new ' + sys.argv[1])"
)


@pytest.fixture
def cwd(tmp_path):
    folder = tmp_path / "work"
    (folder / "out").mkdir(parents=True)
    place_of(folder).mkdir(parents=True)
    return folder


@pytest.fixture(scope="module")
def files():
    """Guards the files in all tests, as during the trials of a study: its keeper starts only once."""
    files = UserFiles()
    yield files
    files.close()


@pytest.fixture
def other_files():
    files = UserFiles()
    yield files
    files.close()


def study_of(cwd):
    """Returns the folder of the study to which the trials of all tests belong."""
    return cwd.parent.parent / "study"


def place_of(cwd):
    return study_of(cwd) / "trials" / cwd.parent.name


def start(cwd, code, *words, is_trial=True):
    mark = {protocol.MARK_VARIABLE: mark_of(study_of(cwd), 0)} if is_trial else {}
    env = {**os.environ, **mark, "PLACE": str(place_of(cwd))}
    return subprocess.Popen([sys.executable, "-S", "-c", code, *map(str, words)], cwd=cwd, env=env)


@functools.cache
def torch_forks(mark):
    """Returns a process of the trials that has imported torch. Programs that need torch are its forks, to start faster."""
    made = OwnForks({**os.environ, protocol.MARK_VARIABLE: mark}, ["torch"])
    atexit.register(made.close)
    return made


def run(cwd, code, *words, is_trial=True, is_fresh=False):
    """Runs a program to its end. With `is_fresh`, it is a new process even if it imports torch."""
    if is_fresh or not is_trial or not code.startswith(TORCH):
        assert start(cwd, code, *words, is_trial=is_trial).wait() == 0
        return
    with tempfile.TemporaryDirectory() as folder:
        (script := Path(folder, "program.py")).write_text(code)
        argv, environment = [str(script), *map(str, words)], {"PLACE": str(place_of(cwd))}
        ended = torch_forks(mark_of(study_of(cwd), 0)).run(argv, cwd, [environment], logs=Path(folder) / "log")
    assert ended.returncode == 0, ended.stderr


def prepare(cwd):
    """Prepares a trial's folder as the launcher does: without the lists of an earlier attempt."""
    time.sleep(0.02)  # the clock of a file system has steps of up to 10 ms: the spec is newer than the user's files
    shutil.rmtree(place_of(cwd))
    place_of(cwd).mkdir()
    (place_of(cwd) / protocol.SPEC_FILE).touch()


def trial(files, cwd, code, file, argv=()):
    """Runs a program as a trial; returns the keeper's report."""
    prepare(cwd)
    files.begin(argv, str(cwd), place_of(cwd))
    run(cwd, code, file)
    return files.end()


@pytest.mark.parametrize("code", [WRITE, APPEND, SAVE, REPLACE, PATHLIB, MOVE, REMOVE, RENAME_AWAY])
@pytest.mark.parametrize(
    ("file", "argv"),
    [
        ("named", ["python", "--output", "named"]),
        pytest.param("named", ["python", "--output=named"], marks=pytest.mark.thorough),
        pytest.param("named", ["python", "output=named"], marks=pytest.mark.thorough),
        *more(("here.pt", []), ("out/best.ckpt", ["--output_dir", "out"])),
        ("out/run/checkpoint-500/model.safetensors", []),
    ],
)
def test_checkpoint_of_the_user_is_unchanged_after_a_trial(files, cwd, code, file, argv):
    path = cwd / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(PRECIOUS)
    path.chmod(0o640)
    before = path.stat()
    assert trial(files, cwd, code, path, argv).kept == [str(path)]
    after = path.stat()
    assert path.read_bytes() == PRECIOUS
    assert (after.st_mode, after.st_mtime_ns, after.st_uid) == (before.st_mode, before.st_mtime_ns, before.st_uid)
    assert {entry.name for entry in path.parent.iterdir()} <= {path.name, "old", "out"}


@pytest.mark.parametrize("code", [SAVE, SAVE_AND_RENAME, SAVE_FILE, REPLACE, PATHLIB, MOVE, COPY, REMOVE, RENAME_AWAY])
def test_checkpoint_in_a_folder_that_no_search_knows_is_unchanged(files, cwd, code):
    """For example, a configuration file of the program names the folder."""
    path = cwd.parent / "elsewhere" / "last.pt"
    path.parent.mkdir()
    path.write_bytes(PRECIOUS)
    path.chmod(0o640)
    before = path.stat()
    assert trial(files, cwd, code, path).kept == [str(path)]
    after = path.stat()
    assert path.read_bytes() == PRECIOUS
    assert (after.st_mode, after.st_mtime_ns, after.st_ino) == (before.st_mode, before.st_mtime_ns, before.st_ino)
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("change", ["pathlib.Path(sys.argv[1]).touch()", "os.chmod(sys.argv[1], 0o600)"])
def test_checkpoint_in_a_folder_that_no_search_knows_is_unchanged_if_touched(files, cwd, change):
    path = cwd.parent / "elsewhere" / "last.pt"
    path.parent.mkdir()
    path.write_bytes(PRECIOUS)
    trial(files, cwd, f"{TORCH}import pathlib; {change}; torch.save(torch.zeros(1), sys.argv[1])", path)
    assert path.read_bytes() == PRECIOUS


def test_data_may_be_copied_over_older_data_that_no_search_knows(files, cwd):
    source, target = (cwd.parent / folder / "shard.tar" for folder in ("elsewhere", "fast"))
    for path in (source, target):
        path.parent.mkdir()
        path.write_bytes(PRECIOUS + bytes(str(path), "utf-8"))
    report = trial(files, cwd, f"{HARNESS}import shutil; shutil.copy({str(source)!r}, sys.argv[1])", target)
    assert target.read_bytes() == source.read_bytes()
    assert report.kept == []


def test_processes_of_a_trial_load_what_one_has_saved_over_checkpoints(files, cwd):
    paths = [cwd / "best.pt", cwd.parent / "elsewhere" / "last.pt", cwd.parent / "other" / "last.pt"]
    for path in paths:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(PRECIOUS)
    prepare(cwd)
    files.begin([], str(cwd), place_of(cwd))
    save = "for n, path in enumerate(sys.argv[1:]): torch.save(-1, path); torch.save({'param_groups': n, 'state': n}, path)"
    run(cwd, TORCH + save, *paths)
    run(cwd, TORCH + "assert [torch.load(path)['state'] for path in sys.argv[1:]] == [0, 1, 2]", *paths)
    report = files.end()
    assert (report.kept, report.loaded) == (sorted(map(str, paths)), [])
    assert [path.read_bytes() for path in paths] == [PRECIOUS] * 3


def test_copy_of_a_checkpoint_that_was_saved_over_another_has_the_new_content(files, cwd):
    last, best = cwd.parent / "elsewhere" / "last.pt", cwd.parent / "elsewhere" / "best.pt"
    last.parent.mkdir()
    for path in (last, best):
        path.write_bytes(PRECIOUS)
    code = f"import shutil; best = {str(best)!r}; torch.save(7, sys.argv[1]); shutil.copy(sys.argv[1], best)\n"
    report = trial(files, cwd, TORCH + code + "assert torch.load(best) == 7", last)
    assert report.kept == [str(best), str(last)]
    assert (last.read_bytes(), best.read_bytes()) == (PRECIOUS, PRECIOUS)


def test_safetensors_file_that_was_saved_over_a_checkpoint_is_loaded_again(files, cwd):
    (path := cwd / "model.safetensors").write_bytes(PRECIOUS)
    code = SAVE_FILE + "; from safetensors.torch import load_file; assert load_file(sys.argv[1])['a'] == 0"
    assert trial(files, cwd, code, path).kept == [str(path)]
    assert path.read_bytes() == PRECIOUS


def test_pathlib_imported_before_the_harness_does_not_remove_a_checkpoint(files, cwd):
    """Before Python 3.11, pathlib holds the functions of `os`. Later versions of Python are made to do the same here."""
    (path := cwd / "best.pt").write_bytes(PRECIOUS)
    code = "import os, pathlib\nclass Accessor: unlink, rename = os.unlink, os.rename\npathlib._NormalAccessor = Accessor\n"
    code += HARNESS + "pathlib._NormalAccessor().unlink(sys.argv[1])\n"
    code += "open('new', 'wb').write(b'worthless'); pathlib._NormalAccessor().rename('new', sys.argv[1])"
    assert trial(files, cwd, code, path).kept == [str(path)]
    assert path.read_bytes() == PRECIOUS


def test_checkpoints_of_trials_may_be_overwritten_wherever_they_are(files, cwd):
    path, save = cwd.parent / "elsewhere" / "own.pt", TORCH + "torch.save(int(sys.argv[2]), sys.argv[1])"
    path.parent.mkdir()
    prepare(cwd)
    files.begin([], str(cwd), place_of(cwd))
    spec = place_of(cwd) / protocol.SPEC_FILE
    os.utime(spec, (time.time() + 3600,) * 2)  # another file server's clock: what the trial saves seems to be older
    run(cwd, save, path, 1)
    run(cwd, save, path, 2)
    assert torch.load(path) == 2
    assert files.end().kept == []
    assert trial(files, cwd, save.replace("sys.argv[2]", "3"), path).kept == []
    assert torch.load(path) == 3


def test_file_in_a_cache_with_the_name_of_a_checkpoint_can_be_replaced(files, cwd, monkeypatch):
    """torch.compile keeps `code_state_HASH.pkl` there."""
    cache = cwd.parent / "cache"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache))
    cache.mkdir()
    (cache / "code_state.pkl").write_bytes(b"old")
    assert trial(files, cwd, REPLACE, cache / "code_state.pkl").kept == []
    assert (cache / "code_state.pkl").read_bytes() == b"worthless"


@pytest.mark.parametrize("folder", ["work/out/checkpoint-500", "elsewhere/checkpoint-500"])
def test_files_next_to_a_checkpoint_stay_if_the_trial_removes_the_folder(files, cwd, folder):
    """For example, transformers removes the oldest of its checkpoints, which cannot be continued without such files."""
    paths = [cwd.parent / folder / name for name in ("a.json", "model.safetensors", "trainer_state.json")]
    paths[0].parent.mkdir(parents=True)
    for path in paths:
        path.write_bytes(PRECIOUS)
    report = trial(files, cwd, HARNESS + "import shutil; shutil.rmtree(sys.argv[1])", paths[0].parent)
    assert report.kept == [str(paths[1])]
    assert [path.read_bytes() for path in paths] == [PRECIOUS] * 3


def test_folder_that_no_search_knows_is_not_removed_with_a_checkpoint(files, cwd):
    path = cwd.parent / "elsewhere" / "run" / "last.pt"
    path.parent.mkdir(parents=True)
    path.write_bytes(PRECIOUS)
    code = HARNESS + "import shutil; shutil.rmtree(sys.argv[1]); os.makedirs(sys.argv[1]); os.listdir(sys.argv[1])"
    assert trial(files, cwd, code, cwd.parent / "elsewhere").kept == [str(path)]
    assert path.read_bytes() == PRECIOUS


@pytest.mark.parametrize("code", [SAVE, REPLACE, REMOVE])
def test_harness_protects_checkpoints_without_a_keeper(cwd, code):
    path = cwd / "best.pt"
    path.write_bytes(PRECIOUS)
    (place_of(cwd) / protocol.KEPT_FILE).write_text(f"{path}\0")
    run(cwd, code, path, is_fresh=True)
    assert path.read_bytes() == PRECIOUS
    assert (place_of(cwd) / protocol.SPARED_FILE).read_text() == f"{path}\0"


def test_checkpoints_stay_guarded_if_the_list_of_them_cannot_be_read_once(cwd):
    path = cwd / "best.pt"
    path.write_bytes(PRECIOUS)
    (place_of(cwd) / protocol.KEPT_FILE).write_text(f"{path}\0")
    code = HARNESS + "import errno\nopen('other', 'wb').close(); os.remove('other'); stat, failed = os.stat, []\n"
    code += "def fails(*args, **kwargs):\n    if not failed: raise failed.append(1) or OSError(errno.ESTALE, 'stale')\n"
    code += "    return stat(*args, **kwargs)\nos.stat = fails; os.remove(sys.argv[1]); os.remove(sys.argv[1]); assert failed\n"
    run(cwd, code, path)
    assert path.read_bytes() == PRECIOUS


@pytest.mark.thorough
def test_trial_may_change_files_that_it_saved_itself(files, cwd):
    """The trial may overwrite, read and remove such files."""
    code = SAVE + "\nfor n in range(9): torch.save(torch.full((1,), float(n)), 'own.pt')\n"
    code += "assert torch.load('own.pt').item() == 8; torch.save(1, 'gone.pt'); os.remove('gone.pt')"
    report = trial(files, cwd, code, cwd / "own.pt")
    assert list(report.left) == ["own.pt"]
    report = trial(files, cwd, code, cwd / "own.pt")
    assert (report.left, report.kept, report.new) == ({}, [], {})


@pytest.mark.parametrize("file", [".ckpt/last.pt", "out/.best/run/best.ckpt", "out/2026/12/01/run/checkpoints/last.pt"])
def test_checkpoint_in_a_hidden_or_deep_folder_is_guarded(files, cwd, file):
    path = cwd / file
    path.parent.mkdir(parents=True)
    path.write_bytes(PRECIOUS)
    assert trial(files, cwd, WRITE, path).kept == [str(path)]
    assert path.read_bytes() == PRECIOUS


def test_repositories_and_virtual_environments_are_not_searched(files, cwd):
    for folder in (".git", "env/share", "env", "out/node_modules", "out"):
        (cwd / folder).mkdir(parents=True, exist_ok=True)
        (cwd / folder / "best.pt").write_bytes(PRECIOUS)
    (cwd / "env" / "pyvenv.cfg").touch()
    files.begin([], str(cwd), place_of(cwd))
    kept = (place_of(cwd) / protocol.KEPT_FILE).read_text()
    files.end()
    assert kept == f"{cwd / 'out' / 'best.pt'}\0"


def test_original_of_a_read_only_checkpoint_that_is_replaced_is_kept_aside(files, cwd, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: bool(os.stat(path).st_mode & 0o222))  # root may write everywhere
    path = cwd / "best.pt"
    path.write_bytes(PRECIOUS)
    path.chmod(0o444)
    assert trial(files, cwd, WITHOUT_HARNESS.replace("mv", "mv -f"), path).aside.keys() == {str(path)}


def test_named_pipe_does_not_stop_the_search_for_checkpoints(cwd):
    os.mkfifo(cwd / "pipe")
    search = threading.Thread(target=Folders([], cwd, place_of(cwd)).checkpoints, daemon=True)
    search.start()
    search.join(20)
    is_waiting = search.is_alive()
    if is_waiting:
        (cwd / "pipe").write_bytes(b"end")
    assert not is_waiting


def test_checkpoint_has_its_full_size_at_every_moment(files, cwd):
    path = cwd / "best.pt"
    path.write_bytes(PRECIOUS)
    files.begin([], str(cwd), place_of(cwd))
    program = start(cwd, "for _ in range(200): open('best.pt', 'wb').write(b'worthless')")
    while program.poll() is None:
        assert path.stat().st_size == len(PRECIOUS)  # also while the trial writes
    assert path.read_bytes() == PRECIOUS
    assert files.end().kept == [str(path)]


def test_file_saved_by_another_program_is_left_unchanged(files, cwd):
    path = cwd / "best.pt"
    path.write_bytes(PRECIOUS)
    files.begin([], str(cwd), place_of(cwd))
    run(cwd, WRITE, path, is_trial=False)
    assert path.read_bytes() == b"worthless"
    replaced = "import os; open('new', 'wb').write(b'newest'); os.replace('new', 'best.pt')"
    run(cwd, replaced, is_trial=False)
    report = files.end()
    assert path.read_bytes() == b"newest"
    assert (report.kept, report.left, report.aside) == ([], {}, {})


def test_file_saved_by_another_program_is_protected_from_the_trial(files, cwd):
    path = cwd / "best.pt"
    path.write_bytes(PRECIOUS)
    files.begin([], str(cwd), place_of(cwd))
    run(cwd, "import os; open('new', 'wb').write(b'newest'); os.replace('new', 'best.pt')", is_trial=False)
    run(cwd, "open('first.pt', 'wb').write(b'first')", is_trial=False)
    wait_until(lambda: "first.pt" in (place_of(cwd) / protocol.KEPT_FILE).read_text())
    for code in (WRITE, REPLACE):
        run(cwd, code, path)
        run(cwd, code, cwd / "first.pt")
    files.end()
    assert (path.read_bytes(), (cwd / "first.pt").read_bytes()) == (b"newest", b"first")


def is_leased(path):
    """Whether a process holds a lease on a file."""
    inode = f":{path.stat().st_ino} "
    return any("LEASE" in line and inode in line for line in Path("/proc/locks").read_text().splitlines())


def test_file_saved_in_turns_by_a_trial_and_another_program_keeps_the_others_content(files, cwd):
    path = cwd / "best.pt"
    path.write_bytes(b"0000")
    files.begin([], str(cwd), place_of(cwd))
    for number in range(1, 10):
        run(cwd, f"import os; open('mine', 'wb').write(b'{number:04d}'); os.replace('mine', 'best.pt')", is_trial=False)
        wait_until(lambda: is_leased(path), "the keeper's guard of the new file")
        run(cwd, WRITE, path)
        assert path.read_bytes() == f"{number:04d}".encode()
    assert files.end().kept == [str(path)]


@pytest.mark.parametrize("whose", ["tuner", "supervisor"])
def test_checkpoint_is_protected_even_if_the_tuner_or_supervisor_is_killed(cwd, whose):
    """A program that saves on SIGTERM must not overwrite the user's file."""
    path, study = cwd / "best.pt", cwd.parent / "study"
    path.write_bytes(PRECIOUS)
    (place := study / "trials" / "0000").mkdir(parents=True)
    saving = "import signal, sys, time\ndef save(*_):\n    open('best.pt', 'wb').write(b'worthless'); sys.exit()\n"
    saving += "signal.signal(signal.SIGTERM, save); print(flush=True); time.sleep(60)"
    tuner = HARNESS.splitlines()[0] + (
        "\nimport subprocess, time\nfrom pathlib import Path\n"
        "from autotune.launchers.user_files import UserFiles\nfiles = UserFiles()\n"
        f"files.begin([], {str(cwd)!r}, Path({str(place)!r}))\n"
        "print(files._keeper._process.pid, flush=True)\ntime.sleep(60)"
    )
    watching = subprocess.Popen([sys.executable, "-c", tuner], stdout=subprocess.PIPE, text=True)
    keeper = psutil.Process(int(watching.stdout.readline()))
    mark = {protocol.MARK_VARIABLE: mark_of(study, 0)}
    program = subprocess.Popen(
        [sys.executable, "-c", saving], cwd=cwd, env={**os.environ, **mark}, stdout=subprocess.PIPE, text=True
    )
    program.stdout.readline()
    if whose == "tuner":
        watching.kill()
        time.sleep(0.3)
        assert keeper.is_running()
    program.send_signal(signal.SIGTERM)
    program.wait()
    assert path.read_bytes() == PRECIOUS
    watching.kill()
    watching.wait()
    keeper.wait(PATIENCE_S)
    for pipe in (watching.stdout, program.stdout):
        pipe.close()


def test_trials_of_two_studies_in_one_folder_leave_a_checkpoint_unchanged(files, other_files, cwd):
    path = cwd / "best.pt"
    path.write_bytes(PRECIOUS)
    place = cwd.parent / "second" / "trials" / "0000"
    place.mkdir(parents=True)
    files.begin([], str(cwd), place_of(cwd))
    other_files.begin([], str(cwd), place)
    try:
        for _ in range(5):
            run(cwd, WRITE, path)
            assert path.read_bytes() == PRECIOUS
    finally:
        other_files.end()
        files.end()


def test_save_of_another_program_while_the_trial_waits_is_not_lost(files, cwd):
    """While the keeper is stopped, both writers wait for its lease."""
    path = cwd / "best.pt"
    path.write_bytes(PRECIOUS)
    files.begin([], str(cwd), place_of(cwd))
    keeper = psutil.Process(files._keeper._process.pid)
    keeper.suspend()
    waiting = [start(cwd, WRITE, path), start(cwd, "open('best.pt', 'wb').write(b'newest')", is_trial=False)]
    pids = {str(program.pid) for program in waiting}
    wait_until(lambda: pids <= {word for line in Path("/proc/locks").read_text().splitlines() for word in line.split()})
    keeper.resume()
    assert [program.wait(20) for program in waiting] == [0, 0]
    files.end()
    assert path.read_bytes() == b"newest"


def test_symlink_to_a_checkpoint_stays_a_symlink(files, cwd):
    (cwd / "epoch3.pt").write_bytes(PRECIOUS)
    (cwd / "last.pt").symlink_to("epoch3.pt")
    trial(files, cwd, REPLACE, "last.pt")
    assert (cwd / "last.pt").is_symlink()
    assert (cwd / "epoch3.pt").read_bytes() == PRECIOUS


@pytest.mark.parametrize(
    "code",
    [
        "import shutil; shutil.rmtree('out'); os.makedirs('out'); os.listdir('out')",
        "os.rename('out', 'out.bak'); assert os.path.exists('out.bak/best.pt')",
        "os.mkdir('empty'); os.rename('out', 'empty'); assert os.path.exists('empty/best.pt')",
        "os.mkdir('out/run'); os.rename('out', 'out.bak'); os.makedirs('out/run'); os.mkdir('out'); os.listdir('out.bak/run')",
    ],
)
def test_folder_with_a_checkpoint_is_not_removed_or_renamed(files, cwd, code):
    path = cwd / "out" / "best.pt"
    path.write_bytes(PRECIOUS)
    assert trial(files, cwd, HARNESS + code, "x").kept == [str(path)]
    assert path.read_bytes() == PRECIOUS


def test_renamed_folder_shares_its_blocks_with_the_original_if_possible(files, cwd):
    """An ioctl of btrfs and XFS, which is simulated here."""
    (cwd / "out" / "best.pt").write_bytes(PRECIOUS)
    code = "import fcntl, shutil; shutil.copyfile = None; open('out/made.txt', 'w').close(); numbers = []\n"
    code += "fcntl.ioctl = lambda new, number, old: numbers.append(number) or os.copy_file_range(old, new, 1 << 20)\n"
    code += f"os.rename('out', 'out.bak'); assert numbers == [{protocol.FICLONE}] * 2"
    trial(files, cwd, HARNESS + code, "x")
    for folder in ("out", "out.bak"):
        assert (cwd / folder / "best.pt").read_bytes() == PRECIOUS


def test_link_to_a_folder_with_a_checkpoint_can_be_replaced(files, cwd):
    (cwd / "out" / "best.pt").write_bytes(PRECIOUS)
    code = "os.symlink('out', 'tmp'); os.symlink('older', 'latest'); os.replace('tmp', 'latest')"
    trial(files, cwd, HARNESS + code, "x")
    assert (cwd / "latest").readlink() == Path("out")


def test_a_checkpoint_that_seems_to_be_removed_can_be_replaced_by_a_hard_link(files, cwd):
    (path := cwd / "best.pt").write_bytes(PRECIOUS)
    code = "open('new.pt', 'wb').write(b'worthless'); os.remove('best.pt'); os.link('new.pt', 'best.pt')"
    trial(files, cwd, HARNESS + code, "x")
    assert path.read_bytes() == PRECIOUS


@pytest.mark.parametrize("code", ["shutil.rmtree('out'); os.makedirs('out')", "os.remove('out/last.pt')"])
def test_link_to_a_checkpoint_can_be_removed_and_made_again(files, cwd, code):
    path = cwd / "out" / "best.pt"
    path.write_bytes(PRECIOUS)
    path.with_name("last.pt").symlink_to("best.pt")
    trial(files, cwd, f"{HARNESS}import shutil; {code}; os.symlink('new.pt', 'out/last.pt')", "x")
    assert path.read_bytes() == PRECIOUS
    assert path.with_name("last.pt").readlink() == Path("best.pt")


def test_replaced_functions_of_os_behave_as_before(cwd):
    code = HARNESS + "import pickle\nassert pickle.loads(pickle.dumps(os.rename)) is os.rename\n"
    code += (
        "class Accessor: unlink = os.unlink\nopen('a', 'w').close(); Accessor().unlink('a'); assert not os.path.exists('a')\n"
    )
    code += "assert {os.unlink, os.rmdir, os.mkdir, os.rename} <= os.supports_dir_fd\n"
    code += "folder = os.open('.', os.O_RDONLY); os.mkdir(b'd', dir_fd=folder); os.rename('d', 'e', src_dir_fd=folder)\n"
    code += "os.rmdir('e')\ntry: os.remove(path='none')\nexcept FileNotFoundError as error: assert error.filename == 'none'\n"
    run(cwd, code)


def test_files_beyond_the_limit_of_guarded_files_are_reported(files, cwd):
    for number in range(70):
        (cwd / f"step{number:02d}.pt").write_bytes(b"x")
        os.utime(cwd / f"step{number:02d}.pt", (number, number))
    report = trial(files, cwd, READ, "step00.pt")
    assert sorted(report.unguarded) == [str(cwd / f"step{number:02d}.pt") for number in range(6)]  # the six oldest


def test_checkpoints_are_guarded_next_to_a_data_set_of_many_folders(files, cwd):
    for number in range(150):
        (cwd / "data" / "train" / f"n{number:04d}").mkdir(parents=True)
        (cwd / "datasets" / f"part{number:04d}").mkdir(parents=True)
    names = (".ckpt/last.pt", "logs/version_9/checkpoints/epoch3.ckpt", "weights/best.pt", "work_dirs/exp/last.pt")
    paths = [cwd / name for name in names]
    for path in paths:
        path.parent.mkdir(parents=True)
        path.write_bytes(PRECIOUS)
    files.begin([], str(cwd), place_of(cwd))
    for path in paths:
        run(cwd, WRITE, path)
    report = files.end()
    assert report.kept == list(map(str, paths))
    assert all(path.read_bytes() == PRECIOUS for path in paths)
    assert sorted(report.unguarded) == [str(cwd / "data" / "train"), str(cwd / "datasets")]


def test_folder_whose_subfolders_are_not_all_searched_is_reported_once(files, cwd):
    for number in range(120):
        (cwd / f"run{number:03d}" / "weights").mkdir(parents=True)
    report = trial(files, cwd, READ, __file__)
    assert report.unguarded == {str(cwd): "not all folders in it were searched for checkpoints and logs"}


def test_folder_of_too_many_entries_is_reported_as_not_guarded(files, cwd, monkeypatch):
    monkeypatch.setattr("autotune.launchers.user_files.MAX_ENTRIES", 20)
    named = cwd.parent / "images"
    for folder in (named, cwd / "out" / "images"):
        folder.mkdir()
        for number in range(20):
            (folder / f"{number}.png").touch()
    report = trial(files, cwd, READ, __file__, ["--data", str(named)])
    assert sorted(report.unguarded) == [str(named), str(cwd / "out" / "images")]
    assert all("taken for a data set" in why for why in report.unguarded.values())


@pytest.mark.parametrize("code", [WRITE, REPLACE, REMOVE])
@pytest.mark.parametrize("link", ["checkpoints", "out/run"])
def test_checkpoint_in_a_folder_behind_a_symbolic_link_is_guarded(files, cwd, code, link):
    path = cwd.parent / "scratch" / "run" / "best.pt"
    path.parent.mkdir(parents=True)
    path.write_bytes(PRECIOUS)
    (cwd / link).symlink_to(path.parents[1])
    (path.parents[1] / "back").symlink_to(cwd)  # leads in a circle
    assert trial(files, cwd, code, cwd / link / "run" / "best.pt").kept == [str(path)]
    assert path.read_bytes() == PRECIOUS
    assert (cwd / link).is_symlink()


def test_existing_file_behind_a_symbolic_link_is_not_reported_as_new(files, cwd, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(cwd.parent / "tmp"))
    (cwd.parent / "tmp").mkdir()
    (scratch := cwd.parent / "scratch").mkdir()
    (scratch / "notes.md").write_text("mine")
    (cwd / "logs").symlink_to(scratch)
    code = "import time; opened = [open('logs/' + name, 'w') for name in ('notes.md', 'new.md')]\n"
    code += "for file in opened: file.write('123'); file.flush()\ntime.sleep(0.3)"
    report = trial(files, cwd, code, "x")
    assert {**report.left, **report.new} == {str(scratch / "new.md"): 3}


def test_end_of_the_keeper_during_a_trial_is_reported(files, cwd):
    (cwd / "best.pt").write_bytes(PRECIOUS)
    files.begin([], str(cwd), place_of(cwd))
    files._keeper._process.kill()
    assert files.end().unguarded == {str(cwd / "best.pt"): "the process that guards it has ended"}


def test_killed_keeper_is_started_again(files, cwd):
    trial(files, cwd, READ, __file__)
    files._keeper._process.kill()
    (cwd / "best.pt").write_bytes(PRECIOUS)
    assert trial(files, cwd, WRITE, cwd / "best.pt").kept == [str(cwd / "best.pt")]


def test_original_of_a_file_replaced_without_python_is_kept_aside(files, cwd):
    path = cwd / "best.pt"
    path.write_bytes(PRECIOUS)
    report = trial(files, cwd, WITHOUT_HARNESS, path)
    assert path.read_bytes().startswith(b"worthless")
    assert Path(report.aside[str(path)]).read_bytes() == PRECIOUS


@pytest.mark.parametrize("then", ["", "os.mkdir('out'); open('out/best.pt', 'wb').write(b'worthless')"])
def test_original_of_a_file_removed_without_python_is_kept_aside(files, cwd, then):
    path = cwd / "out" / "best.pt"
    path.write_bytes(PRECIOUS)
    report = trial(files, cwd, f"import os; os.system('rm -r out')\n{then}", "x")
    assert Path(report.aside[str(path)]).read_bytes() == PRECIOUS
    assert report.kept == []


def test_other_files_stay_guarded_while_a_removed_file_is_copied(cwd, monkeypatch):
    is_copying, may_end, copy = threading.Event(), threading.Event(), guarded.copy

    def copy_slowly(lease, target):
        if target.name == "removed.pt":
            assert threading.current_thread() is not threading.main_thread()
            is_copying.set()
            assert may_end.wait(PATIENCE_S)
        copy(lease, target)

    monkeypatch.setattr(guarded, "copy", copy_slowly)
    removed, path = cwd / "removed.pt", cwd / "best.pt"
    for each in (removed, path):
        each.write_bytes(PRECIOUS)
    message = {"files": [str(removed), str(path)], "folders": [str(cwd)], "own": [], "place": str(place_of(cwd))}
    guarding = Trial(message, Processes("no study"))
    removed.unlink()
    guarding.look()
    assert is_copying.wait(PATIENCE_S)
    program = start(cwd, WRITE, path)
    while program.poll() is None:
        guarding.look()
    assert path.read_bytes() == PRECIOUS
    may_end.set()
    report = guarding.end()
    assert report["kept"] == [str(path)]
    assert Path(report["aside"][str(removed)]).read_bytes() == PRECIOUS


def test_checkpoint_that_another_program_removes_and_makes_again_stays_guarded(files, cwd):
    path = cwd / "best.pt"
    path.write_bytes(b"an earlier one")
    files.begin([], str(cwd), place_of(cwd))
    run(cwd, f"import os; os.unlink('best.pt'); open('best.pt', 'wb').write({PRECIOUS!r})", is_trial=False)
    files.end()
    trial(files, cwd, WRITE, "best.pt")
    assert path.read_bytes() == PRECIOUS


def test_checkpoint_that_is_only_renamed_by_another_program_is_not_copied(files, cwd):
    (cwd / "best.pt").write_bytes(PRECIOUS)
    files.begin([], str(cwd), place_of(cwd))
    run(cwd, "import os; os.rename('best.pt', 'epoch3.pt')", is_trial=False)
    assert files.end().aside == {}


def test_original_that_is_lost_since_it_cannot_be_copied_is_reported(cwd, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (path := cwd / "best.pt").write_bytes(PRECIOUS)
    guarding = Guarded(path, is_of_trial=lambda pid: pid != os.getpid(), aside=cwd / "kept")
    path.unlink()
    monkeypatch.setattr(guarded, "copy", fail)
    guarding.copy_aside()
    guarding.end()
    assert guarding.why_not == "its previous content was lost: No space left on device"


def test_original_of_a_file_with_hard_links_is_kept_aside(files, cwd):
    path = cwd / "best.pt"
    path.write_bytes(PRECIOUS)
    os.link(path, cwd / "epoch3")
    report = trial(files, cwd, WRITE, path)
    assert Path(report.aside[str(path)]).read_bytes() == PRECIOUS
    assert "hard links" in report.unguarded[str(path)]


def test_executable_checkpoint_that_the_command_names_is_guarded(files, cwd):
    """On some mounted disks, all files are executable."""
    path = cwd.parent / "best.pt"
    path.write_bytes(PRECIOUS)
    path.chmod(0o755)
    assert trial(files, cwd, WRITE, path, ["--resume", str(path)]).kept == [str(path)]


def test_file_that_is_only_read_is_not_copied(files, cwd):
    (cwd / "data.bin").write_bytes(PRECIOUS)
    before = (cwd / "data.bin").stat()
    report = trial(files, cwd, READ, "data.bin", ["--data", "data.bin"])
    assert (cwd / "data.bin").stat().st_ino == before.st_ino
    assert (report.kept, report.aside) == ([], {})


def test_text_files_that_people_may_edit_are_not_guarded(files, cwd):
    (cwd / "config.yaml").write_text("lr: 0.1")
    report = trial(files, cwd, WRITE, cwd / "config.yaml", ["--config", "config.yaml"])
    assert (report.kept, report.left, report.aside) == ([], {}, {})
    assert (cwd / "config.yaml").read_bytes() == b"worthless"


def test_file_left_by_an_earlier_trial_is_not_guarded(files, cwd):
    path = cwd / "checkpoint.pt"
    slowly = "import time; file = open('checkpoint.pt', 'wb'); time.sleep(0.3); file.write(b'worthless')"
    assert trial(files, cwd, slowly, path).left == {"checkpoint.pt": len(b"worthless")}
    report = trial(files, cwd, APPEND, path)
    assert (report.kept, report.left) == ([], {})
    assert path.read_bytes() == b"worthless" * 2


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["out/part", *more("out/last.pt")])
def test_checkpoint_of_an_earlier_trial_that_is_continued_is_reported(files, cwd, name):
    state = "{'model': {}, 'optimizers': [torch.optim.SGD([torch.zeros(1)], 0.1).state_dict()]}"
    save = f"{TORCH}torch.save({state}, {name!r}); os.replace({name!r}, 'out/last.pt')\n"
    report = trial(files, cwd, save + "torch.load('out/last.pt')", "x")
    assert (report.loaded, report.continued) == ([], [])  # the trial itself has saved it
    report = trial(files, cwd, f"{TORCH}torch.load(open('out/last.pt', 'rb'))\n" + save + "torch.load('out/last.pt')", "x")
    assert (report.loaded, report.continued) == (["out/last.pt"], ["out/last.pt"])


@pytest.mark.thorough
@pytest.mark.parametrize(("what", "loaded"), [("torch.zeros(1)", []), ("{'state': {}, 'param_groups': []}", ["own.pt"])])
def test_checkpoint_of_the_user_does_not_count_as_continued(files, cwd, what, loaded):
    run(cwd, f"{TORCH}torch.save({what}, 'own.pt')")
    (place_of(cwd) / protocol.LOADED_FILE).unlink(missing_ok=True)
    report = trial(files, cwd, f"{TORCH}torch.load('own.pt')", "x")
    assert (report.loaded, report.continued) == (loaded, [])


def test_new_folder_is_reported_with_its_size(files, cwd):
    code = "import os, sys, time; os.makedirs('logs/a'); file = open('logs/a/b', 'w'); file.write('1234'); file.flush()"
    assert trial(files, cwd, code + "; os.mkdir('__pycache__'); time.sleep(0.3)", "x").left == {"logs": 4}


def test_file_renamed_after_writing_is_attributed_to_the_trial(files, cwd):
    code = "import os, time; file = open('.part', 'w'); time.sleep(0.3); file.write('1234'); file.close()"
    code += "; os.rename('.part', 'done')"
    assert trial(files, cwd, code, "x").left == {"done": 4}


def test_files_of_other_programs_are_not_attributed_to_the_trial(files, cwd):
    files.begin([], str(cwd), place_of(cwd))
    run(cwd, "import time; file = open('theirs.log', 'w'); time.sleep(0.3); file.write('123')", is_trial=False)
    report = files.end()
    assert (report.left, report.new) == ({}, {"theirs.log": 3})


def test_files_left_in_a_folder_named_in_the_command_are_reported(files, cwd):
    there, new = cwd.parent / "there", cwd.parent / "new" / "out"
    there.mkdir()
    new.parent.mkdir()
    code = "import os, sys, time\nos.makedirs(sys.argv[2])\nopened = [open(folder + '/a', 'w') for folder in sys.argv[1:]]\n"
    code += "for file in opened: file.write('12345'); file.flush()\ntime.sleep(0.3)"
    files.begin(["--output", str(there), f"project={new}"], str(cwd), place_of(cwd))
    run(cwd, code, there, new)
    assert files.end().left == {str(there / "a"): 5, str(new): 5}


def test_new_run_folder_next_to_older_ones_is_reported(files, cwd):
    (cwd / "logs" / "version_0").mkdir(parents=True)
    code = "import os, time; os.mkdir('logs/version_1'); file = open('logs/version_1/b', 'w'); file.write('1234')"
    code += "; time.sleep(0.3)"
    assert trial(files, cwd, code, "x").left == {"logs/version_1": 4}


def test_new_folders_are_reported_everywhere_except_in_the_temporary_folder(files, cwd, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(cwd.parent / "tmp"))
    (cwd / "logs" / "ppo" / "run_1").mkdir(parents=True)
    (cwd / "logs" / "ppo" / "run_1" / "old.log").write_text("there")
    for folder in ("data", "tmp"):
        (cwd.parent / folder).mkdir()
    code = HARNESS + "for folder in sys.argv[1:]: os.makedirs(folder); open(folder + '/a', 'w').write('1234')\n"
    code += "log = open('logs/ppo/run_1/new.log', 'w'); log.write('123'); log.flush()\n"
    code += "os.mkdir('part'); os.rename('part', 'logs/ppo/run_1/done'); os.mkdir('gone'); os.rmdir('gone')\n"
    code += "import time; opened = open('logs/ppo/run_1/old.log', 'a'); opened.write('more'); opened.flush(); time.sleep(0.5)"
    made = ["logs/ppo/run_2/deep", "../data/set/processed", "../tmp/cache"]
    files.begin([], str(cwd), place_of(cwd))
    run(cwd, code, *made)
    report = files.end()
    elsewhere = str(cwd.parent / "data" / "set")
    assert report.left == {"logs/ppo/run_1/done": 0, "logs/ppo/run_1/new.log": 3, "logs/ppo/run_2": 4, elsewhere: 4}
    assert report.new == {}


def test_files_of_a_program_in_the_runs_folder_are_distinguished_from_studies(other_files, cwd):
    runs, study = cwd / "runs", cwd / "runs" / "train"
    place = study / "trials" / "0000"
    place.mkdir(parents=True)
    other_files.begin([], str(cwd), place)
    (study / "trials" / "0001").mkdir()
    (runs / "mlflow.db-wal").write_text("ours")
    (runs / ".mlflow.lock").write_text("")
    (runs / ".mlflow.db.123-journal").write_text("just being made")
    (runs / "other" / "trials").mkdir(parents=True)
    (runs / "Nov21_host").mkdir()
    (runs / "Nov21_host" / "events").write_text("123")
    report = other_files.end()
    assert {**report.left, **report.new} == {"runs/Nov21_host": 3}


def test_private_study_of_another_user_in_the_runs_folder_is_passed_over(cwd, monkeypatch):
    runs, usual = cwd / "runs", os.stat
    (runs / "private" / "trials").mkdir(parents=True)
    (runs / "last.pt").write_bytes(PRECIOUS)

    def stat(path, *args, **options):
        if f"{runs}/private/" in str(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return usual(path, *args, **options)

    monkeypatch.setattr(os, "stat", stat)
    folders = Folders([], cwd, runs / "train" / "trials" / "0000")
    assert folders.checkpoints() == [runs / "last.pt"]
    assert folders.new([]) == ([], [])


def test_link_with_the_name_of_a_checkpoint_that_leads_to_itself_is_passed_over(cwd):
    (cwd / "last.pt").symlink_to("last.pt")
    (cwd / "best.pt").write_bytes(PRECIOUS)
    assert Folders([], cwd, place_of(cwd)).checkpoints() == [cwd / "best.pt"]


def test_checkpoint_next_to_a_folder_of_trials_that_is_no_study_is_guarded(files, cwd):
    path = cwd / "experiments" / "best.pt"
    (cwd / "experiments" / "trials").mkdir(parents=True)
    path.write_bytes(PRECIOUS)
    assert trial(files, cwd, WRITE, path).kept == [str(path)]
    assert path.read_bytes() == PRECIOUS


@pytest.mark.parametrize(
    "name", ["checkpoint.th", "epoch_3.pyth", "net.t7", "yolo.weights", "g_00100000", "ppo.zip", "__0_0.distcp", "__0.metadata"]
)
@pytest.mark.parametrize("is_zip", [True, False])
def test_checkpoint_of_any_usual_name_is_guarded(files, cwd, name, is_zip):
    path = cwd / "out" / name
    torch.save({"step": 3}, path, _use_new_zipfile_serialization=is_zip)
    before = path.read_bytes()
    assert trial(files, cwd, WRITE, path).kept == [str(path)]
    assert path.read_bytes() == before


def test_run_that_a_program_keeps_in_the_folder_of_a_study_is_reported(other_files, cwd):
    study, earlier = cwd / "runs" / "train", cwd / "runs" / "earlier"
    for folder in (study / "trials" / "0000", earlier / "trials", earlier / "exp"):
        folder.mkdir(parents=True)
    code = HARNESS + "for at in sys.argv[1:]: os.makedirs(at); open(at + '/last.pt', 'w').write('123')"
    other_files.begin([], str(cwd), study / "trials" / "0000")
    mark = {protocol.MARK_VARIABLE: mark_of(study, 0), "PLACE": str(study / "trials" / "0000")}
    command = [sys.executable, "-S", "-c", code, "runs/train/exp/weights", "runs/earlier/exp2"]
    assert subprocess.run(command, cwd=cwd, env={**os.environ, **mark}, check=False).returncode == 0
    for folder in (study / "compile_cache", cwd / "runs" / "mlartifacts" / "0001ab"):  # of the tracking process
        folder.mkdir(parents=True)
    (study / "best.yaml").write_text("")
    report = other_files.end()
    assert {**report.left, **report.new} == {"runs/train/exp": 3, "runs/earlier/exp2": 3}


def test_save_of_another_program_does_not_wait_for_a_copy(files, cwd):
    """Another program's save waits for an answer of the keeper, but not for a copy."""
    path = cwd / "large.pt"
    path.write_bytes(b"x" * 50_000_000)
    before = path.stat().st_ino
    files.begin([], str(cwd), place_of(cwd))
    run(cwd, WRITE, path, is_trial=False)
    files.end()
    assert path.stat().st_ino == before  # no copy was put in its place


@pytest.mark.parametrize("code", [WRITE, APPEND, REPLACE, MOVE, REMOVE])
@pytest.mark.parametrize("file", ["out/log.csv", "out/run/metrics.jsonl", "history.json", "train.log", "results/run-1.txt"])
def test_log_of_the_user_is_unchanged_after_a_trial(files, cwd, code, file):
    path = cwd / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(PRECIOUS)
    assert trial(files, cwd, code, path).kept == [str(path)]
    assert path.read_bytes() == PRECIOUS


def test_configuration_file_that_the_program_writes_and_reads_is_not_guarded(files, cwd):
    """For example ds_config.json: one rank writes it, and all read it."""
    (cwd / "ds_config.json").write_bytes(b"old")
    code = "open('ds_config.json', 'w').write('new'); assert open('ds_config.json').read() == 'new'; print('read')"
    assert "ds_config.json" not in str(trial(files, cwd, code, "x").kept)
    assert (cwd / "ds_config.json").read_bytes() == b"new"


def test_log_opened_at_each_step_is_kept_aside_only_once(files, cwd):
    for folder in (cwd, cwd / "out"):
        (folder / "log.txt").write_bytes(PRECIOUS)
    code = "for file in ['log.txt', 'out/log.txt'] * 100: open(file, 'a').write('worthless')"
    report = trial(files, cwd, code, "x")
    assert sorted(report.aside) == [str(cwd / "log.txt"), str(cwd / "out" / "log.txt")]
    assert [Path(copy).read_bytes() for copy in report.aside.values()] == [PRECIOUS] * 2
    assert all("more than 20 times" in why for why in report.unguarded.values())
    assert report.kept == []
    assert trial(files, cwd, code, "x").aside == {}  # the log now holds what a trial wrote


def test_large_log_is_copied_only_a_limited_number_of_times(cwd, monkeypatch):
    monkeypatch.setattr("autotune.launchers.guarded.MAX_AGAIN_BYTES", 2 * len(PRECIOUS))
    path = cwd / "log.csv"
    path.write_bytes(PRECIOUS)
    guarded = Guarded(path, is_of_trial=lambda pid: pid != os.getpid(), aside=cwd / "kept", max_openings=20)
    for is_kept in (True, True, False):
        program = start(cwd, WRITE, path)
        while program.poll() is None:
            guarded.look()
        assert (path.read_bytes() == PRECIOUS) == is_kept
    guarded.end()
    assert guarded.why_not == "it is large, and the trial opens it again and again"
    assert guarded.aside.read_bytes() == PRECIOUS


def test_checkpoint_on_a_file_system_with_few_functions_is_unchanged(cwd, monkeypatch):
    """FUSE: without extended attributes, owners, permissions, times."""

    def fail(*_, **__):
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    for name in ("listxattr", "fchown", "fchmod", "utime"):
        monkeypatch.setattr(guarded.os, name, fail)
    (path := cwd / "best.pt").write_bytes(PRECIOUS)
    guarding = Guarded(path, is_of_trial=lambda pid: pid != os.getpid(), aside=cwd / "kept")
    program = start(cwd, WRITE, path)
    while program.poll() is None:
        guarding.look()
    guarding.end()
    assert (path.read_bytes(), guarding.is_kept, guarding.why_not) == (PRECIOUS, True, "")


def test_copy_is_not_written_into_a_file_planted_by_another_user(cwd):
    (path := cwd / "best.pt").write_bytes(PRECIOUS)
    (victim := cwd / "victim").write_text("precious")
    (planted := cwd / f".best.pt.{os.getpid()}.autotune.tmp").hardlink_to(victim)
    guarded = Guarded(path, is_of_trial=lambda pid: pid != os.getpid(), aside=cwd / "kept")
    program = start(cwd, WRITE, path)
    while program.poll() is None:
        guarded.look()
    guarded.end()
    assert victim.read_text() == "precious"
    assert planted.samefile(victim)
    assert (guarded.why_not, guarded.aside.read_bytes()) == ("File exists", PRECIOUS)


def test_log_opened_constantly_by_another_program_is_not_guarded(files, cwd):
    path = cwd / "log.csv"
    path.write_bytes(PRECIOUS)
    files.begin([], str(cwd), place_of(cwd))
    run(cwd, "import time\nfor _ in range(30): open('log.csv', 'a').close(); time.sleep(0.03)", is_trial=False)
    report = files.end()
    assert report.unguarded == {str(path): "another program opens it more than 20 times"}
    assert (report.kept, report.aside) == ([], {})


def test_trial_can_replace_a_log_that_is_no_longer_guarded(files, cwd):
    path = cwd / "log.csv"
    path.write_bytes(PRECIOUS)
    code = HARNESS + "import time\nfor _ in range(21): open('log.csv', 'a').close()\n"
    code += f"while 'log.csv' in open({str(place_of(cwd) / protocol.KEPT_FILE)!r}).read(): time.sleep(0.01)\n"
    code += "open('new', 'w').write('newer'); os.replace('new', 'log.csv'); assert open('log.csv').read() == 'newer'"
    report = trial(files, cwd, code, "x")
    assert Path(report.aside[str(path)]).read_bytes() == PRECIOUS


def test_unguarded_log_is_reported_only_if_it_changes(cwd, monkeypatch):
    def refuse(path):
        raise OSError(errno.EINVAL, "no leases here")

    monkeypatch.setattr("autotune.launchers.guarded.Lease", refuse)
    paths = [cwd / name for name in ("one.csv", "log.txt", "best.pt")]
    for path in paths:
        path.write_bytes(PRECIOUS)
    message = {"files": list(map(str, paths)), "folders": [], "own": [], "place": str(place_of(cwd))}
    guarding = Trial(message, Processes("no study"))
    paths[0].write_bytes(b"worthless")
    assert guarding.end()["open"] == {str(path): "no leases here" for path in (paths[0], paths[2])}


def test_log_that_another_program_has_open_is_not_guarded(files, cwd):
    with (cwd / "nohup.log").open("w") as file:
        files.begin([], str(cwd), place_of(cwd))
        file.write("first\n")
        file.flush()
        report = files.end()
    assert (cwd / "nohup.log").read_text() == "first\n"
    assert (report.kept, report.unguarded) == ([], {})


def test_annotations_of_a_data_set_are_not_treated_as_logs(files, cwd):
    for number in range(101):
        (cwd / "out" / f"{number}.json").write_text("{}")
    (cwd / "log.csv").write_bytes(PRECIOUS)
    files.begin([], str(cwd), place_of(cwd))
    kept = (place_of(cwd) / protocol.KEPT_FILE).read_text()
    files.end()
    assert kept == f"{cwd / 'log.csv'}\0"


def test_copies_that_a_killed_keeper_left_are_removed(files, cwd):
    with subprocess.Popen(["true"]) as dead:
        dead.wait()
    kept = {"best.pt", f".best.pt.{os.getpid()}.autotune.tmp", f".mine.pt.{dead.pid}.autotune.tmp", f".best.pt.{dead.pid}.tmp"}
    for name in (*kept, f".best.pt.{dead.pid}.autotune.tmp"):
        (cwd / name).write_bytes(PRECIOUS)
    files.begin([], str(cwd), place_of(cwd))
    files.end()
    left = {entry.name for entry in cwd.iterdir() if entry.is_file()}
    assert left == kept, "`.best.pt.PID.tmp` may belong to a program on another host"


def test_files_that_no_keeper_guards_are_reported(files, cwd, monkeypatch):
    (cwd / "best.pt").write_bytes(PRECIOUS)
    monkeypatch.setattr("autotune.launchers.user_files.KeeperProcess.ask", lambda *_: None)
    files.begin([], str(cwd), place_of(cwd))
    assert list(files.end().unguarded) == [str(cwd / "best.pt")]


def test_note_of_another_tuner_in_the_runs_folder_is_not_reported_as_new(files, cwd):
    (cwd / "runs").mkdir()
    files.begin([], str(cwd), place_of(cwd))
    (cwd / "runs" / ".autotune-host-7-autotune-1a2b3c4d.job").touch()
    assert files.end().new == {}


def test_search_for_leftover_copies_ends_after_a_limited_number_of_names(files, cwd, monkeypatch):
    (cwd / "best.pt").write_bytes(PRECIOUS)
    monkeypatch.setattr(guarded, "MAX_LOOKED_AT", 0)
    with subprocess.Popen(["true"]) as dead:
        dead.wait()
    (left := cwd / f".best.pt.{dead.pid}.autotune.tmp").touch()
    guarded.remove_left([cwd / "best.pt"])
    assert left.exists()


def test_user_without_a_home_gets_a_report(files, cwd, monkeypatch):
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])  # as in a container that runs with an arbitrary user id
    report = trial(files, cwd, WRITE, "best.pt")
    assert report.new | report.left == {"best.pt": 9}


def test_error_names_the_process_that_cannot_be_started(other_files, cwd, monkeypatch):
    def fail(*_):
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr("autotune.launchers.user_files.KeeperProcess", fail)
    with pytest.raises(AutotuneError, match="the process that guards your files cannot be started"):
        other_files.begin([], str(cwd), place_of(cwd))


def test_files_are_guarded_even_if_no_instance_of_inotify_is_left(cwd, monkeypatch):
    libc = SimpleNamespace(inotify_init1=lambda _: -1, inotify_add_watch=lambda *_: -1)
    monkeypatch.setattr(writers, "ctypes", SimpleNamespace(CDLL=lambda *_, **__: libc, get_errno=lambda: errno.EMFILE))
    (path := cwd / "best.pt").write_bytes(PRECIOUS)
    message = {"files": [str(path)], "folders": [str(cwd)], "own": [], "place": str(place_of(cwd))}
    guarding = Trial(message, Processes("no study"))
    program = start(cwd, WRITE, path)
    while program.poll() is None:
        guarding.look()
    assert path.read_bytes() == PRECIOUS
    report = guarding.end()
    assert (report["kept"], report["open"]) == ([str(path)], {})
