"""The host's allocator in real processes, and the device's allocator on a fake of torch.cuda, so no GPU is needed."""

import contextlib
import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autotune.harness import process
from autotune.harness.explain import allocations
from autotune.harness.knobs import memory
from autotune.harness.process import MemoryWatch
from autotune.harness.protocol import APPLIED, KEEPING, NOT_APPLICABLE, OVERRIDDEN
from autotune.knobs import malloc
from autotune.knobs.memory import configuration
from tests.harness.conftest import Trial
from tests.harness.contexts import context

ON_CUDA: dict[str, Any] = {
    "memory.allocator": "expandable_segments",
    "memory.fraction": 0.5,
    "loader.non_blocking": True,
    "loader.device_prefetch": True,
}


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A library with an allocator's name but no allocator in it: the tests check only that it is loaded into the process."""
    if (compiler := shutil.which("g++")) is None:
        pytest.skip("no compiler to make a library with")
    path = tmp_path / "libjemalloc.so.2"
    subprocess.run([compiler, "-shared", "-x", "c++", "/dev/null", "-o", str(path)], check=True, timeout=60)
    return path


@pytest.mark.thorough
def test_an_allocator_is_preloaded_and_seen_in_the_process(trial: Trial, library: Path) -> None:
    environment = malloc.variables_for("jemalloc", {}, malloc.found_in([library.parent]))
    assert environment == {"LD_PRELOAD": str(library)}
    found = trial(
        "basic.py", knobs={"memory.malloc": "jemalloc", **ON_CUDA}, mode="inspect", env=environment, is_fresh=True
    ).result()
    assert (found.knobs["memory.malloc"].status, found.knobs["memory.malloc"].observed) == (APPLIED, "jemalloc")
    assert found.observed["memory.malloc"] == "jemalloc"
    assert {found.knobs[key].status for key in ON_CUDA} == {NOT_APPLICABLE}
    assert set(ON_CUDA) <= set(found.applicability)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("asked", "status", "reason"),
    [
        ("glibc", APPLIED, ""),
        ("tcmalloc", NOT_APPLICABLE, "no libtcmalloc was preloaded: it is not installed here"),
    ],
)
def test_allocator_that_is_not_installed_is_not_applicable(trial: Trial, asked: str, status: str, reason: str) -> None:
    report = trial("basic.py", knobs={"memory.malloc": asked}, mode="inspect").result().knobs["memory.malloc"]
    assert (report.status, report.reason, report.observed) == (status, reason, "glibc")


def test_other_preloaded_libraries_are_kept() -> None:
    mine = {"LD_PRELOAD": "/opt/libprofile.so:/usr/lib/libtcmalloc.so.4"}
    installed = {"jemalloc": "/usr/lib/libjemalloc.so.2"}
    assert malloc.variables_for("jemalloc", mine, installed) == {"LD_PRELOAD": "/usr/lib/libjemalloc.so.2:/opt/libprofile.so"}
    assert malloc.variables_for("glibc", mine, installed) == {"LD_PRELOAD": "/opt/libprofile.so"}
    assert malloc.variables_for("glibc", {"LD_PRELOAD": "/opt/libprofile.so"}, installed) == {}
    assert malloc.variables_for("tcmalloc", mine, installed) == {}
    assert malloc.variables_for("glibc_keep", mine, installed) == {"LD_PRELOAD": "/opt/libprofile.so", **KEEPING}


BLOCKS = """
import resource
for step in range(20):
    block = b"x" * 2**26
    del block
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
"""
FORKING = """
import os
from autotune.harness.knobs.memory import keep_freed_memory, return_freed_memory
keep_freed_memory()
os.register_at_fork(before=return_freed_memory)
block = b"x" * 2**28
del block
if os.fork() == 0:
    print(next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS")))
else:
    os.wait()
"""
KEEP_LATER = """
from autotune.harness.knobs.memory import keep_freed_memory
assert keep_freed_memory()
"""


def page_faults(source: str, allocator: str) -> int:
    variables = {**os.environ, **malloc.variables_for(allocator, {}, {})}
    return int(subprocess.run([sys.executable, "-c", source], env=variables, capture_output=True, timeout=60).stdout)


def test_the_c_library_keeps_freed_memory() -> None:
    """Either variables ask for this when the process starts, or a function is called while the process runs."""
    usual = page_faults(BLOCKS, "glibc")
    assert usual > 20 * 2**26 // 4096
    assert page_faults(BLOCKS, "glibc_keep") < 0.1 * usual
    assert page_faults(f"{KEEP_LATER}{BLOCKS}", "glibc") < 0.1 * usual


@pytest.mark.thorough
@pytest.mark.parametrize("at_start", [{}, KEEPING, {**KEEPING, "GLIBC_TUNABLES": "glibc.malloc.mmap_max=9"}])
def test_glibc_keep_is_read_back_in_the_process(trial: Trial, at_start: dict[str, str]) -> None:
    """This includes a process whose user has set GLIBC_TUNABLES, which takes precedence over autotune's variables."""
    knobs = {"memory.malloc": "glibc_keep"}
    run = trial("basic.py", "blocks=1", knobs=knobs, mode="inspect", env=at_start, is_fresh=bool(at_start))
    found = run.result()
    report = found.knobs["memory.malloc"]
    assert (report.status, report.observed, found.observed["memory.malloc"]) == (APPLIED, "glibc_keep", "glibc_keep")
    assert int(run.stdout.split()[0]) < 1000  # of 9,766 pages


@pytest.mark.thorough
def test_glibc_is_overridden_if_variables_of_the_user_keep_freed_memory(trial: Trial) -> None:
    found = trial("basic.py", knobs={"memory.malloc": "glibc"}, mode="inspect", env=KEEPING, is_fresh=True).result()
    assert found.knobs["memory.malloc"].status == OVERRIDDEN
    assert found.knobs["memory.malloc"].reason.endswith("; unset MALLOC_MMAP_MAX_ and MALLOC_TRIM_THRESHOLD_")


def test_forked_workers_do_not_hold_freed_memory_that_their_parent_keeps() -> None:
    """Freed memory is returned before the fork, so the child is as small as if its parent kept nothing."""
    ended = subprocess.run([sys.executable, "-c", FORKING], env=os.environ, capture_output=True, text=True, timeout=60)
    assert int(ended.stdout) < 2**27 // 1024, ended.stderr


def test_c_library_that_cannot_keep_memory_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    assert not memory.keep_freed_memory()


def test_allocator_search_skips_debug_builds_and_prefers_the_first_folder(tmp_path: Path) -> None:
    for name in ("a/libtcmalloc_minimal.so.4", "a/libtcmalloc_minimal_debug.so.4", "b/libtcmalloc.so.4", "b/libjemalloc.so"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert malloc.found_in([tmp_path / "none", tmp_path / "a", tmp_path / "b"]) == {
        "tcmalloc": str(tmp_path / "a/libtcmalloc_minimal.so.4"),
        "jemalloc": str(tmp_path / "b/libjemalloc.so"),
    }


INDEX = 1  # the GPU that trains; it is not the current device


class FakeCuda:
    """A fake of torch.cuda whose allocator has read a configuration, as in torch 2.14."""

    def __init__(self, text: str) -> None:
        asked = dict(part.split(":") for part in text.split(",") if part)
        self.backend = asked.get("backend", "native")
        self.fraction, self.is_emptied = 1.0, False
        self.memory = self
        self.settings = {
            "PYTORCH_CUDA_ALLOC_CONF": text,
            "expandable_segments": asked.get("expandable_segments") == "True",
            "max_split_size": int(asked["max_split_size_mb"]) * 2**20 if "max_split_size_mb" in asked else -1,
            "garbage_collection_threshold": float(asked.get("garbage_collection_threshold", 0.0)),
            "roundup_power2_divisions": dict.fromkeys("1248", int(asked.get("roundup_power2_divisions", 0))),
        }

    def get_allocator_backend(self) -> str:
        return self.backend

    def _snapshot(self) -> dict[str, Any]:
        assert self.backend == "native", "cudaMallocAsync has no snapshot"
        return {"allocator_settings": self.settings}

    def device_count(self) -> int:
        return 2

    def max_memory_reserved(self, index: int) -> int:
        return 500 if index == INDEX else 0

    def get_device_properties(self, index: int) -> SimpleNamespace:
        assert index == INDEX
        return SimpleNamespace(total_memory=1000)

    def device(self, index: int) -> Any:
        return contextlib.nullcontext()

    def set_per_process_memory_fraction(self, fraction: float, index: int | None) -> None:
        assert index == INDEX
        self.fraction = fraction

    def empty_cache(self) -> None:
        self.is_emptied = True

    def get_per_process_memory_fraction(self, index: int | None) -> float:
        assert index == INDEX
        return self.fraction


def test_each_configuration_of_the_gpu_allocator_is_distinguished(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("default", "expandable_segments", "max_split_256", "roundup_8", "collect_80", "cuda_malloc_async")
    for given in names:
        text = configuration(given).get("PYTORCH_CUDA_ALLOC_CONF", "")
        assert configuration(given).get("PYTORCH_ALLOC_CONF", "") == text
        monkeypatch.setattr(torch, "cuda", FakeCuda(text))
        for asked in names:
            report = memory.MemoryKnobs(context({"memory.allocator": asked})).verify()["memory.allocator"]
            assert report.status == (APPLIED if asked == given else OVERRIDDEN), (given, asked, report.reason)


def test_lower_of_memory_fraction_and_memory_limit_applies(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit_bytes, fraction in ((None, 0.5), (300, 0.3), (900, 0.5)):
        fake = FakeCuda("")
        monkeypatch.setattr(torch, "cuda", fake)
        trial = context({"memory.fraction": 0.5}, spec={"memory_limit_bytes": limit_bytes}, device_index=INDEX)
        knobs = memory.MemoryKnobs(trial)
        knobs.on_activate()
        assert fake.fraction == fraction
        assert fake.is_emptied, "torch does not check cached memory against the limit"
        assert knobs.verify()["memory.fraction"].status == APPLIED
        fake.fraction = 1.0  # as if the program set it
        assert knobs.verify()["memory.fraction"].status == OVERRIDDEN


@pytest.mark.parametrize(("allocator", "is_limited"), [("collect_80", True), ("expandable_segments", False)])
def test_collecting_allocator_gets_a_memory_limit_without_which_torch_never_collects(
    allocator: str, is_limited: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeCuda("")
    fake.fraction = 0.0  # no limit was set
    monkeypatch.setattr(torch, "cuda", fake)
    memory.MemoryKnobs(context({"memory.allocator": allocator}, device_index=INDEX)).on_activate()
    assert fake.fraction == (1.0 if is_limited else 0.0)


class Statistics:
    """A fake of torch.cuda's memory statistics for two GPUs, in bytes. The second GPU trains."""

    def __init__(self) -> None:
        self.reserved, self.retries, self.num_emptied, self.current = [0, 800], 0, 0, 0
        self.limits: list[tuple[float, int | None]] = []

    def device_count(self) -> int:
        return len(self.reserved)

    def get_device_properties(self, index: int) -> SimpleNamespace:
        return SimpleNamespace(total_memory=1000 * (1 + index))

    def max_memory_reserved(self, index: int) -> int:
        return self.reserved[index]

    def max_memory_allocated(self, index: int) -> int:
        return self.reserved[index] // 2

    @contextlib.contextmanager
    def device(self, index: int) -> Iterator[None]:
        before, self.current = self.current, index
        yield
        self.current = before

    def set_per_process_memory_fraction(self, fraction: float, index: int) -> None:
        self.limits.append((fraction, index))
        self.current = index  # as in older releases of torch

    def empty_cache(self) -> None:
        self.num_emptied += 1

    def memory_stats_as_nested_dict(self, index: int) -> dict[str, Any]:
        size = self.reserved[index]
        reserved = {"current": size, "peak": size, "allocated": 0, "freed": 0}  # as with cudaMallocAsync
        return {"reserved_bytes": {"all": reserved}, "segment": {"all": {"allocated": 0}}, "num_alloc_retries": self.retries}

    def memory_stats(self, index: int) -> dict[str, int]:
        return {"num_alloc_retries": self.retries}


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> tuple[Statistics, MemoryWatch]:
    """Statistics of two GPUs, and the memory watch of a program that trains on the second."""
    statistics, watch = Statistics(), MemoryWatch()
    monkeypatch.setattr(torch, "cuda", statistics)
    monkeypatch.setattr(process, "LOOK_S", 0.0)
    watch.begin("cuda", INDEX, limit_bytes=500)
    return statistics, watch


def test_memory_is_reported_for_the_gpu_that_trains(watched: tuple[Statistics, MemoryWatch]) -> None:
    statistics, watch = watched
    assert (statistics.limits, statistics.num_emptied) == ([(0.25, INDEX)], 1)
    assert watch.summary() == {
        "kind": "cuda",
        "peak_bytes": 400,
        "peak_reserved_bytes": 800,
        "capacity_bytes": 2000,
        "alloc_retries": 0,
    }
    statistics.reserved = [900, 800]  # both hold a part of the model
    assert watch.summary()["capacity_bytes"] == 1000


def test_memory_limit_applies_to_each_gpu_that_the_program_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    statistics = Statistics()
    statistics.reserved = [100, 800]
    monkeypatch.setattr(torch, "cuda", statistics)
    MemoryWatch().begin("cuda", INDEX, limit_bytes=500)
    assert (statistics.limits, statistics.num_emptied) == ([(0.5, 0), (0.25, INDEX)], 1)
    assert statistics.current == 0, "what the program allocates next must not move to another GPU"


def test_growth_is_seen_in_an_allocator_that_counts_no_segments(watched: tuple[Statistics, MemoryWatch]) -> None:
    statistics, watch = watched
    before = watch.movement()
    assert watch.movement() == before
    statistics.reserved[INDEX] += 100
    assert watch.movement() != before


class Uncounted(Statistics):
    """A fake of torch.cuda if the program has replaced the allocator: torch then has no statistics."""

    def refuse(self, index: int | None = None) -> Any:
        raise RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats.")

    memory_stats_as_nested_dict = memory_stats = max_memory_allocated = max_memory_reserved = refuse

    def get_allocator_backend(self) -> str:
        return "pluggable"

    def get_per_process_memory_fraction(self, index: int | None) -> float:
        raise RuntimeError("CUDAPluggableAllocator does not yet support getMemoryFraction.")


def test_program_that_has_replaced_the_allocator_is_measured_without_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = MemoryWatch()
    monkeypatch.setattr(torch, "cuda", Uncounted())
    watch.begin("cuda", INDEX, limit_bytes=500)
    watch.open_window()
    assert watch.movement() == (0, 0)
    unknown = dict.fromkeys(("peak_bytes", "peak_reserved_bytes", "alloc_retries"))
    assert watch.summary() == {"kind": "cuda", "capacity_bytes": 2000, **unknown}
    knobs = memory.MemoryKnobs(context({"memory.allocator": "expandable_segments", "memory.fraction": 0.5}, device_index=INDEX))
    assert set(knobs.applicability()) == {"memory.allocator", "memory.fraction"}
    assert [report.status for report in knobs.verify().values()] == [OVERRIDDEN, NOT_APPLICABLE]
    recorder = allocations.recorder("cuda", INDEX)
    recorder.begin()
    recorder.end()
    assert (recorder.peak_bytes, len(recorder.notes)) == (0, 1)


def test_gpu_is_named_even_if_its_memory_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="NVIDIA H200", uuid="12", major=9, minor=0, total_memory=1000)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", Uncounted().refuse)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert process.facts("cuda", INDEX)["device_uuids"] == ["GPU-12"]


@pytest.mark.parametrize(
    ("visible", "uuid"),
    [("", "GPU-12"), ("0,1", "GPU-12"), ("GPU-12", "GPU-12"), ("GPU-5, MIG-34", "MIG-34"), ("MIG-34", "GPU-12")],
)
def test_mig_slice_is_named_by_its_own_uuid(visible: str, uuid: str, monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="NVIDIA H200", uuid="12", major=9, minor=0, total_memory=1000)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties if index == INDEX else None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert process.facts("cuda", INDEX)["device_uuids"] == [uuid]


@pytest.mark.parametrize(("reserved", "used"), [([0, 8, 0], [1]), ([6, 8, 0], [1, 0]), ([0, 8, 0.5], [1]), ([0, 0, 0], [1])])
def test_all_gpus_that_hold_a_part_of_the_model_are_named(
    reserved: list[float], used: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def properties(index: int) -> SimpleNamespace:
        return SimpleNamespace(name="NVIDIA H200", uuid=index, major=9, minor=0, total_memory=1000)

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(reserved))
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda index: reserved[index])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert process.facts("cuda", INDEX)["device_uuids"] == [f"GPU-{index}" for index in used]


@pytest.mark.parametrize(
    ("device", "there", "has_compiler"),
    [
        ("cuda", ("triton", "gcc"), True),
        ("cuda", ("triton", "clang"), True),
        ("cuda", ("triton",), False),  # triton compiles its launchers
        ("cuda", ("gcc",), False),
        ("cpu", ("g++",), True),
        ("cpu", ("triton", "gcc"), False),
    ],
)
def test_compiler_is_available_only_if_everything_it_needs_is_installed(
    device: str, there: tuple[str, ...], has_compiler: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "Python.h").touch()
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(process.shutil, "which", lambda name: name if name in there else None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name if name in there else None)
    monkeypatch.setattr(process.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    assert process.has_compiler(device) is has_compiler
    (tmp_path / "Python.h").unlink()
    monkeypatch.setattr(process.sysconfig, "get_config_var", lambda name: str(tmp_path))
    assert not process.has_compiler(device)


@pytest.mark.parametrize(
    ("kind", "before", "after"), [("auto", [500], [500, 500]), ("cpu", [500], [500, 500]), ("cuda", [], [500])]
)
def test_host_memory_is_limited_if_the_program_trains_on_the_cpu(
    kind: str, before: list[int], after: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[int] = []
    monkeypatch.setattr(process, "_limit_data", limits.append)
    process.limit_memory(SimpleNamespace(device=kind, memory_limit_bytes=500))
    assert limits == before
    MemoryWatch().begin("cpu", None, limit_bytes=500)
    assert limits == after
