"""Warm starts fulfil the launcher's contract, and a program cannot tell how it was started."""

import itertools
import json
import subprocess
import sys

import psutil
import pytest
import torch

from autotune.harness.protocol import KEEPING
from autotune.launchers import warm
from autotune.launchers.environment import server_environment
from autotune.launchers.local import LocalLauncher
from autotune.records import Kind
from autotune.trials.warm import WarmStarts
from tests.support.launcher_contract import SHORT, LauncherContract, a_launch, gone, is_alive, marked_processes, started, wait
from tests.support.stub_programs import SLEEP, program

INLINE = ["-S", "-c"]  # how the stub programs are started
NO_TORCH = ("json",)  # a server that imports nothing heavy
SCRIPTS = itertools.count()


class WarmLauncher(LocalLauncher):
    """Uses warm starts wherever possible. A program given as code is written to a script first."""

    def __init__(self, scripts):
        super().__init__(SHORT)
        self.scripts = scripts

    def start(self, launch):
        if launch.argv[1:3] == INLINE:
            script = self.scripts / f"program{next(SCRIPTS)}.py"
            script.write_text(launch.argv[3])
            launch.argv = [launch.argv[0], str(script), *launch.argv[4:]]
        launch.warm = NO_TORCH
        return super().start(launch)


@pytest.fixture
def launcher(tmp_path_factory):
    made = WarmLauncher(tmp_path_factory.mktemp("scripts"))
    yield made
    made.close()


@pytest.mark.thorough
class TestWarmLauncher(LauncherContract):
    @pytest.fixture
    def launcher(self, tmp_path_factory):
        return WarmLauncher(tmp_path_factory.mktemp("scripts"))


def server_of(study):
    found = [process for process in marked_processes(study) if str(warm.SERVER_SCRIPT) in process.cmdline()]
    return min(found, key=lambda process: process.create_time())


# What a program sees

DUMP = """
import json, os, random, resource, signal, sys, threading
TORCH = globals().get("WITH_TORCH")
if TORCH:
    import torch
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
seen = {
    "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "executable": sys.executable, "flags": str(sys.flags),
    "main": sorted(globals()), "file": globals().get("__file__"), "spec": getattr(__spec__, "name", None),
    "loader": str(type(__loader__)),
    "package": __package__, "is_main": vars(sys.modules["__main__"]) is globals(), "builtins": str(type(__builtins__)),
    "environ": {name: value for name, value in os.environ.items() if not name.startswith("AUTOTUNE")},
    "handlers": {int(n): str(getattr(signal.getsignal(n), "__name__", signal.getsignal(n))) for n in signal.valid_signals()},
    "kernel": {name: status[name] for name in ("SigBlk", "SigIgn", "SigCgt", "Cpus_allowed_list")},
    "limits": {name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")},
    "files": {name: os.readlink("/proc/self/fd/" + name) for name in sorted(os.listdir("/proc/self/fd"))
              if os.path.exists("/proc/self/fd/" + name)
              and "/libffi." not in os.readlink("/proc/self/fd/" + name)},  # a newer libffi opens itself for ctypes
    "session": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()], "parent": os.getppid(), "nice": os.nice(0),
    "umask": os.umask(0o22), "cwd": os.getcwd(), "thread": threading.current_thread() is threading.main_thread(),
    "streams": [(s.name, s.encoding, s.errors, s.line_buffering) for s in (sys.stdin, sys.stdout, sys.stderr)],
    "empty": sys.stdin.read(),
    "meta_path": [str(type(finder)) for finder in sys.meta_path if "harness" not in str(type(finder))],
}
drawn = [random.random()]
if TORCH:
    import numpy
    drawn.append(numpy.random.random())
    drawn += [torch.initial_seed(), float(torch.rand(1))]
    seen["torch"] = [torch.get_num_threads(), torch.get_num_interop_threads(), torch.cuda.is_initialized(),
                     float(torch.ones(1 << 20).sum())]
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
    loader = torch.utils.data.DataLoader(data, batch_size=4, num_workers=1, shuffle=True)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen["losses"] = []
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        seen["losses"].append(float(loss))
modules = sorted(sys.modules)
document = {"seen": seen, "drawn": drawn, "modules": modules}
with open(os.path.join(os.path.dirname(os.environ["AUTOTUNE_SPEC"]), "seen.json"), "w") as file:
    json.dump(document, file)
"""


def dump(launcher, study, number, *, modules, argv, env):
    folder = study / "trials" / f"{number:04d}"
    launch = a_launch(folder, [sys.executable, *argv], env=env)
    launch.cwd, launch.warm, launch.spec.trial = str(study.parent), modules, number
    ended = wait(LocalLauncher.start(launcher, launch))
    assert ended.exit_code in (0, None), ended.evidence["log_tail"]  # with a result, the exit is not waited for
    assert ended.start == ("warm" if modules else "fresh")
    found = json.loads((folder / "seen.json").read_text().replace(str(folder.resolve()), "TRIAL"))
    for result in ended.results:  # without what depends on the number of steps
        told = ("observed", "applicability", "target", "detected", "unit", "unit_source", "world_size", "status")
        found["seen"]["result"] = {name: getattr(result, name) for name in told}
        facts = {name: value for name, value in result.facts.items() if name != "startup"}
        found["seen"]["facts"], found["startup"] = facts, result.facts["startup"]
    return found


def differences(one, other):
    if isinstance(one, dict) and isinstance(other, dict):
        pairs = {name: differences(one.get(name), other.get(name)) for name in {**one, **other}}
        return {name: found for name, found in pairs.items() if found}
    return {} if one == other else (one, other)


def compared(launcher, study, argv, *, modules, env):
    source = DUMP if modules == NO_TORCH else f"WITH_TORCH = 1\n{DUMP}"
    (study.parent / "dump.py").write_text(source)
    package = study.parent / "pkg"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text(source)
    fresh = dump(launcher, study, 0, modules=(), argv=argv, env=env)
    found = [dump(launcher, study, number, modules=modules, argv=argv, env=env) for number in (1, 2)]
    for one in found:
        assert differences(fresh["seen"], one["seen"]) == {}
    for draws in zip(fresh["drawn"], *(one["drawn"] for one in found), strict=True):
        assert len(set(draws)) == len(draws)
    return fresh, found


@pytest.mark.parametrize(
    "argv", [["dump.py", "--lr", "1", ""], ["./dump.py"], ["-m", "pkg", "a"], ["-m", "pkg.__main__"], ["-m", "dump"]]
)
def test_program_sees_the_same_state_as_in_a_fresh_start(launcher, study, argv):
    env = {"PYTHONPATH": "relative", "PYTHONUNBUFFERED": "1", "LC_ALL": "", "LANG": "C", "SOME": "thing"}
    compared(launcher, study, argv, modules=NO_TORCH, env=env)


@pytest.mark.thorough
def test_torch_has_the_same_state_as_after_a_fresh_import(launcher, study):
    env = {"TORCHINDUCTOR_CACHE_DIR": str(study.parent / "compiled")}  # as in every trial; otherwise torch sets it
    fresh, found = compared(launcher, study, ["dump.py"], modules=("torch",), env=env)
    assert next(iter(fresh["startup"].pop("imports"))) == "torch"
    assert (fresh["startup"], found[0]["startup"]) == ({"is_first": True, "changed": [], "changed_before_compiler": []}, {})
    assert fresh["seen"]["result"]["status"] == "ended"
    extra = {name for one in found for name in one["modules"]} - set(fresh["modules"])
    assert extra <= {"runpy", "_autotune_harness.warm_server"}
    assert set(fresh["modules"]) <= set(found[0]["modules"])


FAILING = """
def f():
    raise ValueError("bad shape")
f()
"""


@pytest.mark.parametrize(
    ("source", "argv"),
    [
        (FAILING, ["bad.py"]),
        (FAILING, ["-m", "bad"]),
        ("import sys; sys.exit('no data')", ["bad.py"]),
        ("import sys; sys.exit(3)", ["bad.py"]),
        ("def f(:\n", ["bad.py"]),
        (
            "import sys, atexit; atexit.register(print, 'bye'); sys.excepthook = lambda *a: print('hook', a[1]); 1 / 0",
            ["bad.py"],
        ),
        ("import sys; sys.excepthook = lambda *a: 1 / 0; raise KeyError(1)", ["bad.py"]),
        ("raise KeyboardInterrupt", ["bad.py"]),
        ("import threading, time; threading.Thread(target=lambda: (time.sleep(0.1), print('thread'))).start()", ["bad.py"]),
        ("", ["-m", "nowhere"]),
    ],
)
def test_program_ends_as_in_a_fresh_start(launcher, study, source, argv):
    (study.parent / "bad.py").write_text(source)
    seen = []
    for number, modules in enumerate(((), NO_TORCH)):
        launch = a_launch(study / "trials" / f"{number:04d}", [sys.executable, *argv])
        launch.cwd, launch.warm = str(study.parent), modules
        ended = wait(LocalLauncher.start(launcher, launch))
        assert ended.start == ("warm" if modules else "fresh")
        lines = [line for line in ended.evidence["log_tail"].splitlines() if "warm_server" not in line]
        seen.append((ended.cause, ended.exit_code, ended.signal, ended.evidence["stdout_tail"], lines))
    if argv[0] == "-m" or "KeyboardInterrupt" in source:  # ignore runpy's frames
        seen = [(*one[:4], one[4][-1]) for one in seen]
    assert seen[0] == seen[1]


def test_spawned_child_processes_find_the_main_module(launcher, folder):
    body = """
import multiprocessing
def double(x): return 2 * x
class Pair:
    def __init__(self, x): self.x = x
if __name__ == "__main__":
    for how in ("spawn", "forkserver", "fork"):
        with multiprocessing.get_context(how).Pool(1) as pool:
            assert pool.map(double, [1, 2]) == [2, 4]
            assert [pair.x for pair in pool.map(Pair, [1, 2])] == [1, 2]
    result()
"""
    script = program(body)[3].replace("spec = json.load", "if __name__ == '__main__': spec = json.load")
    ended = wait(launcher.start(a_launch(folder, [*program("")[:3], script])))
    assert (ended.cause, ended.start) == ("result", "warm"), ended.evidence["log_tail"]


def test_folder_of_a_study_may_be_relative_to_the_working_directory(launcher, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    launch = a_launch(folder.relative_to(tmp_path), program("result()"))
    launch.cwd, launch.spec.folder = str(tmp_path), str(folder)
    assert wait(launcher.start(launch)).start == "warm"


# No process is left


def test_trials_share_one_server_that_ends_with_the_launcher(launcher, folder, study):
    first = wait(launcher.start(a_launch(folder, program("result()"))))
    server = server_of(study)
    second = wait(launcher.start(a_launch(folder, program("result()"))))
    assert [first.start, second.start] == ["warm", "warm"]
    assert server_of(study) == server
    launcher.close()
    assert gone(server.pid)
    assert marked_processes(study) == []


def test_killed_server_does_not_end_its_trial_and_is_replaced(launcher, folder, study):
    running, _ = started(launcher, folder, SLEEP.replace("(600)", "(0.5); result()"))
    server = server_of(study)
    server.kill()
    ended = wait(running)
    assert (ended.cause, ended.start) == ("result", "warm")
    again = wait(launcher.start(a_launch(folder, program("result()"))))
    assert (again.cause, again.start) == ("result", "warm")
    assert server_of(study) != server


@pytest.mark.thorough
def test_trial_starts_fresh_if_the_server_does_not_answer(launcher, folder, study):
    wait(launcher.start(a_launch(folder, program("result()"))))
    server_of(study).suspend()
    ended = wait(launcher.start(a_launch(folder, program("result()"))))
    assert (ended.cause, ended.start) == ("result", "fresh")
    assert "did not fork" in ended.evidence["why_fresh"]


def test_killed_supervisor_also_ends_the_trial_and_the_server(launcher, folder, study):
    running, pid = started(launcher, folder)
    server = server_of(study)
    server.parent().kill()
    ended = wait(running)
    assert ended.cause == "lost"
    assert gone(pid, server.pid)
    assert wait(launcher.start(a_launch(folder, program("result()")))).start == "warm"


def test_sweep_ends_a_trial_whose_supervisor_and_server_were_killed(launcher, folder, study):
    body = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nif os.fork(): " + SLEEP.replace("time.sleep", "0; time.sleep")
    _, pid = started(launcher, folder, body + "\ntime.sleep(600)")
    server = server_of(study)
    children = psutil.Process(pid).children()
    assert len(children) == 1
    supervisor = server.parent()
    supervisor.suspend()  # it can no longer end anything
    supervisor.kill()
    server.kill()
    assert is_alive(pid)
    LocalLauncher(SHORT).sweep(study)
    assert gone(pid, children[0].pid)


# When there is no warm start


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["python", "train.py"], ""),
        (["/opt/env/bin/python3.11", "train.py", "-u"], ""),
        (["python", "-m", "pkg.train"], ""),
        (["python", "-u", "train.py"], "the interpreter is given -u"),
        (["python", "-c", "pass"], "the interpreter is given -c"),
        (["python", "-m"], "the interpreter is given -m"),
        (["python"], "the command has no script"),
        (["python", "folder"], "folder is not a plain script"),
        (["python", "archive.py"], "archive.py is not a plain script"),
        (["torchrun", "train.py"], "the command does not begin with an interpreter of Python"),
        (["env", "A=1", "python", "train.py"], warm.NOT_BY_ENV),
    ],
)
def test_reason_is_given_if_a_command_cannot_start_warm(tmp_path, argv, why):
    (tmp_path / "train.py").write_text("")
    (tmp_path / "folder").mkdir()
    (tmp_path / "archive.py").write_bytes(b"PK\x05\x06" + bytes(18))
    assert warm.why_not(argv, str(tmp_path)) == why


def test_trial_with_another_environment_than_the_server_starts_fresh(launcher, folder):
    assert wait(launcher.start(a_launch(folder, program("result()"), env={"OMP_NUM_THREADS": "1"}))).start == "warm"
    ended = wait(launcher.start(a_launch(folder, program("result()"), env={"OMP_NUM_THREADS": "2"})))
    assert ended.start == "fresh"
    assert "OMP_NUM_THREADS" in ended.evidence["why_fresh"]


def test_malloc_settings_apply_to_a_warm_trial_but_not_to_the_server(launcher, folder):
    """The harness applies them in the trial. The server, from which other trials are forked, needs none."""
    found = "open(folder + '/found', 'w').write(os.environ['MALLOC_MMAP_MAX_'] + open('/proc/self/environ').read())\nresult()"
    launch = a_launch(folder, program(found), env=KEEPING)
    launch.spec.knobs["memory.malloc"] = "glibc_keep"
    assert wait(launcher.start(launch)).start == "warm"
    assert (folder / "found").read_text().startswith("0")
    assert "MALLOC_MMAP_MAX_" not in (folder / "found").read_text()
    assert wait(launcher.start(a_launch(folder, program("result()")))).start == "warm"


def test_malloc_variables_of_the_user_reach_the_server_for_any_allocator(folder, monkeypatch):
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "4096")
    plain, kept = a_launch(folder, ["python"]), a_launch(folder, ["python"], env=KEEPING)
    kept.spec.knobs["memory.malloc"] = "glibc_keep"
    assert server_environment(kept) == server_environment(plain)
    typed = a_launch(folder, ["python"], env=KEEPING)  # env.MALLOC_... is pinned: the harness has no knob to set
    assert KEEPING.items() <= server_environment(typed).items()


@pytest.mark.parametrize(
    ("name", "source", "why"),
    [
        ("torch_not_there", "", "ModuleNotFoundError"),
        ("breaks", "raise RuntimeError('no such device')", "no such device"),
        ("leaves", "import os; os._exit(3)", "status 3"),
    ],
)
def test_trials_start_fresh_if_the_server_cannot_import_a_module(launcher, folder, tmp_path, name, source, why):
    if source:
        (tmp_path / f"{name}.py").write_text(source)
    for _ in range(2):
        launch = a_launch(folder, program("result()"), env={"PYTHONPATH": str(tmp_path)})
        script = tmp_path / "script.py"
        script.write_text(launch.argv[3])
        launch.argv, launch.warm = [sys.executable, str(script)], (name,)
        ended = wait(LocalLauncher.start(launcher, launch))
        assert (ended.cause, ended.start) == ("result", "fresh")
        assert why in ended.evidence["why_fresh"]


TORCH = """
from types import SimpleNamespace
cuda = SimpleNamespace(is_initialized=lambda: False, _is_in_bad_fork=lambda: False)
default_generator = SimpleNamespace(seed=lambda: None)
def ones(size): return SimpleNamespace(sum=lambda: None)
"""


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("", ""),
        ("raise RuntimeError('no such device')", "no such device"),
        ("import os; os._exit(3)", "status 3"),
        ("import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()", "thread"),
        ("import subprocess; child = subprocess.Popen(['sleep', '60'])", "a child process"),
        ("import socket; connection = socket.socket()", "socket:"),
        ("import torch; torch.cuda.is_initialized = lambda: True", "initialised CUDA"),
    ],
)
def test_server_imports_only_torch_if_another_library_prevents_forks(launcher, folder, tmp_path, source, why):
    (tmp_path / "torch.py").write_text(TORCH)
    (tmp_path / "library.py").write_text(source)
    script = tmp_path / "script.py"
    script.write_text(program("import sys; result(detected={'has': 'library' in sys.modules})")[3])
    for _ in range(2):
        launch = a_launch(folder, [sys.executable, str(script)], env={"PYTHONPATH": str(tmp_path)})
        launch.warm = ("torch", "library")
        ended = wait(LocalLauncher.start(launcher, launch))
        assert (ended.cause, ended.start) == ("result", "warm"), ended.evidence
        assert (why in ended.evidence["why_less"]) if why else ("why_less" not in ended.evidence)
        assert ended.results[0].detected == {"has": not why}


def test_trial_starts_fresh_if_the_server_lacks_a_library_that_sets_variables(launcher, folder, tmp_path):
    (tmp_path / "torch.py").write_text(TORCH)
    (tmp_path / "library.py").write_text("raise RuntimeError('no such device')")
    (tmp_path / "script.py").write_text(program("result()")[3])
    launch = a_launch(folder, [sys.executable, str(tmp_path / "script.py")], env={"PYTHONPATH": str(tmp_path)})
    launch.warm, launch.is_warm_whole = ("library", "torch"), True
    ended = wait(LocalLauncher.start(launcher, launch))
    assert (ended.cause, ended.start) == ("result", "fresh")
    assert "no such device" in ended.evidence["why_fresh"]


def test_each_warm_trial_prints_what_an_import_printed(launcher, folder, tmp_path):
    (tmp_path / "library.py").write_text("import sys; print('welcome'); print('old version', file=sys.stderr)")
    for _ in range(2):
        launch = a_launch(folder, program("print('training'); result()"), env={"PYTHONPATH": str(tmp_path)})
        script = tmp_path / "script.py"
        script.write_text(launch.argv[3])
        launch.argv, launch.warm = [sys.executable, str(script)], ("library",)
        ended = wait(LocalLauncher.start(launcher, launch))
        assert ended.start == "warm"
        assert ended.evidence["stdout_tail"].splitlines() == ["welcome", "training"]
        assert "old version" in ended.evidence["log_tail"]


# The harness replaces the function. Lightning sets the variable, which the server sets for torch, too.
LIBRARY = "import os; from os import remove; os.environ['PYTORCH_NVML_BASED_CUDA_CHECK'] = '1'"
LANGUAGE_MODEL = """
import os, sys
IMPORTED = [name in sys.modules for name in ("transformers.models.gpt2.modeling_gpt2", "cleaner")]
{imports}
CHECKS = [os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK"), torch.cuda._nvml_based_avail()]
def main():
    torch.manual_seed(0)
    import transformers
    small = transformers.GPT2Config(vocab_size=50, n_positions=8, n_embd=8, n_layer=1, n_head=1)
    model = transformers.GPT2LMHeadModel(small)
    optimizer = torch.optim.AdamW(model.parameters())
    data = torch.utils.data.TensorDataset(torch.randint(50, (64, 8)))
    for (tokens,) in torch.utils.data.DataLoader(data, batch_size=4, shuffle=True):
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(loss.item())
    print(IMPORTED, cleaner.remove is os.remove, *CHECKS)
main()
"""


@pytest.mark.thorough
@pytest.mark.parametrize("imports", ["import torch, cleaner", "import cleaner, torch"])  # the second sets it before torch
def test_warm_trial_finds_libraries_imported_and_has_the_same_losses(launcher, study, tmp_path, imports):
    pytest.importorskip("transformers")
    (tmp_path / "train.py").write_text(LANGUAGE_MODEL.replace("{imports}", imports))
    installed = tmp_path / "site-packages"
    installed.mkdir()
    (installed / "cleaner.py").write_text(LIBRARY)
    starts, seen = WarmStarts("auto"), []
    for number in range(2):
        modules = starts.modules(Kind.search, changed={}, pinned={})
        launch = a_launch(study / "trials" / f"{number:04d}", [sys.executable, "train.py"], env={"PYTHONPATH": str(installed)})
        launch.cwd, launch.warm, launch.spec.trial = str(tmp_path), modules, number
        launch.is_warm_whole = starts.is_whole
        ended = wait(LocalLauncher.start(launcher, launch))
        assert ended.start == ("warm" if modules else "fresh"), ended.evidence
        starts.learn(ended.results[0])
        *losses, found = ended.evidence["stdout_tail"].splitlines()
        lines = [line for line in ended.evidence["log_tail"].splitlines() if "warm_server" not in line]
        seen.append((losses, lines, ended.results[0].observed))
        assert found == f"{[bool(modules)] * 2} True 1 True"
    assert len(seen[0][0]) == 16
    assert seen[0] == seen[1]


@pytest.mark.thorough
@pytest.mark.parametrize(("ask", "words"), [("", ""), ("torch._C._cuda_getDeviceCount()", "asked the CUDA driver")])
def test_no_trial_is_forked_from_a_process_that_has_called_the_cuda_driver(ask, words):
    if not hasattr(torch._C, "_cuda_getDeviceCount"):
        pytest.skip("this torch was built without CUDA")
    code = f"import torch\n{ask}\nfrom autotune.harness import warm_server\nwarm_server.check()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode == 0) == (not words), done.stderr
    assert words in done.stderr
