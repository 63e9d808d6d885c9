"""Secrets in the environment, in addresses and as arguments reach the program, but no file, store or screen."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from autotune.export.formats import FORMATS
from autotune.launchers.environment import own_environment
from autotune.run_dir import StudyFolder
from autotune.trackers import store
from tests.support.waiting import wait_until
from tests.trackers.servers import Listener, Mirror

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.thorough]  # MLflow uses deprecated parts of SQLAlchemy

PROGRAM = Path(__file__).with_name("programs") / "talkative.py"
IN_THE_ENVIRONMENT = {
    "HF_TOKEN": "hf_fromenvironment0001",
    "WANDB_API_KEY": "0123456789abcdef0002",
    "AWS_SECRET_ACCESS_KEY": "aws/Secret+value=0003",
    "DB_PASSWORD": "hunter4",
    "DATABASE_URL": "postgres://app:inaddress0005@db/x",
    "APP_SECRET": 'with "quotes"\nand two lines 0006',
}
SECRETS = [
    *(value for name, value in IN_THE_ENVIRONMENT.items() if name not in ("DATABASE_URL", "APP_SECRET")),
    "inaddress0005",
    "and two lines 0006",
    "trackerpass0010",
    "commandkey0011",
    "command,pass0012",
    "giturlpass0013",
    "querykey0014",
]
QUICK = [f"measure.{phase}.{rule}" for phase in ("screening", "finals") for rule in (
    "warmup_min_device_s=0.05", "warmup_max_s=2", "min_s=0.2", "max_s=0.5"
)]  # fmt: skip


class User:
    """A user with secrets in the environment, who types further secrets."""

    def __init__(self, place: Path) -> None:
        self.place, self.runs = place, place / "runs"
        self.shown: list[str] = []
        kept = {name: value for name, value in own_environment().items() if not name.startswith("MLFLOW_")}
        self.environment = {**kept, **IN_THE_ENVIRONMENT, "COLUMNS": "160", "NO_COLOR": "1"}

    def words(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "autotune", *words]

    def __call__(self, *words: str) -> subprocess.CompletedProcess[str]:
        ended = subprocess.run(
            self.words(*words), cwd=self.place, env=self.environment, capture_output=True, text=True, timeout=170, check=False
        )
        self.shown += [ended.stdout, ended.stderr]
        return ended

    def leaks(self) -> list[str]:
        """Returns each secret that occurs in a file below runs/ or on the screen, with its place."""
        files = [path for path in self.runs.rglob("*") if path.is_file()]
        read = [(str(path.relative_to(self.place)), path.read_bytes()) for path in files]
        read += [(str(path.relative_to(self.place)), str(path).encode()) for path in files]
        read += [("the screen", text.encode()) for text in self.shown]
        assert len(files) > 5
        return sorted({f"{secret} in {name}" for name, content in read for secret in SECRETS if secret.encode() in content})


@pytest.fixture(scope="module")
def hanging():
    listener = Listener()
    yield listener
    listener.close()


def study_words(port: int, *more: str) -> list[str]:
    return [
        *("run", "study.name=s", "study.budget.minutes=null", "search_space=space.yaml", "search.sampler=grid", *QUICK),
        *("threads.intra=1", "device.kind=cpu", f"tracker.uri=http://tracker:trackerpass0010@127.0.0.1:{port}"),
        *("env.MODE=choice(slow,raise)", *more),
        *("--", sys.executable, str(PROGRAM), "--api-key", "commandkey0011", "--password=command,pass0012"),
        *("https://x:giturlpass0013@github.com/a/b", "--endpoint", "https://host/x?api_key=querykey0014&n=1"),
    ]


@pytest.fixture(scope="module")
def user(tmp_path_factory, hanging) -> User:
    """Runs a study of a program that prints everything, with a tracking server that hangs; returns the user."""
    made = User(tmp_path_factory.mktemp("user"))
    (made.place / "space.yaml").write_text("env.MODE: [unused]\n")
    ended = made(*study_words(hanging.port))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return made


@pytest.fixture(scope="module")
def summary(user) -> dict:
    return json.loads(user("show", "s", "--json").stdout)


def trial_that(summary: dict, outcome: str) -> dict:
    """Returns the only search trial with this outcome."""
    (found,) = [trial for trial in summary["trials"][1:] if trial["outcome"] == outcome]
    return found


def test_no_secret_is_in_any_file_or_on_the_screen(user, summary):
    for words in (["list"], ["show", "s"], *(["export", "s", "--format", name] for name in FORMATS)):
        assert user(*words).returncode == 0
    assert user.leaks() == []


def test_files_of_a_study_are_not_readable_for_other_users(user, summary):
    written = [path for path in (user.runs / "s").rglob("*") if path.is_file() and "scratch" not in path.parts]
    assert len(written) > 10
    assert [str(path) for path in written if path.stat().st_mode & 0o077] == []


def test_secrets_reach_the_program(user, summary):
    path = user.runs / "s" / "trials" / f"{trial_that(summary, 'ok')['number']:04d}"
    log = (path / "stdout.log").read_text()
    assert "'--api-key', '***'" in log
    assert "https://***@github.com/a/b" in log
    assert "HF_TOKEN ***" in log
    record = json.loads((path / "trial.json").read_text())
    assert record["knob_reports"]["env.MODE"]["status"] == "applied"


def test_reason_quotes_an_exception_without_its_secrets(user, summary):
    trial = trial_that(summary, "error")
    assert trial["reason"].startswith("Talkative: ")
    assert "***" in trial["reason"]
    result = json.loads((user.runs / "s" / "trials" / f"{trial['number']:04d}" / "result.rank0.json").read_text())
    assert result["error"]["type"].endswith("Talkative")


def test_stored_documents_mark_the_places_of_secrets(user, summary):
    study = json.loads((user.runs / "s" / "study.json").read_text())
    assert study["command"][2:5] == ["--api-key", "***", "--password=***"]
    config = yaml.safe_load((user.runs / "s" / "config.yaml").read_text())
    assert config["tracker"]["uri"].startswith("http://***@127.0.0.1:")
    assert "HF_TOKEN" not in study["machine"]["environment"]


def test_study_with_a_hanging_tracker_reports_incomplete_tracking_at_its_end(user, hanging):
    (line,) = [text for text in user.shown[0].splitlines() if "Tracking is incomplete" in text]
    assert f"MLflow lacks 3 of 3 trials (no answer within 2 s from http://***@127.0.0.1:{hanging.port})" in line
    assert line.endswith("Nothing is lost: `autotune sync s` completes it.")


def test_sync_requires_the_tracker_credentials_again_and_leaks_no_secret(user):
    asked = user("sync", "s")
    assert asked.returncode == 2
    assert "tracker.uri: needs credentials, which are not stored with a study, got 'http://***@127.0.0.1:" in asked.stderr
    uri = store.embedded_uri(user.runs)
    synced = user("sync", "s", "--uri", uri)
    assert synced.returncode == 0, synced.stderr
    mirror = Mirror(uri, "s")
    assert mirror.problems(StudyFolder(user.runs / "s")) == []
    assert user.leaks() == []
    assert [path.name for path in user.runs.glob("ml*") if path.stat().st_mode & 0o077] == []


def test_files_left_by_a_killed_tuner_are_masked(tmp_path, hanging):
    user = User(tmp_path)
    (tmp_path / "space.yaml").write_text("env.MODE: [unused]\n")
    tuner = subprocess.Popen(
        user.words(*study_words(hanging.port, "measure.screening.min_s=60", "measure.screening.max_s=60")),
        cwd=tmp_path,
        env=user.environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    log = user.runs / "s" / "trials" / "0000" / "stdout.log"
    wait_until(lambda: log.exists() and b"commandkey0011" in log.read_bytes())
    tuner.send_signal(signal.SIGKILL)
    tuner.wait()
    wait_until(lambda: not user.leaks())  # the tracking process outlives the tuner for a moment and masks them
    assert b"--api-key" in log.read_bytes()
