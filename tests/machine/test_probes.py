"""Probes run as processes; one that hangs, dies or prints nonsense is reported. Tested on this machine and on fakes."""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from autotune.machine.probes import Probe, data, engines, gpus, host, interpreters
from autotune.machine.probes.interpreter import _why_compiled_anew
from tests.machine.fakes import MISSING, FakeNvml, NVMLError, fake_nvml, refuse
from tests.support.launcher_contract import gone

ENVIRONMENT = dict(os.environ)


def ask(code: str, *, limit_s: float = 20.0):
    with Probe([sys.executable, "-c", code], limit_s=limit_s, env=ENVIRONMENT) as probe:
        return probe.answer()


def test_answer_of_a_probe_is_its_last_line() -> None:
    answer = ask("print('a library says hello'); print('{\"a\": 1}')")
    assert (answer.facts, answer.problem) == ({"a": 1}, "")
    assert answer.seconds > 0


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("import os; os.abort()", "ended by SIGABRT"),
        ("raise OSError('no driver here')", "OSError: no driver here"),
        ("import sys; sys.exit(3)", "ended with status 3"),
        ("print('[1]')", "ended with status 0"),
    ],
)
def test_probe_that_fails_gives_a_reason(code: str, problem: str) -> None:
    answer = ask(code)
    assert answer.facts == {}
    assert answer.problem == problem


def test_probe_that_hangs_is_ended_with_its_child_processes(tmp_path: Path) -> None:
    mark = tmp_path / "child"
    child = f"import time, pathlib, os; pathlib.Path({str(mark)!r}).write_text(str(os.getpid())); time.sleep(600)"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    for limit_s in (1.5, 6.0, 24.0):  # on a slow machine, the child may not have started within the limit
        begun_s = time.monotonic()
        answer = ask(code, limit_s=limit_s)
        assert answer.problem == f"no answer within {limit_s:g} s"
        assert time.monotonic() - begun_s < 60
        if mark.exists() and mark.read_text():
            break
    assert gone(int(mark.read_text()))


def test_interpreter_that_cannot_be_started_gives_a_reason(tmp_path: Path) -> None:
    with Probe([str(tmp_path / "nosuch")], limit_s=5, env=ENVIRONMENT) as probe:
        assert "No such file" in probe.answer().problem


def test_facts_of_the_host_are_plain_json() -> None:
    found = host.look()
    assert json.loads(json.dumps(found)) == found
    assert 1 <= found["num_cores"] <= found["num_cpus"]


def test_free_memory_is_what_the_cgroup_of_a_container_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "memory_limit_bytes", lambda: 2**20)
    monkeypatch.setattr(host, "memory_left_bytes", lambda: 1000)
    assert (host.look()["memory_bytes"], host.look()["available_bytes"]) == (2**20, 1000)


def test_settings_of_the_kernel_are_read(tmp_path: Path) -> None:
    (tmp_path / "enabled").write_text("always [madvise] never\n")
    assert host.chosen(tmp_path / "enabled") == "madvise"
    assert host.chosen(tmp_path / "nosuch") == ""
    assert host.shared_memory(tmp_path / "nosuch") is None


def test_settings_of_a_gpu_are_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    process = SimpleNamespace(pid=os.getpid(), usedGpuMemory=1 << 30)
    fake = fake_nvml(
        nvmlDeviceGetCount=lambda: 1,
        nvmlSystemGetCudaDriverVersion_v2=lambda: 12080,
        nvmlDeviceGetCudaComputeCapability=lambda handle: (9, 0),
        nvmlDeviceGetPersistenceMode=lambda handle: 0,
        nvmlDeviceGetClockInfo=lambda handle, kind: 345,
        nvmlDeviceGetMaxClockInfo=lambda handle, kind: 1980,
        nvmlDeviceGetCurrentClocksEventReasons=MISSING,
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda handle: 0x44,  # an older driver's name
        nvmlDeviceGetTemperature=lambda handle, sensor: 85,
        nvmlDeviceGetEnforcedPowerLimit=lambda handle: 500_000,
        nvmlDeviceGetPowerManagementDefaultLimit=lambda handle: 700_000,
        nvmlDeviceGetComputeRunningProcesses=lambda handle: [process],
    )
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    found = gpus.look(tmp_path)
    assert (found["driver"], found["cuda"], found["problem"]) == ("580.1", [12, 8], "")
    (gpu,) = found["gpus"]
    assert gpu["slowdowns"] == ["power_cap", "thermal"]
    assert (gpu["is_persistent"], gpu["capability"], gpu["temperature_c"]) == (False, [9, 0], 85)
    assert (gpu["power_cap_w"], gpu["default_power_cap_w"], gpu["application_clock_mhz"]) == (500.0, 700.0, None)
    assert gpu["processes"][0]["memory_bytes"] == 1 << 30
    assert gpu["processes"][0]["name"]
    assert json.loads(json.dumps(found)) == found


def mismatch() -> None:
    error = NVMLError("Driver/library version mismatch")
    error.value = 18
    raise error


@pytest.mark.parametrize(
    ("module", "problem", "code"),
    [
        (fake_nvml(nvmlInit=mismatch), "Driver/library version mismatch", 18),
        (None, "nvidia-ml-py is missing or broken", None),
        (FakeNvml(nvmlDeviceGetCount=2, nvmlInit=OSError("no library")), "broken (OSError: no library)", None),
        (SimpleNamespace(nvmlInit=print), "another package named pynvml hides nvidia-ml-py: it lacks nvmlShutdown", None),
    ],
)
def test_broken_nvml_is_reported_as_a_problem_without_gpus(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, module: object, problem: str, code: int | None
) -> None:
    (tmp_path / "nvidiactl").touch()
    monkeypatch.setitem(sys.modules, "pynvml", module)
    found = gpus.look(tmp_path)
    assert problem in found["problem"]
    assert (found["code"], found["gpus"], found["has_nvidia_files"]) == (code, [], True)


def test_a_gpu_that_has_fallen_off_the_bus_is_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = fake_nvml(nvmlDeviceGetIndex=lambda handle: handle)
    fake.nvmlDeviceGetHandleByIndex = lambda index: index if index else refuse()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    found = gpus.look(tmp_path)
    assert ([gpu["index"] for gpu in found["gpus"]], found["num_lost"]) == ([1], 1)


def test_an_nvml_that_answers_nothing_has_no_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(nvmlDeviceGetCount=refuse))
    assert gpus.look(tmp_path)["gpus"] == []


def interpreter(folder: Path, *words: str):
    environment = {**ENVIRONMENT, "PYTHONPATH": str(folder)}
    argv = [*interpreters(sys.executable, with_import=False), *words]
    with Probe(argv, limit_s=60, env=environment) as probe:
        return probe.answer().facts


def torch_in(folder: Path, body: str) -> Path:
    (folder / "torch").mkdir()
    (folder / "torch" / "version.py").write_text("__version__ = '9.9.9+cu199'\ncuda = '19.9'\n")
    (folder / "torch" / "__init__.py").write_text(body)
    return folder


def test_version_of_torch_is_read_without_importing_it(tmp_path: Path) -> None:
    found = interpreter(torch_in(tmp_path, "raise OSError('libtorch.so: cannot open')"))
    assert (found["torch"], found["cuda"], found["problem"]) == ("9.9.9+cu199", "19.9", "")
    assert "arch_list" not in found


def test_missing_bytecode_of_torch_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch_in(tmp_path, "")
    monkeypatch.setitem(ENVIRONMENT, "PYTHONDONTWRITEBYTECODE", "")
    assert interpreter(tmp_path)["bytecode"] == ""
    monkeypatch.setitem(ENVIRONMENT, "PYTHONDONTWRITEBYTECODE", "1")
    found = interpreter(tmp_path)
    assert (found["bytecode"], found["libraries"]) == ("PYTHONDONTWRITEBYTECODE is set", str(tmp_path))
    subprocess.run([sys.executable, "-m", "compileall", "-q", str(tmp_path)], check=True, env={})
    assert interpreter(tmp_path)["bytecode"] == ""


def test_a_relative_folder_for_bytecode_need_not_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    spec = importlib.machinery.ModuleSpec("torch", None)
    spec.cached = "later/torch/__init__.pyc"  # as with PYTHONPYCACHEPREFIX=later
    assert _why_compiled_anew(spec) == ""


def test_a_torch_that_cannot_be_imported_says_why(tmp_path: Path) -> None:
    found = interpreter(torch_in(tmp_path, "raise OSError('libtorch.so: cannot open')"), "--import")
    assert found["problem"] == "OSError: libtorch.so: cannot open"


def test_a_folder_named_torch_is_not_torch(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    argv = [sys.executable, "-S", *interpreters("", with_import=False)[1:]]  # without the real torch
    with Probe(argv, limit_s=60, env={**ENVIRONMENT, "PYTHONPATH": str(tmp_path)}) as probe:
        found = probe.answer().facts
    assert found["torch"] is None
    assert found["problem"] == "ImportError: a folder named torch, not the library, comes first on the path"


def test_files_are_read_past_the_page_cache_and_the_method_is_reported(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / "deep").mkdir(exist_ok=True)
        (tmp_path / "deep" / f"{number}.bin").write_bytes(os.urandom(1_500_000))
    (tmp_path / "empty").touch()
    (tmp_path / "deep" / "back").symlink_to(tmp_path)
    for name in "abc":  # links that lead to themselves, and to nothing
        (tmp_path / "deep" / name).symlink_to(tmp_path / "deep" / ("nothing" if name == "c" else name))
    found = data.look(str(tmp_path))
    assert (found["num_files"], found["bytes"], found["is_all"]) == (3, 4_500_000, True)
    assert found["method"] in (data.DIRECT, data.OWN_FILE, data.CACHED)
    assert found["read_bytes"] == (4_500_000 if found["method"] != data.OWN_FILE else data.OWN_BYTES)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["deep", "empty"], "no temporary file is left behind"


def test_without_direct_reads_a_temporary_file_is_dropped_from_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").write_bytes(b"x" * 100)

    def no_direct(files: list[str], flag: int) -> dict[str, int]:
        if flag:
            raise data._NotDirect
        return {"num_read": 1, "read_bytes": 100, "seconds": 1}

    monkeypatch.setattr(data, "_read", no_direct)
    monkeypatch.setattr(data, "OWN_BYTES", 2 * data.MIB)
    found = data.look(str(tmp_path))
    assert (found["method"], found["read_bytes"]) == (data.OWN_FILE, 2 * data.MIB)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    monkeypatch.setattr(data, "SPARE_BYTES", 1 << 60)  # more space than the disk has
    assert data.look(str(tmp_path))["method"] == data.CACHED


def test_path_that_is_not_a_folder_is_reported_as_a_problem(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert data.look(str(tmp_path / "nosuch"))["problem"] == "no such folder"
    assert data.look(str(tmp_path / "file"))["problem"] == "a file, not a folder"
    assert data.look(str(tmp_path))["num_files"] == 0


def test_file_systems_are_found_by_the_longest_mount(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(f"/dev/a / ext4 rw 0 0\nserver:/x {tmp_path} nfs4 rw 0 0\n/dev/b {tmp_path}x xfs rw 0 0\n")
    assert data.file_system(str(tmp_path / "deep"), str(mounts)) == "nfs4"
    assert data.file_system("/", str(mounts)) == "ext4"
    assert data.file_system("/", str(tmp_path / "nosuch")) == ""


def test_ray_cluster_is_looked_for_where_ray_itself_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", {"ray": "2.60.0"}.__getitem__)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert engines.ray() == {"version": "2.60.0", "address": "", "problem": ""}
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        (tmp_path / "ray").mkdir()
        (tmp_path / "ray" / "ray_current_cluster").write_text(f"{address}\n")
        assert engines.ray() == {"version": "2.60.0", "address": address, "problem": ""}
        monkeypatch.setenv("RAY_ADDRESS", "auto")
        assert engines.ray() == {"version": "2.60.0", "address": address, "problem": ""}
        for refused in (f"ray://{address}", "local"):
            monkeypatch.setenv("RAY_ADDRESS", refused)
            assert (engines.ray() or {})["problem"] == "not HOST:PORT"
    for wrong in (address, "host", "127.0.0.1:70000"):
        monkeypatch.setenv("RAY_ADDRESS", wrong)
        found = engines.ray()
        assert found
        assert found["address"] == wrong
        assert found["problem"]
