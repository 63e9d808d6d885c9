"""Real programs, trained with a file's knobs through the command line."""

import os
import pty
import select
import shlex
import signal
import sys
import time
from dataclasses import replace

import pytest

from autotune.cli.apply import Asked, apply
from autotune.knobs import malloc
from autotune.launchers.environment import own_environment
from autotune.launchers.injection import INJECT
from tests.apply.conftest import Place, ended, seen
from tests.faults.trial_studies import QUICK

WORKER_AND_BATCH = {"loader": {"batch_size": 8, "num_workers": 1}}
MLP = {"model.name": "mlp", "model.source": "builtin", "data.name": "tabular", "device.kind": "cpu"}
SAYS_WHERE = """
import os, signal, sys, time
def own(*_):
    print("own handler", flush=True)
    sys.exit(7)
signal.signal(signal.SIGINT, own)
print("tty", *(os.isatty(n) for n in (0, 1, 2)), flush=True)
time.sleep(30)
"""


def test_every_knob_is_in_effect_at_every_step_and_nothing_else_changes(place: Place) -> None:
    place.best()
    before = {path.name for path in place.path.iterdir()}
    done = place.apply(sys.executable, "train.py", "save=1")
    found = seen(done)
    assert done.returncode == 0
    assert found["batches"] == [8] * 18
    assert found["held_out"] == [24] * 6
    assert found["workers"] == [1] * 3
    assert set(found["dtypes"]) == {"torch.bfloat16"}
    assert (found["is_channels_last"], found["fused"]) == (True, True)
    assert (found["threads"], found["omp"], found["env"]) == (1, "2", "yes")
    assert {path.name for path in place.path.iterdir()} - before == {"weights.pt", "model.pt"}
    first, *others = done.stderr.splitlines()
    assert first == (
        "autotune: best.yaml: bf16 · channels_last · batch 8 · workers 1 · threads 1 · OMP 2 · fused optimizer · "
        "SEEN_BY_THE_PROGRAM=yes (study s)"
    )
    assert others == ["autotune: all 8 settings of best.yaml are in effect"]
    plain = ended(place.popen([sys.executable, "train.py", "load=1"], env={"PYTHONPATH": ""}))
    assert (plain.stdout, plain.stderr) == ("Net torch.float32\n", "")


@pytest.mark.thorough
def test_checkpoint_of_a_compiled_run_is_read_by_a_plain_run(place: Place) -> None:
    place.best({"compile": {"mode": "default"}, "precision": {"amp": "bf16"}})
    done = place.apply(sys.executable, "train.py", "save=1")
    assert "autotune: all 2 settings of best.yaml are in effect" in done.stderr.splitlines()
    plain = ended(place.popen([sys.executable, "train.py", "load=1"], env={"PYTHONPATH": ""}))
    assert (plain.stdout, plain.stderr) == ("Net torch.float32\n", "")


@pytest.mark.thorough
def test_knobs_apply_to_the_training_loader_of_every_epoch_and_to_no_other_loader(place: Place, target) -> None:
    found_in_study = target("train.py", "rebuild=1", cwd=place.path)
    script = place.path / "train.py"
    (place.path / "moved").mkdir()
    script.rename(place.path / "moved" / "train.py")  # another folder; the program's lines have moved, too
    script = place.path / "moved" / "train.py"
    script.write_text("# edited since\n\n" + script.read_text())
    place.best(WORKER_AND_BATCH, target=found_in_study)
    done = place.apply(sys.executable, str(script), "rebuild=1")
    found = seen(done)
    assert found["batches"] == [8] * 18, done.stderr
    assert found["workers"] == [1] * 3
    assert found["held_out"] == [24] * 6


@pytest.mark.thorough  # tests/harness/test_session.py covers the harness's part
def test_settings_that_cannot_be_applied_are_named_with_the_reason(place: Place) -> None:
    knobs = {"layout": {"channels_last": True}, "loader": {"batch_size": 8}, "precision": {"amp": "bf16"}}
    elsewhere = [{"site": "/elsewhere.py:1", "ordinal": 0}]
    identity = {"program.torch": "1.0", "program.device_name": None, "machine.cpu_model": "Fake CPU", "machine.num_cores": 512}
    place.best(knobs, target=elsewhere, identity=identity, speedup={"ratio": 2.06}, date="2026-11-21")
    done = place.apply(sys.executable, "train.py", "exit=3")
    assert done.returncode == 3
    lines = done.stderr.splitlines()
    assert lines[0] == "autotune: best.yaml: bf16 · channels_last · batch 8 (2.06x, study s, 2026-11-21)"
    assert lines[1].startswith("autotune: made on Fake CPU, 512 cores; here: ")
    assert lines[2] == "autotune: 2 of 3 settings of best.yaml in effect"
    assert lines[3].startswith("autotune:   loader.batch_size=8: overridden by the program (8 was requested, but")
    assert lines[4].startswith("autotune: made with torch 1.0, runs with torch 2")
    assert len(lines) == 5


@pytest.mark.parametrize(("code", "status"), [("sys.exit(3)", 3), ("os.kill(os.getpid(), 15)", -signal.SIGTERM)])
def test_apply_ends_with_the_exit_code_or_signal_of_the_program(place: Place, code: str, status: int) -> None:
    place.best()
    done = place.apply(sys.executable, "-c", f"import os, sys; print(sys.stdin.read()); {code}")
    assert (done.returncode, done.stderr.count("\n")) == (status, 1)


def test_ctrl_c_on_a_terminal_reaches_the_handler_of_the_program(place: Place) -> None:
    place.best()
    ours, theirs = pty.openpty()
    process = place.start(
        sys.executable, "-c", SAYS_WHERE, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
        preexec_fn=lambda: __import__("fcntl").ioctl(0, __import__("termios").TIOCSCTTY, 0),
    )  # fmt: skip
    os.close(theirs)
    said = _read_until(ours, b"tty")
    os.write(ours, b"\x03")
    said += _read_until(ours, b"own handler")
    assert process.wait(timeout=30) == 7
    assert b"tty True True True" in said
    os.close(ours)


def _read_until(descriptor: int, word: bytes) -> bytes:
    said, until_s = b"", time.monotonic() + 60
    while word + b"\r\n" not in said and not (word in said and said.endswith(b"\n")):
        assert time.monotonic() < until_s, said
        if select.select([descriptor], [], [], 1.0)[0]:
            said += os.read(descriptor, 4096)
    return said


@pytest.mark.thorough
def test_every_rank_of_torchrun_has_the_knobs_and_one_rank_reports_them(place: Place) -> None:
    place.best({"loader": {"batch_size": 8}, "precision": {"amp": "bf16"}})
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = place.apply(*torchrun, "train.py", env={"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.count('"batches": [8, 8') == 2
    assert done.stderr.count("autotune:") == 2, done.stderr
    assert "autotune: all 2 settings of best.yaml are in effect" in done.stderr


@pytest.mark.thorough
def test_only_the_first_rank_reports_if_a_launcher_starts_every_rank(place: Place) -> None:
    place.best({"loader": {"batch_size": 8}, "threads": {"intra": 1}})
    ranks = [place.start(sys.executable, "train.py", env={"SLURM_PROCID": rank, "OMP_NUM_THREADS": "1"}) for rank in "01"]
    first, second = (ended(rank) for rank in ranks)
    assert (seen(first)["batches"], seen(second)["batches"]) == ([8] * 18, [8] * 18)
    assert first.stderr.splitlines()[1:] == ["autotune: all 2 settings of best.yaml are in effect"]
    assert second.stderr == ""


def test_placeholders_are_filled_from_the_file(place: Place) -> None:
    program = {"command": ["python", "train.py", "--batch", "{loader.batch_size=16}"]}
    place.best(WORKER_AND_BATCH, program=program)
    show = [sys.executable, "-c", "import sys; print(*sys.argv[1:])"]
    for words in (["{loader.batch_size=16}"], ["{loader.batch_size}"], ["8"]):
        done = place.apply(*show, "--batch", *words, "--epochs", "90")
        assert done.stdout == "--batch 8 --epochs 90\n", done.stderr
    assert place.apply(*show, "--bs={loader.batch_size}").stdout == "--bs=8\n"
    done = place.apply(*show, "--batch", "16")
    assert (done.returncode, done.stdout) == (2, "")
    assert "Use `--batch {loader.batch_size=16}` in the command" in done.stderr


def test_values_of_the_user_in_placeholders_are_no_settings_of_the_file(place: Place) -> None:
    place.best({"threads": {"intra": 1}})
    done = place.apply(sys.executable, "train.py", "workers={loader.num_workers=1}", "batch={loader.batch_size=16}")
    assert done.stderr.splitlines()[1:] == ["autotune: the setting of best.yaml is in effect"]


@pytest.mark.thorough
def test_a_knob_in_the_arguments_is_checked_in_the_process(place: Place) -> None:
    place.best(WORKER_AND_BATCH, program={"command": ["python", "train.py", "batch={loader.batch_size=16}"]})
    done = place.apply(sys.executable, "train.py", "batch={loader.batch_size}")
    assert seen(done)["batches"] == [8] * 18
    assert "all 2 settings of best.yaml are in effect" in done.stderr


@pytest.mark.thorough
def test_program_still_logs_to_the_mlflow_store_of_the_user(place: Place) -> None:
    place.best()
    store = place.path / "mine"
    done = place.apply(
        sys.executable, "tracked.py", env={"MLFLOW_TRACKING_URI": store.as_uri(), "MLFLOW_ALLOW_FILE_STORE": "true"}
    )
    assert done.returncode == 0, done.stderr
    assert [path.name for path in store.glob("*/*/metrics/*")] == ["loss"]


@pytest.mark.thorough
def test_knobs_reach_a_module_started_by_a_shell_script(place: Place) -> None:
    (place.path / "train.sh").write_text(f'export OMP_NUM_THREADS=1\n{sys.executable} -m train "$@"\n')
    place.best()
    done = place.apply("bash", "train.sh", "exit=4")
    assert done.returncode == 4
    assert seen(done)["batches"] == [8] * 18
    assert "7 of 8 settings" in done.stderr
    assert "threads.omp=2: overridden by the program (2 was requested, but the process has 1)" in done.stderr


@pytest.mark.thorough
def test_recipe_is_applied_from_its_file_alone(place: Place) -> None:
    settings = {
        "model.name": "resnet18", "data.name": "synthetic", "model.image_size": 32, "device.kind": "cpu",
        "train.samples_per_epoch": 64,
    }  # fmt: skip
    knobs = {"loader": {"batch_size": 16}, "precision": {"amp": "bf16"}, "step": {"metrics_sync_interval": 3}}
    place.best(knobs, settings=settings, speedup={"ratio": 1.5})
    done = place.apply("apply", "best.yaml", "train.epochs=2", env={"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert "all 3 settings of best.yaml are in effect" in done.stderr
    assert done.stdout.count("loss") == 2  # once per epoch of four steps, at the third step


def test_training_of_a_recipe_is_announced_unless_quiet(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place.best({"threads": {"intra": 1}}, settings=MLP, speedup={"ratio": 1.5})
    monkeypatch.setattr("autotune.cli.apply._become", lambda argv, environment: None)
    asked = Asked(what=str(place.path / "best.yaml"), overrides=(), command=None, runs=place.path)
    apply(asked)
    applied, starts = capsys.readouterr().err.splitlines()
    assert applied.endswith("best.yaml: threads 1 (1.50x, study s)")
    assert starts.startswith("autotune: starts the training of mlp on tabular (1 epoch; train.epochs=N trains longer): ")
    assert "tabular.py" in starts
    apply(replace(asked, overrides=("train.epochs=3",)))
    assert "starts the training of mlp on tabular (3 epochs): " in capsys.readouterr().err
    apply(replace(asked, is_quiet=True))
    assert capsys.readouterr().err == ""


def test_recipe_file_from_a_larger_machine_is_applied(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    knobs = {"threads": {"intra": 4096}, "loader": {"num_workers": 5000}}
    place.best(knobs, settings=MLP, speedup={"ratio": 1.5}, pinned=["loader.num_workers"])
    apply(Asked(what=str(place.path / "best.yaml"), overrides=(), command=None, runs=place.path, is_dry_run=True))
    said = capsys.readouterr().out
    assert "setting  threads.intra=4096  in the program's process" in said
    assert "setting  loader.num_workers=5000  in the program's process" in said


def test_ratio_measured_with_other_settings_is_doubted(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {**MLP, "model.num_classes": 10, "model.num_layers": 4, "model.hidden_size": 512}
    place.best({"threads": {"intra": 1}}, settings=settings, speedup={"ratio": 1.5})
    monkeypatch.setattr("autotune.cli.apply._become", lambda argv, environment: None)
    file = place.path / "best.yaml"
    asked = Asked(what=str(file), overrides=("train.epochs=3", "loader.batch_size=8"), command=None, runs=place.path)
    apply(asked)
    applied, doubt, _ = capsys.readouterr().err.splitlines()
    assert applied.endswith("best.yaml: batch 8 · threads 1 (study s)")
    says = "1.50x may not hold for this run, because it was measured without loader.batch_size=8; "
    assert doubt == f"autotune: {says}`autotune verify {file} loader.batch_size=8` measures it"
    apply(replace(asked, overrides=("train.epochs=3", "model=mlp", "device.kind=cpu", "data.num_features=64")))
    assert "may not hold" not in capsys.readouterr().err
    place.best({"threads": {"intra": 1}}, settings={**settings, "model.hidden_size": 64}, speedup={"ratio": 1.5})
    apply(replace(asked, overrides=("train.epochs=3", "model=mlp")))  # of the usual size, not of the measured one
    assert "may not hold for this run, because it was measured without model=mlp; " in capsys.readouterr().err


def test_a_dry_run_prints_command_environment_and_settings_and_starts_nothing(place: Place) -> None:
    knobs = {
        "loader": {"batch_size": 8},
        "precision": {"amp": "bf16"},
        "env": {"SEEN": "a b", "HF_TOKEN": "hf_abcdefghijklmnop"},
    }
    place.best(knobs)
    source = "open('started', 'w')"
    command = [sys.executable, "-c", source, "--size", "{loader.batch_size}"]
    done = place.apply("apply", "best.yaml", "--dry-run", "--", *command)
    assert done.returncode == 0, done.stderr
    assert not (place.path / "started").exists()
    said = done.stdout.splitlines()
    assert said[0] == f"command  {shlex.join([sys.executable, '-c', source, '--size', '8'])}"
    assert "environment  SEEN='a b'" in said
    assert any(line.startswith(f"environment  PYTHONPATH={INJECT}") for line in said)
    assert "setting  loader.batch_size=8  by an argument of the command" in said
    assert "setting  precision.amp=bf16  in the program's process" in said
    assert "setting  env.SEEN=a b  by the environment" in said
    assert said[-1] == "note  nothing was started"
    assert "hf_" not in done.stdout + done.stderr


def test_an_allocator_that_is_not_installed_here_is_named_before_the_program_starts(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The dry run said that it reaches the program's process."""
    monkeypatch.setattr("autotune.cli.apply._become", lambda argv, environment: None)
    monkeypatch.setattr(malloc, "installed", dict)
    place.best({"memory": {"malloc": "jemalloc"}})
    asked = Asked(what=str(place.path / "best.yaml"), overrides=(), command=[sys.executable, "-c", ""], runs=place.path)
    warning = "memory.malloc=jemalloc cannot take effect: libjemalloc is not installed on this machine"
    apply(asked)
    assert warning in capsys.readouterr().err
    apply(replace(asked, is_dry_run=True))
    said = capsys.readouterr().out.splitlines()
    assert f"note  {warning}" in said
    assert "setting  memory.malloc=jemalloc  not at all" in said


@pytest.mark.thorough
def test_quiet_run_reports_only_settings_that_did_not_take_effect(place: Place) -> None:
    place.best({"threads": {"intra": 1}})
    done = place.apply("apply", "best.yaml", "--quiet", "--", sys.executable, "train.py")
    assert (done.returncode, done.stderr) == (0, "")
    place.best({"loader": {"batch_size": 8}, "threads": {"intra": 1}}, target=[{"site": "/elsewhere.py:1", "ordinal": 0}])
    done = place.apply("apply", "best.yaml", "-q", "--", sys.executable, "train.py")
    assert done.stderr.startswith("autotune: 1 of 2 settings of best.yaml in effect\nautotune:   loader.batch_size=8: ")


def test_recipe_gets_its_settings_as_command_line_options(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.best({"step": {"metrics_sync_interval": 100}}, settings=MLP, speedup={"ratio": 1.5})
    started: list[list[str]] = []
    monkeypatch.setattr("autotune.cli.apply._become", lambda argv, environment: started.append(argv))
    apply(Asked(what=str(place.path / "best.yaml"), overrides=(), command=None, runs=place.path))
    assert started[0][-2:] == ["--print-every", "100"]


def test_secret_reaches_the_program_but_is_not_shown(place: Place) -> None:
    place.best({"env": {"HF_TOKEN": "hf_abcdefghijklmnop"}, "threads": {"intra": 1}})
    done = place.apply(
        sys.executable, "-c", "import os; print(os.environ['HF_TOKEN'], os.environ['AUTOTUNE_SPEC'].count('hf_'))"
    )
    assert done.stdout == "hf_abcdefghijklmnop 0\n"
    assert "hf_" not in done.stderr


@pytest.mark.thorough
def test_best_yaml_of_a_study_applies_after_the_program_was_edited(place: Place) -> None:
    (place.path / "space.yaml").write_text('{"optimizer.implementation": ["default", "foreach"]}')
    words = ["run", *QUICK, "search_space=space.yaml", "study.budget.trials=3", "loader.batch_size=8", "loader.num_workers=1"]
    command = ["--", sys.executable, "train.py", "epochs=1000000"]
    study = ended(place.popen([sys.executable, "-m", "autotune", *words, *command]))
    assert study.returncode == 0, study.stderr
    script = place.path / "train.py"
    script.write_text("# edited since\n\n" + script.read_text())
    done = place.apply("apply", "train", "--", sys.executable, "train.py")
    assert seen(done)["batches"] == [8] * 18, done.stderr
    assert seen(done)["held_out"] == [24] * 6
    assert "settings of best.yaml are in effect" in done.stderr


def test_empty_entry_of_pythonpath_still_names_the_current_folder(place: Place) -> None:
    place.best({"threads": {"omp": 2}})
    (place.path / "mine.py").touch()
    (place.path / "scripts").mkdir()
    (place.path / "scripts" / "main.py").write_text("import mine\n")
    path = own_environment()["PYTHONPATH"]
    done = place.apply(sys.executable, "scripts/main.py", env={"PYTHONPATH": f"{path}:"})  # as after PYTHONPATH=src:$PYTHONPATH
    assert done.returncode == 0, done.stderr
