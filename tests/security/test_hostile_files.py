"""Files from a stranger (a best.yaml, a study's folder, a replay table): reading them runs nothing and writes nowhere else."""

import contextlib
import fcntl
import gzip
import json
import os
import pickle
import re
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import autotune
from autotune.cli.main import main
from autotune.launchers.environment import own_environment
from autotune.replay.table import MAX_BYTES
from autotune.studies import find
from autotune.trackers import store
from tests.cli.conftest import Cli
from tests.support.rows import more
from tests.support.studies import make_study

AUTOTUNE = [sys.executable, "-P", "-m", "autotune"]  # like the installed command, without the current folder on the path
PWNED = "PWNED"  # the file that hostile code would create in the current folder
TAGS = {
    "apply": f"loader: !!python/object/apply:os.system ['touch {PWNED}']",
    "new": f"loader: {{num_workers: !!python/object/new:subprocess.Popen [[touch, {PWNED}]]}}",
    "module": "loader: !!python/module:antigravity",
    "target": f"_target_: os.system\ncommand: touch {PWNED}",
    "hydra": f"model: {{_target_: builtins.open, file: {PWNED}, mode: w}}",
    "alias": "loader: &all {num_workers: 2}\nthreads: *all",
}
DOCUMENTS = [
    *("study.json", "summary.json", "best.yaml", "config.yaml", "optuna.journal", "explanation.json", "tracking.json"),
    *("owner.json", "trials/0001/trial.json", "trials/0001/spec.json", "trials/0001/result.rank0.json"),
]
READERS = [
    *(["list"], ["show"], ["show", "--trial", "1"], ["show", "--why"], ["report"]),
    *(["export"], ["export", "-f", "python"], ["prune"]),
]
ESCAPES = "\x1b]0;owned\x07\x1b[2J\x9b31m"
# Control characters and marks of text direction, which no output may contain.
UNSEEN = {*map(chr, range(32)), *map(chr, range(0x7F, 0xA0)), "\u202e", "\u200f", "\u2066"} - {"\n"}
NAMES = [
    *(f"esc{ESCAPES}", "resnet18\nother  2026-01-01 00:00  it.py  9  faster: 99x", "back\rover", "right\u202egnp.to-left"),
    *("<img src=x onerror=alert(1)>", f"quo'te\"s\\`touch {PWNED}`$(touch {PWNED})", "--force", "-h", "not-utf8-\udce9"),
]


class Bomb:
    """Creates the file PWNED when it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {PWNED}",)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def study(place):
    return make_study(place / "runs")


def outside(place: Path, study: Path) -> dict[str, bytes]:
    """Returns every file here that does not belong to the study."""
    files = [path for path in place.rglob("*") if path.is_file() and not path.is_relative_to(study)]
    return {str(path): path.read_bytes() for path in files}


@pytest.mark.parametrize("name", TAGS)
@pytest.mark.parametrize(
    "words",
    [
        ["apply", "evil.yaml", "--", sys.executable, "-c", "pass"],
        ["verify", "evil.yaml", "--", sys.executable, "-c", "pass"],
        ["run", "--dry-run", "--config-dir", ".", "+x=evil", "model=mlp"],
        ["run", "--dry-run", "search_space=evil.yaml", "model=mlp"],
    ],
    ids=["apply", "verify", "config-dir", "search_space"],
)
def test_yaml_files_that_would_execute_code_are_refused(place, capsys, name, words):
    (place / "x").mkdir()
    for file in (place / "evil.yaml", place / "x/evil.yaml"):
        file.write_text(f"# @package _global_\n{TAGS[name]}\n")
    assert main(words) == 2
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    assert not (place / PWNED).exists()


def test_the_command_in_best_yaml_is_never_run(place, capsys):
    (place / "best.yaml").write_text(
        f"# @package _global_\nthreads: {{intra: 1}}\nprovenance: {{program: {{command: [touch, {PWNED}], cwd: /}}, "
        "speedup: {ratio: 2.0}, baseline: {value: 1.0}, best: {value: 2.0}}\n"
    )
    for words in (["apply", "best.yaml"], ["verify", "best.yaml"]):
        assert main(words) == 2
        assert "best.yaml was made for your own program" in capsys.readouterr().err
    assert not (place / PWNED).exists()


@pytest.mark.parametrize("document", DOCUMENTS)
def test_a_pickle_in_place_of_a_document_is_never_unpickled(study, place, capsys, document):
    (study.path / document).write_bytes(pickle.dumps(Bomb()))
    for words in READERS:
        assert main(words) in (0, 2), capsys.readouterr().err
    assert not (place / PWNED).exists()
    pickle.loads(pickle.dumps(Bomb()))
    assert (place / PWNED).exists(), "the bomb would have worked"


def test_paths_in_study_files_do_not_redirect_writes(study, place, capsys):
    summary = study.read_summary()
    summary |= {"study": "../../away", "cwd": "/", "command": ["touch", PWNED]}
    summary["trials"] = [
        {**trial, "number": f"../../../away{at}"} if at else trial for at, trial in enumerate(summary["trials"])
    ]
    study.write_summary(summary)
    record = json.loads(study.study_file.read_text())
    study.study_file.write_text(json.dumps({**record, "name": "../../away", "base": "../../away", "cwd": "/"}))
    before = outside(place, study.path)
    for words in READERS:
        assert main(words) in (0, 2), capsys.readouterr().err
    assert outside(place, study.path) == before


def test_a_report_replaces_pipes_and_links_in_its_place(study, place, capsys):
    os.mkfifo(place / "elsewhere")
    reader = os.open(place / "elsewhere", os.O_RDONLY | os.O_NONBLOCK)  # so that writing would not block
    for make in (os.mkfifo, lambda file: file.symlink_to(place / "elsewhere"), lambda file: file.symlink_to(file.name)):
        make(study.report_file)
        assert main(["report"]) == 0, capsys.readouterr().err
        assert study.report_file.is_file()
        assert not study.report_file.is_symlink()
        study.report_file.unlink()
    assert os.read(reader, 1) == b""
    os.close(reader)


def test_exports_of_a_hostile_study_contain_only_comments_and_quoted_values(study, place, capsys):
    summary = study.read_summary()
    evil = f"'\"\ntouch {PWNED}\n$(touch {PWNED})`touch {PWNED}`"
    summary |= {"title": evil, "command": [evil], "cwd": evil, "versions": {"torch": evil, "autotune": evil}}
    summary["best"]["overrides"] |= {"env.EVIL": evil}
    summary["best"]["knobs"] |= {"env.EVIL": evil}
    summary["machine"] |= {"hostname": evil, "cpu_model": evil}
    study.write_summary(summary)
    assert main(["export", "-f", "env", "-o", "settings.sh"]) == 0, capsys.readouterr().err
    subprocess.run(["sh", "-c", ". ./settings.sh"], check=False, capture_output=True)
    assert not (place / PWNED).exists()
    assert main(["export", "-f", "python", "-o", "settings.py"]) == 0
    compiled = compile((place / "settings.py").read_text(), "settings.py", "exec")
    assert "touch" not in compiled.co_names
    assert main(["export", "-o", "best.yaml"]) == 0
    assert main(["apply", "best.yaml", "--", "no-such-program"]) == 2
    assert not (place / PWNED).exists()


def test_text_of_a_study_cannot_control_the_terminal(tmp_path):
    study = make_study(tmp_path / "runs")
    summary = study.read_summary()
    summary |= {"title": f"title {ESCAPES}", "reason": ESCAPES}
    summary["trials"] = [{**trial, "why": ESCAPES, "reason": ESCAPES} for trial in summary["trials"]]
    study.write_summary(summary)
    record = json.loads(study.study_file.read_text())
    study.study_file.write_text(json.dumps({**record, "title": f"title {ESCAPES}"}))
    trial = json.loads((study.trial_path(1) / "trial.json").read_text())
    changed = {"why": ESCAPES, "reason": ESCAPES, "evidence": {"log_tail": ESCAPES}}
    (study.trial_path(1) / "trial.json").write_text(json.dumps({**trial, **changed}))
    cli = Cli(tmp_path)
    for words in (["list"], ["list", "--json"], ["show"], ["show", "--json"], ["show", "--trial", "1"], ["export"]):
        ended = cli(*words)
        assert ended.returncode == 0, ended.stderr
        assert not {"\x1b", "\x07", "\x9b"} & set(ended.stdout + ended.stderr), words


@pytest.mark.parametrize(
    "content",
    [
        *('{"started_at": 1e300}', '{"started_at": 1e400}', '{"started_at": NaN}', '{"started_at": -1e17}', "[" * 100_000),
        *(json.dumps({"host": f"a{ESCAPES}", "pid": ESCAPES}), '{"host": 7, "pid": 1e400}', '{"host": null, "pid": [1]}'),
        json.dumps({"host": "a" * 100_000}),
    ],
    ids=lambda content: content[:20],
)
def test_a_hostile_owner_file_breaks_no_command(study, capsys, content):
    (study.path / "owner.json").write_text(content)
    with (study.path / "owner.json").open() as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        for words in (["list"], ["show"], ["prune"], ["prune", "resnet18"], ["resume", "resnet18"]):
            assert main(words) == (2 if words[-1] == "resnet18" else 0), capsys.readouterr().err
            said = "".join(capsys.readouterr())
            assert not UNSEEN & set(said), words
            assert max(map(len, said.splitlines())) < 1000, words


@pytest.fixture
def named(place: Path) -> Path:
    """Returns a runs folder with one study for each of NAMES. All are interrupted and have files to prune."""
    runs = place / "runs"
    first = make_study(runs, "other", status="interrupted").path
    (first / "compile_cache").mkdir()
    (first / "compile_cache/kernel").write_text("x")
    for name in NAMES:
        shutil.copytree(first, runs / name)
    return runs


def test_folder_names_cannot_control_the_terminal_or_imitate_other_studies(named):
    cli = Cli(named.parent)
    every = [f"runs/{name}" for name in NAMES]
    for words in (["list"], ["prune"], ["prune", *every], *(["show", name] for name in every), ["report", *every]):
        ended = cli(*words)
        assert ended.returncode == 0, ended.stderr
        assert not UNSEEN & set(ended.stdout + ended.stderr), words
    for command in ("list", "prune"):
        firsts = [line.split("  ")[0] for line in cli(command).stdout.splitlines()]
        assert [first for first in firsts if first in ("other", "esc", "rightgnp.to-left")] == ["other"]


def test_list_as_json_contains_unchanged_folder_names(named):
    for locale in ("C", "C.UTF-8"):
        environment = {**own_environment(), "LC_ALL": locale}
        done = subprocess.run([*AUTOTUNE, "list", "--json"], cwd=named.parent, env=environment, capture_output=True, check=True)
        assert {row["study"] for row in json.loads(done.stdout.decode())} == {"other", *NAMES}


@pytest.mark.thorough
def test_mlflow_accepts_studies_with_any_name_and_command(named):
    for file in named.glob("*/study.json"):
        record = json.loads(file.read_text())
        file.write_text(json.dumps({**record, "command": ["train.py", "caf\udce9"], "title": "train.py caf\udce9"}))
    ended = Cli(named.parent)("sync", "--all")
    assert ended.returncode == 0, ended.stderr
    assert not UNSEEN & set(ended.stdout + ended.stderr)
    with contextlib.closing(sqlite3.connect(named / "mlflow.db")) as database:
        there = {name for (name,) in database.execute("SELECT name FROM runs")}
    assert {"other", *NAMES[:-1], "not-utf8-\\udce9"} <= there


@pytest.mark.parametrize("name", NAMES)
def test_a_printed_command_refers_to_the_study_that_it_is_printed_for(named, name):
    cli = Cli(named.parent)
    del cli.environment["COLUMNS"]  # no line is wrapped
    (command,) = re.findall(r"autotune resume .*", cli("show", f"runs/{name}").stdout)
    words = subprocess.run(["bash", "-c", f"printf '%s\\0' {command}"], cwd=named, capture_output=True, check=True).stdout
    typed = os.fsdecode(words.split(b"\0")[2])
    assert not typed.startswith("-")
    assert find(Path("runs"), typed).name == name
    assert not list(named.parent.rglob(PWNED))


def much() -> bytes:
    """Returns a small file that unpacks to more than MAX_BYTES; made only in its test, because that takes a second."""
    return gzip.compress(b'{"format": "autotune table"}' + bytes(MAX_BYTES), compresslevel=1)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: pickle.dumps(Bomb()), "cannot be read"),
        (lambda: gzip.compress(pickle.dumps(Bomb())), "cannot be read"),
        (much, "larger than 256 MiB"),
    ],
    ids=["pickle", "pickle inside", "small file that unpacks to much"],
)
def test_replay_tables_must_be_json_of_limited_size(place, capsys, make, said):
    (place / "t.jsonl.gz").write_bytes(make())
    assert main(["replay", "t.jsonl.gz"]) == 2
    assert said in capsys.readouterr().err
    assert not (place / PWNED).exists()


@contextlib.contextmanager
def memory_limit(num_bytes: int) -> Iterator[None]:
    """Limits the address space of this process inside the context."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def plant_modules(folder: Path) -> None:
    """Creates modules with names of libraries. Importing them would create the file PWNED."""
    for name in ("json", "random", "psutil", "yaml", "mlflow", "uvicorn", "torch"):
        (folder / f"{name}.py").write_text(f"open({str(folder / PWNED)!r}, 'w')\nraise SystemExit(3)\n")


@pytest.mark.thorough
def test_commands_import_nothing_from_the_current_folder(place):
    plant_modules(place)
    make_study(place / "runs")
    for words in (["show"], ["doctor"], ["run", "--dry-run", "model=mlp"]):
        done = subprocess.run([*AUTOTUNE, *words], cwd=place, env=own_environment(), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert not (place / PWNED).exists(), words


def test_no_python_process_starts_with_the_current_folder_on_its_path():
    own = re.compile(r"""sys\.executable, *(?:"-m"|'-m'|"-c"|'-c')|exec "\$1" -m""")
    package = Path(autotune.__file__).parent
    assert [str(file) for file in package.rglob("*.py") if own.search(file.read_text())] == []


@pytest.mark.thorough
def test_the_ui_imports_nothing_from_the_current_folder(place):
    plant_modules(place)
    make_study(place / "runs")
    ui = subprocess.Popen([*AUTOTUNE, "ui"], cwd=place, env=own_environment(), stdout=subprocess.PIPE, text=True)
    try:
        assert any("MLflow UI: " in line for line in iter(ui.stdout.readline, ""))
        assert not (place / PWNED).exists()
    finally:
        ui.send_signal(signal.SIGTERM)
        ui.communicate(timeout=60)


@pytest.mark.thorough
def test_sync_writes_nothing_where_a_hostile_tracking_store_points(place):
    make_study(place / "runs")
    cli = Cli(place)
    assert cli("sync").returncode == 0
    for table, column in (("runs", "artifact_uri"), ("experiments", "artifact_location")):
        with contextlib.closing(sqlite3.connect(place / "runs/mlflow.db")) as database:
            database.execute(f"UPDATE {table} SET {column} = ?", [(place / "victim").as_uri()])
            database.execute("DELETE FROM tags WHERE key LIKE '%digest%'")  # so that everything is written again
            database.commit()
        said = cli.refused("sync")
        assert f"outside of the runs folder, in {(place / 'victim').as_uri()}" in said
        assert "mlflow.db: the next `autotune sync` makes a new one" in said
        assert not (place / "victim").exists()
    (place / "runs/mlflow.db").unlink()
    assert cli("sync").returncode == 0


def test_is_own_place_accepts_only_the_artifact_folder_of_the_store(tmp_path):
    runs, there = tmp_path / "my runs", tmp_path / "my runs/mlartifacts"
    there.mkdir(parents=True)
    (there / "link").symlink_to(tmp_path)
    own = [there.as_uri(), (there / "1f/artifacts").as_uri()]
    others = [tmp_path.as_uri(), (runs / "mlartifacts2").as_uri(), f"{there.as_uri()}/../..", (there / "link/x").as_uri()]
    others += [f"file://host{there}", f"https://host{there}", f"s3://bucket{there}", str(there), ""]
    assert [uri for uri in own if not store.is_own_place(runs, uri)] == []
    assert [uri for uri in others if store.is_own_place(runs, uri)] == []


PIPES = [
    *("study.json", "summary.json", "config.yaml", "explanation.json", "owner.json", "best.yaml", "tracking.json"),
    *(".sync.lock", "trials/0001/trial.json", "trials/0001/stdout.log", "trials/0001/spec.json"),
]


@pytest.mark.parametrize(
    ("document", "what"),
    [
        *(("study.json", "pipe"), ("summary.json", "device"), ("trials/0001/trial.json", "huge")),
        *more(*((document, what) for document in PIPES for what in ("pipe", "device", "huge"))),
    ],
)
def test_pipes_devices_and_huge_files_are_not_read(place, capsys, document, what):
    file = make_study(place / "runs").path / document
    file.unlink(missing_ok=True)
    if what == "pipe":
        os.mkfifo(file)
    elif what == "device":
        file.symlink_to("/dev/zero")
    else:
        with file.open("wb") as huge:
            huge.truncate(1 << 40)
    with memory_limit(8 << 30):  # makes reading an endless file fail at once
        for words in READERS:
            assert main(words) in (0, 2), words
            assert "internal error" not in capsys.readouterr().err, words


def test_a_pipe_in_place_of_the_sync_lock_does_not_block(study):
    os.mkfifo(study.path / store.LOCK_FILE)
    with store.only_writer(study) as is_alone:
        assert is_alone


@pytest.mark.thorough
def test_sync_does_not_upload_files_that_links_point_to(place):
    (place / "private").mkdir()
    (place / "private/id").write_text("a-private-key-0001")
    study = make_study(place / "runs")
    for name in ("explanation.json", "trials/0001/spec.json", "trials/0001/stdout.log"):
        (study.path / name).unlink(missing_ok=True)
        (study.path / name).symlink_to(place / "private/id")
    assert Cli(place)("sync").returncode == 0
    stored = [path for path in (place / "runs/mlartifacts").rglob("*") if path.is_file()]
    assert len(stored) > 5
    assert [path for path in stored if "a-private-key-0001" in path.read_text(errors="replace")] == []
