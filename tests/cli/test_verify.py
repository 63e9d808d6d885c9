"""`autotune verify` as users run it: a whole study of a stub program, and then a verification of its best.yaml."""

import json
import os
import shlex
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from autotune.cli.main import main
from autotune.cli.run import judge
from autotune.cli.verify import Asked, verify
from autotune.compare.verify import NOTHING
from autotune.errors import BadInput, ClaimBroken, NotMeasured
from tests.cli.conftest import Cli
from tests.support.stub_programs import PRELUDE

# The file `factor` holds the speed-up of bf16. If `halt` exists, the baseline hangs; with `refuse`, bf16 is not applicable.
PROGRAM = """
factor = float(open("factor").read())
if os.path.exists("halt") and not spec["knobs"].get("precision.amp"):
    time.sleep(60)
rate = 300.0 * (factor if spec["knobs"].get("precision.amp") == "bf16" else 1.0)
observed = {"loader.batch_size": 32, "loader.num_workers": 0, "precision.amp": "off", "threads.intra": 2}
knobs = {key: {"status": "applied"} for key in spec["knobs"]}
if os.path.exists("refuse") and "precision.amp" in knobs:
    knobs["precision.amp"] = {"status": "not applicable", "reason": "the model casts by itself"}
result(throughput_per_s=rate, unit="samples", target=[], observed=observed, phases_s={"spawn": 0.1}, knobs=knobs,
       facts={"torch": "2.14.1", "device": "cpu", "isa": ["amx_bf16"]})
"""
COMMAND = ["--", sys.executable, "-S", "train.py"]
QUICK = ["--rounds", "2"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Returns a folder in which a study of the program was run."""
    place = tmp_path_factory.mktemp("user")
    (place / "train.py").write_text(PRELUDE + PROGRAM)
    (place / "space.yaml").write_text("precision.amp: ['off', bf16]\n")
    (place / "factor").write_text("1.5")
    options = [
        "tracker.uri=none",
        "device.kind=cpu",
        "search_space=./space.yaml",
        "loader.batch_size=32",
    ]
    ended = Cli(place)("run", *options, "study.name=s", "study.budget.minutes=0.5", "study.budget.trials=1", *COMMAND)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return place


@pytest.fixture
def cli(place, monkeypatch):
    (place / "factor").write_text("1.5")
    yield Cli(place)
    for name in ("halt", "refuse"):
        (place / name).unlink(missing_ok=True)


def test_claim_of_a_fresh_best_yaml_holds(cli):
    ended = cli("verify", "s", *QUICK, "--json")
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found["verification"]["verdict"] == "holds"
    assert found["verification"]["changed"] == {"precision.amp": "bf16"}
    assert found["verification"]["differences"] == []
    assert found["study"].startswith("verify-s")
    assert all(trial["knobs"]["loader.batch_size"] == 32 for trial in found["trials"])


def test_planted_slowdown_exits_with_4_and_is_shown_by_show_and_list(cli, place):
    (place / "factor").write_text("1.1")
    ended = cli("verify", "s", *QUICK)
    assert ended.returncode == ClaimBroken.exit_code == 4
    assert "verdict  no longer holds: 1.10x now, 1.50x claimed" in ended.stdout
    assert ended.stderr.startswith("autotune: runs/s/best.yaml: the claim does not hold: 1.10x here and now, but 1.50x")
    assert ended.stderr.count("\n") == 1
    shown = cli("show", "verify-s")
    assert shown.returncode == 0, shown.stderr
    assert "no longer holds: 1.10x now, 1.50x claimed" in shown.stdout
    assert "now / claimed" in shown.stdout
    assert "no longer holds" in cli("list").stdout


def test_claim_does_not_hold_if_a_knob_cannot_be_applied(cli, place):
    (place / "refuse").touch()
    ended = cli("verify", "s", *QUICK)
    assert ended.returncode == 4
    assert "could not be measured: invalid: precision.amp" in ended.stderr
    assert "the model casts by itself" in ended.stderr


def test_verify_refuses_to_start_the_command_stored_in_a_file(cli):
    message = cli.refused("verify", "runs/s/best.yaml", *QUICK)
    words = shlex.split(message.partition("type `")[2].partition("`")[0])
    assert words[:3] == ["autotune", "verify", "runs/s/best.yaml"]
    assert words[words.index("--") :] == COMMAND


@pytest.mark.thorough
def test_command_suggested_by_the_refusal_works(cli, place):
    message = cli.refused("verify", "runs/s/best.yaml", *QUICK)
    words = shlex.split(message.partition("type `")[2].partition("`")[0])
    at = words.index("--")
    ended = cli(*words[1:at], *QUICK, "tracker.uri=none", *words[at:])
    assert ended.returncode == 0, ended.stderr
    assert "verdict  holds: 1.50x now" in ended.stdout


@pytest.mark.thorough
def test_a_file_from_elsewhere_is_verified_and_the_differences_are_named(cli, place):
    document = yaml.safe_load((place / "runs/s/best.yaml").read_text())
    document["provenance"]["identity"] |= {"machine.cpu_model": "Elsewhere 9000", "program.torch": "2.9.0"}
    document["provenance"] |= {"study": "../../x y", "pinned": [], "secret": []}
    (place / "theirs.yaml").write_text("# @package _global_\n" + yaml.safe_dump(document))
    ended = cli("verify", "theirs.yaml", *QUICK, "tracker.uri=none", *COMMAND)
    assert ended.returncode == 0, ended.stderr
    assert "differs  cpu_model: Elsewhere 9000 there, " in ended.stdout
    assert "differs  torch: 2.9.0 there, 2.14.1 here" in ended.stdout
    assert "files  runs/verify-x-y" in ended.stdout


@pytest.mark.thorough
def test_resumed_verification_exits_with_the_status_of_its_verdict(cli, place):
    (place / "factor").write_text("1.1")
    (place / "halt").touch()  # the baseline hangs
    running = cli.start("verify", "s", *QUICK)
    deadline = time.monotonic() + 60
    while "baseline starts" not in running.stdout.readline():
        assert time.monotonic() < deadline
    time.sleep(0.5)
    os.kill(running.pid, signal.SIGTERM)
    said = running.communicate(timeout=60)[0]
    assert running.returncode == 130, said
    (place / "halt").unlink()
    go_on = said.partition("To continue: autotune ")[2].split()
    ended = cli(*go_on)
    assert ended.returncode == 4, ended.stdout + ended.stderr
    again = cli(*go_on)
    assert again.returncode == 4
    assert "To continue" not in again.stdout


def test_file_that_changes_nothing_is_accepted_without_a_run(cli, place):
    document = yaml.safe_load((place / "runs/s/best.yaml").read_text())
    del document["precision"]
    (place / "nothing.yaml").write_text("# @package _global_\n" + yaml.safe_dump(document))
    ended = cli("verify", "nothing.yaml")
    assert (ended.returncode, ended.stdout) == (0, "nothing.yaml: the file changes nothing: there is nothing to verify.\n")


def test_verification_that_gets_no_node_leaves_no_folder(cli, place, tmp_path):
    cli.environment["PATH"] = str(tmp_path)  # without srun
    before = sorted((place / "runs").iterdir())
    said = cli.refused("verify", "runs/s/best.yaml", "launcher=slurm", *COMMAND)
    assert "srun is not installed" in said
    assert sorted((place / "runs").iterdir()) == before


def test_number_of_cores_of_a_login_node_does_not_limit_what_runs_on_a_cluster(cli, place, tmp_path):
    document = yaml.safe_load((place / "runs/s/best.yaml").read_text())
    document["loader"]["num_workers"] = 4096
    (place / "many.yaml").write_text("# @package _global_\n" + yaml.safe_dump(document))
    assert "many.yaml: loader.num_workers: more than" in cli.refused("verify", "many.yaml", *COMMAND)
    cli.environment["PATH"] = str(tmp_path)  # without srun
    assert "srun is not installed" in cli.refused("verify", "many.yaml", "launcher=slurm", *COMMAND)


def test_value_that_the_node_of_a_cluster_cannot_serve_is_refused(place, tmp_path, monkeypatch):
    document = yaml.safe_load((place / "runs/s/best.yaml").read_text())
    document["loader"]["num_workers"] = 4096
    (place / "many.yaml").write_text("# @package _global_\n" + yaml.safe_dump(document))
    closed = []
    launcher = SimpleNamespace(
        slots=lambda: [SimpleNamespace(name="n1", facts={"num_cores": 2})], unended=list, close=lambda: closed.append(True)
    )
    monkeypatch.setattr("autotune.launchers.make_launcher", lambda *_: launcher)
    monkeypatch.chdir(place)
    asked = Asked(
        what="many.yaml", overrides=("launcher=slurm",), command=COMMAND[1:], runs=tmp_path, rounds=2, minutes=1.0,
        is_long=False, long_minutes=None,
    )  # fmt: skip
    with pytest.raises(BadInput, match=r"many\.yaml: loader\.num_workers: more than 2 effective cores can serve"):
        verify(asked, as_json=False)
    assert closed


def test_more_time_is_not_advised_if_there_is_nothing_to_compare():
    found = {"file": "best.yaml", "verdict": "ambiguous", "now": None, "reason": "no round was completed"}
    with pytest.raises(NotMeasured, match=r"not measured: no round was completed\. Give it more time: --minutes 15\.$"):
        judge(found)
    found["reason"] = f"the program already runs with all of the file's settings, {NOTHING}"
    with pytest.raises(NotMeasured, match=r"settings, so there is nothing to compare\.$"):
        judge(found)


def test_words_typed_with_a_plus_take_precedence_over_the_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = {"settings": {"model.name": "resnet18", "model.image_size": 48, "data.name": "photos"}, "speedup": {"ratio": 1.5}}
    Path("best.yaml").write_text("# @package _global_\n" + yaml.safe_dump({"threads": {"intra": 1}, "provenance": said}))
    seen = []

    def create(runs, _):
        seen.append(runs)
        raise BadInput("enough")

    def inputs(composed, *_):
        seen.append((composed.config.model.name, composed.config.model.image_size == 48))

    monkeypatch.setattr("autotune.cli.verify.create", create)
    monkeypatch.setattr("autotune.cli.verify.inputs_to_verify", inputs)
    assert main(["verify", "best.yaml", "++runs_dir=elsewhere", "+model=resnet50"]) == 2
    assert seen == [("resnet50", False), Path("elsewhere")]
