"""`autotune doctor` as a user runs it: on this machine, and on machines whose driver and torch are stand-ins."""

import json
import os
import shlex
import sys

import pytest

from autotune.cli.doctor import doctor, printable
from autotune.errors import BadInput
from autotune.machine.checks import Finding, Status

NVML = """
class NVMLError(Exception):
    value = {code}
    def __str__(self):
        return "Driver/library version mismatch"
def nvmlInit():
    {init}
def nvmlShutdown(): pass
def nvmlSystemGetDriverVersion(): return "580.65"
def nvmlSystemGetCudaDriverVersion_v2(): return 13000
def nvmlDeviceGetCount(): return 2
def nvmlDeviceGetHandleByIndex(index): return index
def nvmlDeviceGetName(handle): return "NVIDIA H200"
def nvmlDeviceGetCudaComputeCapability(handle): return (9, 0)
def nvmlDeviceGetPersistenceMode(handle): return handle
def nvmlDeviceGetTopologyCommonAncestor(one, other): return 50
"""
TORCH = """
class cuda:
    is_available = staticmethod(lambda: True)
    get_arch_list = staticmethod(lambda: {architectures})
"""


@pytest.fixture
def machine(cli, tmp_path_factory):
    """Replaces the machine's driver and torch by stand-in modules that come first on the path."""

    def make(*, init="pass", code=18, architectures=("sm_90",), torch=TORCH):
        folder = tmp_path_factory.mktemp("machine")
        (folder / "pynvml.py").write_text(NVML.format(init=init, code=code))
        (folder / "torch").mkdir()
        (folder / "torch" / "version.py").write_text("__version__ = '9.9.9'\ncuda = '12.8'\n")
        (folder / "torch" / "__init__.py").write_text(torch.replace("{architectures}", repr(list(architectures))))
        cli.environment["PYTHONPATH"] = os.pathsep.join([str(folder), cli.environment["PYTHONPATH"]])
        return cli

    return make


def test_doctor_prints_its_checks_of_this_machine_as_plain_lines(cli):
    (cli.cwd / "a.bin").write_bytes(os.urandom(100_000))
    ended = cli("doctor", "data.root=.")
    assert ended.stderr == ""
    assert ended.returncode == (3 if "error  " in ended.stdout else 0)
    lines = ended.stdout.splitlines()
    for name in ("GPU  driver: ", "host  cores: ", "host  shared memory: ", "program  torch: ", f"data  disk: {cli.cwd}"):
        assert any(name in line for line in lines), name
    assert all(line.startswith(("ok  ", "skipped  ", "warning  ", "error  ", "topology  ")) for line in lines[:-1])


def test_json_document_describes_a_machine_with_gpus(machine):
    ended = machine()("doctor", "--json")
    document = json.loads(ended.stdout)
    assert ended.returncode == (3 if document["status"] == "error" else 0), ended.stderr
    assert set(document) == {"schema", "status", "counts", "findings", "topology", "seconds"}
    assert document["topology"] == [["X", "SYS"], ["SYS", "X"]]
    assert sum(document["counts"].values()) == len(document["findings"])
    findings = {(finding["group"], finding["name"]): finding for finding in document["findings"]}
    assert findings["GPU", "driver"]["found"] == "2 x NVIDIA H200, driver 580.65 for CUDA up to 13.0"
    assert findings["GPU", "persistence mode"]["command"] == "sudo nvidia-smi -i 0 -pm 1"
    assert "built for CUDA 12.8 (the driver supports up to 13.0); imported in" in findings["program", "torch"]["found"]
    assert all(set(finding) == {"group", "name", "status", "found", "cost", "command"} for finding in findings.values())


@pytest.mark.parametrize(
    ("broken", "found"),
    [
        ({"architectures": ["sm_70"]}, "it has no kernels for GPUs 0, 1 (sm_90), only sm_70"),
        ({"torch": "import os; os.abort()"}, "cannot be imported: ended by SIGABRT"),
        ({"init": "import os; os.abort()"}, "NVML could not be queried: ended by SIGABRT"),
    ],
)
def test_broken_parts_are_named_and_give_exit_code_3(machine, broken, found):
    ended = machine(**broken)("doctor")
    assert ended.returncode == 3
    assert found in ended.stdout
    assert "Traceback" not in ended.stdout + ended.stderr
    assert " error" in ended.stdout.splitlines()[-1]


def test_the_table_of_connections_is_printed(machine):
    assert "topology  GPU0   X      SYS" in machine()("doctor").stdout


def test_control_characters_in_folder_names_are_replaced():
    found = Finding(group="data", name="disk", status=Status.warning, found="/tmp/\x1b[31mred", cost="", command="cp /tmp/a\nb")
    assert (printable(found).found, printable(found).command) == ("/tmp/?[31mred", "cp /tmp/a?b")


def test_brackets_in_a_folder_name_are_not_read_as_markup(cli, tmp_path):
    (tmp_path / "x[" / "y]").mkdir(parents=True)
    ended = cli("doctor", "data.root=x[/y]")
    assert ended.returncode in (0, 3), ended.stderr
    assert f"{tmp_path}/x[/y] has no files" in ended.stdout


def test_tilde_in_the_path_of_an_interpreter_is_expanded(cli, tmp_path):
    (tmp_path / "python").symlink_to(sys.executable)
    cli.environment["HOME"] = str(tmp_path)
    ended = cli("doctor", "--python=~/python")
    assert ended.returncode in (0, 3), ended.stderr


def test_torch_beside_autotune_does_not_count_as_the_torch_of_another_interpreter(tmp_path, monkeypatch, capsys):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    (tmp_path / "torch" / "version.py").write_text("__version__ = '9.9.9'\n")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -S "$@"\n')  # has no packages
    python.chmod(0o755)
    monkeypatch.setattr("autotune.launchers.environment.PACKAGE", tmp_path / "autotune")
    assert doctor([], data=None, python=str(python), as_json=True) == 3
    (torch,) = [finding for finding in json.loads(capsys.readouterr().out)["findings"] if finding["name"] == "torch"]
    assert torch["found"].startswith("none in ")


def test_data_folder_typed_with_a_plus_is_the_one_that_is_checked():
    with pytest.raises(BadInput, match=r"^data\.root: no such folder, got ''"):
        doctor(["+data.root="], data=None, python=None, as_json=False)
