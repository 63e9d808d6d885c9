"""The verdicts of `doctor` on simulated machines: good ones, bad ones, and ones that reveal nothing."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from autotune.harness.cores import numbers_of
from autotune.machine.checks import Finding, Status, check_connections, check_data, check_gpus, check_host, check_program
from autotune.machine.checks.network import legend, matrix
from autotune.machine.nvml import FOREIGN

GIB = 1 << 30
GPU = {
    "index": 0, "name": "NVIDIA H200", "capability": [9, 0], "is_persistent": True, "clock_mhz": 1980, "max_clock_mhz": 1980,
    "application_clock_mhz": 1980, "default_application_clock_mhz": 1980, "slowdowns": [], "temperature_c": 35,
    "power_cap_w": 700.0, "default_power_cap_w": 700.0, "processes": [],
}  # fmt: skip
LINK = {"pci": "", "numa_node": 0, "nvlinks": 18, "nvlinks_active": 18}
GPUS = {
    "problem": "", "code": None, "has_nvidia_files": True, "has_amd_files": False, "driver": "580.65", "cuda": [13, 0],
    "gpus": [GPU, {**GPU, "index": 1}],
    "topology": {"gpus": [LINK, {**LINK, "numa_node": 1}], "links": [["X", "NV18"], ["NV18", "X"]]},
}  # fmt: skip
NO_GPUS = {
    "problem": "NVML Shared Library Not Found",
    "code": 12,
    "has_nvidia_files": False,
    "has_amd_files": False,
    "gpus": [],
}
PORT = {
    "name": "mlx5_0",
    "port": "1",
    "is_active": True,
    "state": "ACTIVE",
    "rate": "400 Gb/sec (4X NDR)",
    "layer": "InfiniBand",
}
HOST = {
    "num_cpus": 32, "num_affine": 32, "cpus": list(range(32)), "quota_cores": None, "num_cores": 32, "memory_bytes": 256 * GIB,
    "available_bytes": 200 * GIB, "swap_bytes": 0, "swap_used_bytes": 0,
    "shared_memory": {"bytes": 128 * GIB, "free_bytes": 128 * GIB, "is_writable": True}, "memlock_bytes": None,
    "open_files": 65536, "max_open_files": 65536, "huge_pages": "madvise", "cxx": "/usr/bin/g++", "cc": "/usr/bin/gcc",
    "variables": {}, "adapters": [PORT], "numa_nodes": {"0": "0-15", "1": "16-31"},
    "slurm": {"partitions": ["main", "high"], "problem": ""},
    "ray": {"version": "2.60.0", "address": "10.0.0.1:6379", "problem": ""},
}  # fmt: skip
PYTHON = {
    "python": "3.11.7", "executable": "/usr/bin/python", "torch": "2.14.1", "cuda": "13.0", "has_header": True,
    "has_triton": True, "problem": "", "is_available": True, "why_not_available": "", "import_s": 2.5,
    "arch_list": ["sm_80", "sm_90", "compute_90"], "nccl": [2, 27, 3],
}  # fmt: skip
DATA = {
    "path": "/data", "problem": "", "file_system": "ext4", "num_files": 1000, "bytes": 100 * GIB, "is_all": True,
    "num_read": 300, "read_bytes": 300 << 20, "seconds": 1.0, "method": "existing files",
}  # fmt: skip


def changed(document: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**copy.deepcopy(document), **changes}


def with_gpu(**changes: Any) -> dict[str, Any]:
    return changed(GPUS, gpus=[GPU, {**GPU, "index": 1, **changes}])


def one(findings: list[Finding], name: str) -> Finding:
    return next(finding for finding in findings if finding.name == name)


def everything(gpus: dict[str, Any], host: dict[str, Any], python: dict[str, Any], data: dict[str, Any]) -> list[Finding]:
    return [
        *check_gpus(gpus),
        *check_connections(gpus, host),
        *check_host(host),
        *check_program(python, "", gpus=gpus, host=host),
        *check_data(data, host=host),
    ]


def test_good_machine_has_no_findings_to_fix() -> None:
    findings = everything(GPUS, HOST, PYTHON, DATA)
    assert {finding.status for finding in findings} == {Status.ok}
    assert not any(finding.cost or finding.command for finding in findings)
    names = {finding.name for finding in findings}
    assert {"driver", "torch", "persistence mode", "clocks", "power cap", "topology", "NVLink", "InfiniBand", "NUMA"} <= names
    assert {"cores", "shared memory", "locked memory", "open files", "swap", "compiler", "disk", "page cache"} <= names
    assert one(findings, "driver").found == "2 x NVIDIA H200, driver 580.65 for CUDA up to 13.0"
    assert one(findings, "topology").found == "2 GPUs, all connected by NV18"
    assert one(findings, "NUMA").found == "2 nodes; node 0 has GPU 0; node 1 has GPU 1"


def test_machine_without_gpus_has_no_warnings() -> None:
    host = changed(HOST, adapters=[], numa_nodes={"0": "0-31"})
    findings = everything(NO_GPUS, host, changed(PYTHON, cuda=None, is_available=None), {})
    assert {finding.status for finding in findings} == {Status.ok, Status.skipped}
    assert "training runs on the CPU" in one(findings, "driver").found
    assert not any(finding.name in ("clocks", "topology", "NVLink") for finding in findings)


def test_every_warning_has_a_cost_and_a_command() -> None:
    bad_host = changed(
        HOST, quota_cores=4.0, num_cores=4, swap_bytes=8 * GIB, swap_used_bytes=4 * GIB, memlock_bytes=8 << 20, open_files=1024,
        huge_pages="never", cc=None, shared_memory={"bytes": 64 << 20, "free_bytes": 64 << 20, "is_writable": True},
        variables={"MKL_NUM_THREADS": "1", "CUDA_LAUNCH_BLOCKING": "1"},
        adapters=[changed(PORT, is_active=False, state="DOWN")],
    )  # fmt: skip
    bad = with_gpu(is_persistent=False, slowdowns=["thermal"], power_cap_w=400.0, processes=[{"pid": 7, "name": "python",
                   "memory_bytes": GIB}])  # fmt: skip
    slow = changed(DATA, read_bytes=30 << 20, num_read=30, file_system="nfs4", bytes=900 * GIB)
    findings = everything(bad, bad_host, changed(PYTHON, arch_list=["compute_80"], has_triton=False), slow)
    worse = [finding for finding in findings if finding.status is not Status.ok]
    assert {finding.status for finding in worse} == {Status.warning}
    assert all(finding.cost and finding.command for finding in worse)
    assert {finding.name for finding in worse} == {
        "persistence mode", "clocks", "power cap", "other processes", "InfiniBand", "cores", "swap", "shared memory",
        "locked memory", "open files", "huge pages", "torch", "compiler", "thread variables", "debugging variable", "disk",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "name", "found", "command"),
    [
        ({"is_persistent": False}, "persistence mode", "off on GPU 1", "sudo nvidia-smi -i 1 -pm 1"),
        ({"power_cap_w": 500.0}, "power cap", "GPU 1 capped at 500 W, 700 W by default", "sudo nvidia-smi -i 1 -pl 700"),
        ({"application_clock_mhz": 1200}, "clocks", "application clock of GPU 1: 1200 MHz instead of 1980 MHz", "-i 1 -rac"),
        ({"slowdowns": ["thermal"], "temperature_c": 91}, "clocks", "GPU 1 is slowed down now by heat, 91 °C", "-i 1"),
        ({"processes": [{"pid": 7, "name": None, "memory_bytes": None}]}, "other processes", "pid 7 of another container",
         "nvidia-smi"),
    ],
)  # fmt: skip
def test_one_bad_gpu_is_named(changes: dict[str, Any], name: str, found: str, command: str) -> None:
    finding = one(check_gpus(with_gpu(**changes)), name)
    assert finding.status is Status.warning
    assert found in finding.found
    assert command in finding.command


def test_slowdown_by_the_power_cap_is_not_a_warning() -> None:
    assert one(check_gpus(with_gpu(slowdowns=["power_cap"])), "clocks").status is Status.ok


def test_gpus_with_different_clocks_are_named_with_their_own() -> None:
    slower = [{**GPU, "application_clock_mhz": 1200}, {**GPU, "index": 1, "application_clock_mhz": 1500}]
    found = one(check_gpus(changed(GPUS, gpus=slower)), "clocks").found
    assert found == "application clock of GPU 0: 1200 MHz instead of 1980 MHz; of GPU 1: 1500 MHz instead of 1980 MHz"


def test_gpus_with_different_power_caps_are_named_with_their_own() -> None:
    other = {**GPU, "index": 1, "power_cap_w": 300.0, "default_power_cap_w": 350.0}
    capped = changed(GPUS, gpus=[{**GPU, "power_cap_w": 500.0}, other])
    finding = one(check_gpus(capped), "power cap")
    assert finding.found == "GPU 0 capped at 500 W, 700 W by default; GPU 1 capped at 300 W, 350 W by default"
    assert finding.command == "sudo nvidia-smi -i 0 -pl 700; sudo nvidia-smi -i 1 -pl 350"


def test_finding_that_applies_to_all_gpus_does_not_list_them() -> None:
    both = changed(GPUS, gpus=[changed(GPU, is_persistent=False), changed(GPU, index=1, is_persistent=False)])
    finding = one(check_gpus(both), "persistence mode")
    assert (finding.found, finding.command) == ("off on all 2 GPUs", "sudo nvidia-smi -pm 1")


def test_checks_of_figures_that_a_gpu_does_not_report_are_skipped() -> None:
    silent = {**dict.fromkeys(GPU), "index": 0, "processes": []}
    findings = check_gpus(changed(GPUS, gpus=[silent]))
    assert {one(findings, name).status for name in ("persistence mode", "clocks", "power cap")} == {Status.skipped}


@pytest.mark.parametrize(
    ("changes", "status", "found", "command"),
    [
        ({"problem": "Driver/library version mismatch", "code": 18}, Status.error, "of different versions", "reboot"),
        ({"problem": "Driver Not Loaded", "code": 9}, Status.error, "not loaded", "modprobe nvidia"),
        ({"problem": "Unknown Error", "code": 999}, Status.error, "NVML: Unknown Error", "dmesg"),
        ({"problem": "nvidia-ml-py is missing", "code": None}, Status.warning, "cannot be queried", "pip install nvidia-ml-py"),
        (
            {"problem": f"{FOREIGN}: it lacks nvmlInit", "code": None},
            Status.warning,
            "it lacks nvmlInit",
            "pip uninstall pynvml;",
        ),
        ({"problem": ""}, Status.error, "shows no GPU", "lspci"),
        ({"problem": "x", "code": 12, "has_nvidia_files": False, "has_amd_files": True}, Status.skipped, "AMD", ""),
    ],
)
def test_driver_that_does_not_answer_is_reported_with_its_cause(
    changes: dict[str, Any], status: Status, found: str, command: str
) -> None:
    (finding,) = check_gpus(changed(GPUS, gpus=[], **changes))
    assert finding.status is status
    assert found in finding.found
    assert command in finding.command


def test_lost_gpu_is_an_error() -> None:
    finding = one(check_gpus(changed(GPUS, num_lost=1)), "driver")
    assert finding.status is Status.error
    assert finding.found == "2 x NVIDIA H200, and 1 more that does not answer"


def test_driver_that_hangs_is_an_error() -> None:
    (finding,) = check_gpus({}, "no answer within 20 s")
    assert finding.status is Status.error
    assert "no answer within 20 s" in finding.found


@pytest.mark.parametrize(
    ("changes", "status", "found"),
    [
        ({"torch": None}, Status.skipped, "--python"),
        ({"problem": "ImportError: libcudart.so"}, Status.error, "libcudart.so"),
        ({"cuda": None}, Status.error, "built without CUDA, although this machine has GPUs 0, 1"),
        ({"cuda": "14.1", "is_available": False, "why_not_available": "driver too old"}, Status.error, "(driver too old)"),
        ({"arch_list": ["sm_80", "sm_90"]}, Status.ok, "imported in 2.5 s"),
        ({"arch_list": ["sm_90a"]}, Status.ok, "imported"),
        ({"arch_list": ["sm_80", "compute_80"]}, Status.warning, "only PTX that the driver compiles"),
        ({"arch_list": ["sm_80", "sm_100", "sm_120"]}, Status.error, "no kernels for GPUs 0, 1 (sm_90)"),
        ({"arch_list": []}, Status.ok, "imported"),
    ],
)
def test_torch_is_checked_against_the_driver_and_the_gpus(changes: dict[str, Any], status: Status, found: str) -> None:
    finding = one(check_program(changed(PYTHON, **changes), "", gpus=GPUS, host=HOST), "torch")
    assert finding.status is status
    assert found in finding.found


def test_gpu_without_kernels_is_named_even_if_the_first_gpu_does_not_answer() -> None:
    found = changed(GPUS, gpus=[{**GPU, "index": 1}], num_lost=1)
    finding = one(check_program(changed(PYTHON, arch_list=["sm_80"]), "", gpus=found, host=HOST), "torch")
    assert "no kernels for GPU 1 (sm_90)" in finding.found


def test_libraries_without_stored_bytecode_are_reported() -> None:
    assert not [each for each in check_program(PYTHON, "", gpus=GPUS, host=HOST) if each.name == "bytecode"]
    python = changed(PYTHON, bytecode="PYTHONDONTWRITEBYTECODE is set", libraries="/usr/my lib")
    finding = one(check_program(python, "", gpus=GPUS, host=HOST), "bytecode")
    assert finding.status is Status.warning
    assert "PYTHONDONTWRITEBYTECODE is set" in finding.found
    assert finding.command == "/usr/bin/python -m compileall -q '/usr/my lib'"
    python["bytecode"] = "/usr/my lib is read-only"
    assert "PYTHONPYCACHEPREFIX" in one(check_program(python, "", gpus=GPUS, host=HOST), "bytecode").command


@pytest.mark.parametrize(
    ("why", "cuda", "command"),
    [
        ("", "14.0", "a build for CUDA 13.0 or older"),
        ("Error 802: system not yet initialized", "13.0", "nvidia-fabricmanager"),
        ("", "13.0", "torch.zeros(1).cuda()"),
    ],
)
def test_command_for_a_torch_that_sees_no_gpu_depends_on_the_cause(why: str, cuda: str, command: str) -> None:
    python = changed(PYTHON, is_available=False, why_not_available=why, cuda=cuda)
    assert command in one(check_program(python, "", gpus=GPUS, host=HOST), "torch").command


@pytest.mark.parametrize(
    ("changes", "name", "status", "found"),
    [
        ({"quota_cores": 2.5, "num_cores": 3}, "cores", Status.warning, "quota is 2.50 of 32 CPUs"),
        ({"quota_cores": 2.5, "num_cores": 3, "variables": {"OMP_NUM_THREADS": "3"}}, "cores", Status.ok, "quota"),
        ({"num_affine": 8, "num_cores": 8}, "cores", Status.ok, "may run on 8 of 32 CPUs"),
        ({"shared_memory": None}, "shared memory", Status.error, "no /dev/shm"),
        ({"shared_memory": {"bytes": GIB, "free_bytes": GIB, "is_writable": False}}, "shared memory", Status.error, "written"),
        (
            {"shared_memory": {"bytes": 8 * GIB, "free_bytes": 0, "is_writable": True}},
            "shared memory",
            Status.warning,
            "0 B free",
        ),
        ({"memlock_bytes": 8 << 20, "adapters": []}, "locked memory", Status.ok, "enough without InfiniBand"),
        ({"open_files": None}, "open files", Status.ok, "unlimited"),
        ({"open_files": 1024, "max_open_files": 1024}, "open files", Status.warning, "1,024"),
        ({"swap_bytes": 8 * GIB, "swap_used_bytes": 1 << 20}, "swap", Status.ok, "1.00 MiB of 8.00 GiB"),
        ({"huge_pages": ""}, "huge pages", Status.skipped, "none"),
        ({"slurm": None}, "Slurm", Status.skipped, "not installed"),
        (
            {"slurm": {"partitions": [], "problem": "slurm_load_partitions: Connection refused"}},
            "Slurm",
            Status.warning,
            "refused",
        ),
        ({}, "Slurm", Status.ok, "partitions: main, high"),
        ({"ray": None}, "Ray", Status.skipped, "not installed"),
        ({"ray": {"version": "2.60.0", "address": "", "problem": ""}}, "Ray", Status.skipped, "no cluster"),
        (
            {"ray": {"version": "2.60.0", "address": "h:6379", "problem": "Connection refused"}},
            "Ray",
            Status.warning,
            "h:6379 does not answer (Connection refused)",
        ),
        (
            {"ray": {"version": "2.60.0", "address": "ray://h:10001", "problem": "not HOST:PORT"}},
            "Ray",
            Status.warning,
            "but RAY_ADDRESS=ray://h:10001 is not HOST:PORT",
        ),
        ({}, "Ray", Status.ok, "10.0.0.1:6379 answers"),
    ],
)
def test_each_fact_of_the_host_gets_its_status_and_text(changes: dict[str, Any], name: str, status: Status, found: str) -> None:
    finding = one(check_host(changed(HOST, **changes)), name)
    assert finding.status is status
    assert found in finding.found


@pytest.mark.parametrize(
    ("variables", "status", "cost"),
    [
        ({"OMP_NUM_THREADS": "1"}, Status.warning, "the rest of the 32 effective cores"),
        ({"OMP_NUM_THREADS": "64"}, Status.warning, "take turns"),
        ({"OMP_NUM_THREADS": "32", "MKL_NUM_THREADS": "32"}, Status.ok, ""),
        ({"OMP_NUM_THREADS": "32,4"}, Status.ok, ""),
        ({"OMP_NUM_THREADS": "4, 2"}, Status.warning, "the rest of the 32 effective cores"),
        ({"OMP_NUM_THREADS": "many", "MKL_NUM_THREADS": "-3"}, Status.warning, "not a number of threads"),
    ],
)
def test_thread_variables_that_do_not_fit_the_cores_are_a_warning(variables: dict[str, str], status: Status, cost: str) -> None:
    finding = one(check_program(PYTHON, "", gpus=GPUS, host=changed(HOST, variables=variables)), "thread variables")
    assert finding.status is status
    assert cost in finding.cost


def test_links_that_are_down_and_distant_gpus_are_reported() -> None:
    gpus = changed(
        GPUS, topology={"gpus": [LINK, {**LINK, "nvlinks_active": 17, "numa_node": 1}], "links": [["X", "?"], ["?", "X"]]}
    )
    findings = check_connections(gpus, changed(HOST, cpus=[0, 1]))
    assert one(findings, "NVLink").found == "GPU 1: 17 of 18 links active, 18 on the others"
    assert one(findings, "topology").status is Status.skipped
    numa = one(findings, "NUMA")
    assert numa.status is Status.warning
    assert "CPU affinity excludes the CPUs next to GPU 1" in numa.found
    assert numa.command.startswith("numactl --cpunodebind=1 --membind=1")


def test_topology_table_has_the_format_of_nvidia_smi() -> None:
    links = [["X", "NV4", "SYS"], ["NV4", "X", "SYS"], ["SYS", "SYS", "X"]]
    assert matrix(links)[:2] == [["", "GPU0", "GPU1", "GPU2"], ["GPU0", "X", "NV4", "SYS"]]
    assert legend(links) == "NV#: # NVLinks, SYS: the link between NUMA nodes"
    assert numbers_of("0-2,8") == [0, 1, 2, 8]
    assert numbers_of("") == []


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({}, Status.ok),
        ({"read_bytes": 20 << 20, "num_read": 3000}, Status.ok),  # small files
        ({"read_bytes": 20 << 20}, Status.warning),
        ({"read_bytes": 20 << 10, "num_read": 1}, Status.ok),
        ({"read_bytes": 2 << 20, "num_read": 20, "seconds": 3.1}, Status.warning),  # cut off after the longest time
        ({"file_system": "tmpfs", "read_bytes": 20 << 20}, Status.ok),
        ({"num_files": 0}, Status.skipped),
    ],
)
def test_only_a_disk_that_reads_slowly_is_a_warning(changes: dict[str, Any], status: Status) -> None:
    assert one(check_data(changed(DATA, **changes), host=HOST), "disk").status is status


def test_disk_findings_name_the_method_and_whether_memory_can_hold_the_data() -> None:
    disk, cache = check_data(DATA, host=HOST)
    assert disk.found == "/data (ext4): 300 MiB/s, 300 files/s; 300 MiB in 300 files: existing files"
    assert "later epochs can come from memory" in cache.found
    cache = check_data(changed(DATA, bytes=900 * GIB, is_all=False), host=HOST)[1]
    assert "at least 900 GiB" in cache.found
    assert "every epoch reads the disk again" in cache.found


def test_memory_file_systems_and_tiny_data_sets_are_not_judged() -> None:
    few = changed(DATA, read_bytes=20 << 10, num_read=1, num_files=1, bytes=20 << 10)
    assert "too little to judge its speed, 20.0 KiB in 1 file" in check_data(few, host=HOST)[0].found
    assert "in 1 file," in check_data(few, host=HOST)[1].found
    assert "in memory, not a disk" in check_data(changed(DATA, file_system="tmpfs"), host=HOST)[0].found


def test_folder_name_is_quoted_in_the_suggested_command() -> None:
    slow = changed(DATA, path="/tmp/sp ace", read_bytes=20 << 20)
    assert "cp -r '/tmp/sp ace' /local/disk" in check_data(slow, host=HOST)[0].command


def test_named_interpreter_without_torch_is_an_error_with_its_own_pip_command() -> None:
    none = changed(PYTHON, torch=None, executable="/my env/bin/python")
    found = check_program(none, "", gpus=NO_GPUS, host={}, named="/my env/bin/python")[0]
    assert (found.status, found.command) == (Status.error, "'/my env/bin/python' -m pip install torch")
    assert check_program(none, "", gpus=NO_GPUS, host={})[0].status is Status.skipped
    found = check_program({}, "ended with status 2", gpus=NO_GPUS, host={}, named="/bin/ls")[0]
    assert found.status is Status.error
    assert "/bin/ls is not a working Python" in found.found
    assert "pip" not in found.command


def test_disk_that_hangs_is_an_error_and_a_missing_data_root_is_a_hint() -> None:
    assert check_data({}, "no answer within 20 s", host=HOST)[0].status is Status.error
    assert "data.root=DIR" in check_data({}, host=HOST)[0].found
