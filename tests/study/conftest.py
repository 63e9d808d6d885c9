import contextlib
import tempfile
from pathlib import Path

import pytest

from autotune.clock import VirtualClock
from autotune.config.compose import compose
from autotune.monitors.cpu import CpuLook, CpuMonitor, CpuUse
from autotune.monitors.host import HostTimes
from autotune.monitors.nvml import NoDevice
from autotune.studies import create
from autotune.study import StudyInputs, run_study
from tests.support.fake_launcher import FakeLauncher, MadeUpDevice, Surface
from tests.support.listener import RecordingListener

MACHINE = {
    "hostname": "h", "cpu_model": "Fake CPU", "num_cores": 4, "num_cpus": 4, "memory_bytes": 16 * 2**30,
    "isa": ["avx2", "amx_bf16"], "kernel": "6", "python": "3.11", "has_compiler": True, "gpus": [],
}  # fmt: skip

SAMPLER = "tpe"  # five times faster than the default; tests of the default sampler pass RATES
RATES = "search.sampler=rates"


class FakeCpu(CpuMonitor):
    """A fake CPU monitor. Tests set how many cores other processes and the tuner use."""

    foreign_cores = tuner_cores = 0.0

    def look(self, now_s):
        return CpuLook(time_s=now_s, num_cores=4, busy_s=0, idle_s=0, steal_s=0, processes={})

    def use(self, before, after, cores=frozenset()):
        seconds, tuner, foreign = after.time_s - before.time_s, self.tuner_cores, self.foreign_cores
        return CpuUse(seconds=seconds, num_cores=4, own_cores=2, tuner_cores=tuner, foreign_cores=foreign, idle_cores=0)


def fake_inputs(composed, launcher, machine, **more):
    """Returns the inputs of a study on a fake launcher."""
    return StudyInputs(
        title="a program", config=composed.config, yaml=composed.yaml, space=composed.space, command=composed.command,
        launcher=launcher, machine=machine, clock=launcher.clock, **{"device": NoDevice(), "cpu": FakeCpu(), **more},
    )  # fmt: skip


class Bench:
    """A study on the fake launcher, ready to run.

    Unless `is_kept`, it writes its summary only at its end, and no best.yaml: to write them after every trial takes longer than
    the study itself. It then knows no earlier studies, either. It never writes a report.
    """

    def __init__(
        self,
        folder,
        surface=None,
        *overrides,
        seed=0,
        minutes=4,
        command=("python", "-c", "pass"),
        machine=MACHINE,
        num_slots=1,
        slots_per_host=None,
        is_kept=False,
        **inputs,
    ):
        self.clock, self.listener, self.cpu, self._read = VirtualClock(), RecordingListener(), FakeCpu(), {}
        self.surface = surface or Surface()
        self.launcher = FakeLauncher(self.surface, self.clock, seed=seed, num_slots=num_slots, slots_per_host=slots_per_host)
        # Studies of one test share a folder, so warm starts are off. test_warm_start.py tests them.
        own = [f"search.sampler={SAMPLER}", "search.warm_start=off", "explain.auto=false"]
        given = [*own, f"study.seed={seed}", f"study.budget.minutes={minutes}", *overrides]
        composed = compose(given, command=list(command), facts=machine)
        self.folder = create(folder, "s")
        self.folder.is_kept = is_kept
        device = MadeUpDevice(self.launcher) if self.surface.power_w else NoDevice()
        given = {"poll_s": 0.5, "device": device, "cpu": self.cpu, **inputs}
        self.inputs = fake_inputs(composed, self.launcher, machine, **given)

    def run(self):
        return run_study(self.inputs, self.folder, self.listener)

    @property
    def trials(self):
        return self.folder.read_trials(self._read)


@pytest.fixture(autouse=True)
def _reports_are_not_written(monkeypatch):
    """Saves time: a report takes as long as ten trials. `tests/report/test_written.py` tests them."""
    monkeypatch.setattr("autotune.study.writing.write_report", lambda folder, summary: folder.report_file)


@pytest.fixture(autouse=True)
def _host_is_not_read(monkeypatch):
    """Saves reading the counters of the real machine several times a trial."""
    times = HostTimes(cpu_s=0.0, steal_s=0.0, pressure_s={}, throttled_s=None)
    monkeypatch.setattr("autotune.monitors.watch.read_times", lambda: times)


@contextlib.contextmanager
def folder_in_memory(on_disk):
    """A folder in memory if possible, because these tests would spend most of their time waiting for the disk."""
    shm = Path("/dev/shm")
    if not shm.is_dir():
        yield on_disk
        return
    with tempfile.TemporaryDirectory(dir=shm, prefix="autotune-test-") as folder:
        yield Path(folder)


@pytest.fixture
def tmp_path(tmp_path):
    with folder_in_memory(tmp_path) as folder:
        yield folder


@pytest.fixture
def bench(tmp_path):
    return lambda *args, **kwargs: Bench(tmp_path / "runs", *args, **kwargs)


@pytest.fixture
def tiny(tmp_path):
    return tiny_space(tmp_path)


def tiny_space(folder):
    """Returns overrides for a search space of four configurations; writes it to a file in `folder`."""
    file = folder / "tiny.yaml"
    file.write_text("loader.num_workers: [0, 2]\nprecision.amp: ['off', 'bf16']\n")
    return [f"search_space={file}"]
