"""Finds out from a command's words which script or module it really runs, behind interpreters, starters and wrappers."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

PYTHON = re.compile(r"python[\d.]*")
PYTHON_VALUES = ("--check-hash-based-pycs",)  # long options with a separate value
SHELLS = ("sh", "bash", "dash", "zsh", "ksh")
SHELL_VALUES = ("--rcfile", "--init-file")
# Starters run the first script among their arguments. STARTER_FLAGS take no value, STARTER_VALUES take one. For other options,
# it is not known whether they take a value.
STARTERS = ("torchrun", "accelerate", "accelerate-launch", "deepspeed")
STARTER_FLAGS = (
    "--standalone", "--run_path", "--cpu", "--multi_gpu", "--use_fsdp", "--use_deepspeed", "--quiet", "-q", "--debug",
)  # fmt: skip
STARTER_VALUES = (
    "--nproc_per_node", "--nnodes", "--node_rank", "--master_addr", "--master_port", "--rdzv_backend", "--rdzv_endpoint",
    "--rdzv_id", "--max_restarts", "--num_processes", "--num_machines", "--machine_rank", "--main_process_port",
    "--mixed_precision", "--config_file", "--gpu_ids", "--num_gpus", "--num_nodes", "--hostfile", "--include", "--exclude",
)  # fmt: skip
# Options for the number of processes (on each machine; accelerate's --num_processes: on all machines together), and for the
# number of machines. If there are several machines, the number of processes counts as unknown.
STARTER_COUNTS = ("--nproc_per_node", "--num_processes", "--num_gpus")
STARTER_MACHINES = ("--nnodes", "--num_machines", "--num_nodes")
STARTER_MODULES = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "accelerate.commands.launch": "accelerate-launch",
    "deepspeed.launcher.runner": "deepspeed",
}
# Wrappers run the command among their arguments, on this machine. Name -> options that take a value.
WRAPPERS = {
    "env": ("-u", "--unset", "-C", "--chdir"),
    "nohup": (),
    "setsid": (),
    "time": ("-f", "-o"),
    "timeout": ("-k", "-s"),
    "nice": ("-n",),
    "ionice": ("-c", "-n"),
    "taskset": (),
    "numactl": ("-N", "-m", "-C", "-p", "-i"),
    "stdbuf": ("-i", "-o", "-e"),
    "uv": ("--with", "-p", "--python", "--project", "--directory", "--extra", "--group", "--env-file"),
    "poetry": ("-C", "-P", "--directory", "--project"),
    "pipenv": (),
    "conda": ("-n", "-p", "--name", "--prefix", "--cwd"),
    "mamba": ("-n", "-p", "--name", "--prefix", "--cwd"),
    "micromamba": ("-n", "-p", "--name", "--prefix", "--cwd"),
}
# Programs that run a command in a container, on another machine or as another user, out of the harness's reach.
ELSEWHERE = ("docker", "podman", "singularity", "apptainer", "enroot", "ssh", "sbatch", "kubectl", "sudo", "su")
# Starters -> options that name the machines on which they start processes. These processes rarely inherit the environment.
SPREADERS = {
    "deepspeed": ("-H", "--hostfile"),
    "accelerate": ("--deepspeed_hostfile", "--mpirun_hostfile"),
    **dict.fromkeys(
        ("mpirun", "mpiexec", "orterun", "horovodrun"),
        ("-H", "-host", "--host", "-hosts", "--hosts", "-hostfile", "--hostfile", "-machinefile", "--machinefile"),
    ),
}
MOVES = ("-C", "--chdir", "--directory", "--cwd")  # options that change where the script is looked up
ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
SCRIPT = re.compile(r".+\.(py|sh)", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Program:
    """What a command runs.

    Attributes:
        script: file that an interpreter or the system runs; None if there is none or it is unknown.
        module: Python module that runs instead of a script; None if there is none.
        by: what runs the script, "python", "shell" or "system" (the operating system).
        is_certain: whether `script`, relative to the command's working directory, is certainly the file that runs.
        missing: what is missing, such as "a script", if the command certainly has nothing to run; "" otherwise.
        starter: program that starts the training processes, such as "torchrun"; "" if there is none.
        num_processes: number of processes that the starter is to start; None if unspecified or with several machines.
    """

    script: str | None = None
    module: str | None = None
    by: str = "system"
    is_certain: bool = True
    missing: str = ""
    starter: str = ""
    num_processes: int | None = None

    @property
    def name(self) -> str:
        """Name for display: the script without folder and extension, or the module; "" if neither is known."""
        return Path(self.script).stem if self.script else self.module or ""

    @property
    def file_name(self) -> str:
        """The script without its folder, or the module; "" if neither is known."""
        return Path(self.script).name if self.script else self.module or ""


def program_of(command: list[str]) -> Program:
    """Returns what a command runs, as far as its words show."""
    name, words = Path(command[0]).name, command[1:]
    if PYTHON.fullmatch(name):
        return _of_python(words)
    if name in SHELLS:
        return _of_shell(words)
    if name in STARTERS:
        return replace(_of_starter(name, words), starter=name, num_processes=_num_processes(words))
    if SCRIPT.fullmatch(name):
        return Program(script=command[0])
    found = _of_wrapper(WRAPPERS.get(name, ()), words)
    if found is None:
        return Program(script=command[0])
    moves = any(word.partition("=")[0] in MOVES for word in words)
    return replace(found, is_certain=found.is_certain and name in WRAPPERS and not moves)


def spread_by(command: Sequence[str]) -> str:
    """Returns the starter and the option by which a command starts processes on other machines, "mpirun -H"; "" if none.

    These processes rarely inherit the environment. Processes of srun do. So srun is left out, also where DeepSpeed calls srun.
    """
    at = next((at for at, word in enumerate(command) if Path(word).name in SPREADERS), None)
    if at is None:
        return ""
    name, words = Path(command[at]).name, command[at + 1 :]
    own = list(itertools.takewhile(lambda word: not (SCRIPT.fullmatch(word) or PYTHON.fullmatch(Path(word).name)), words))
    option = next((word for word in (each.partition("=")[0] for each in own) if word in SPREADERS[name]), "")
    return f"{name} {option}" if option and not {"slurm", "--launcher=slurm"} & {*own} else ""


def _of_python(words: list[str]) -> Program:
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] != "-":
        option = rest.pop(0)
        letters = "" if option.startswith("--") else option[1:]
        found = re.search(r"[cmWX]", letters)  # options with a value, in this word or the next
        if found is None:
            rest = rest[1:] if option in PYTHON_VALUES else rest
            continue
        inside = letters[found.end() :]
        value, rest = ([inside], rest) if inside else (rest[:1], rest[1:])
        if found[0] == "c":
            return Program(by="python", missing="" if value else "the code after -c")
        if found[0] == "m":
            return _of_module(value, rest)
    if not rest or rest[0] == "-":
        return Program(by="python", missing="a script")  # a trial's standard input is empty
    return Program(script=rest[0], by="python")


def _of_module(named: list[str], words: list[str]) -> Program:
    if not named:
        return Program(by="python", missing="the module after -m")
    if named[0] in STARTER_MODULES:
        return program_of([STARTER_MODULES[named[0]], *words])
    return Program(module=named[0], by="python")


def _of_shell(words: list[str]) -> Program:
    rest = list(words)
    while rest and len(rest[0]) > 1 and rest[0][0] in "-+":
        option = rest.pop(0)
        if option == "--":
            break
        letters = "" if option.startswith("--") else option[1:]
        if "c" in letters:
            return _of_shell_code(rest)
        if "s" in letters:
            return Program(by="shell", missing="a script")
        if option in SHELL_VALUES or set(letters) & set("oO"):
            rest = rest[1:]
    if not rest or rest[0] == "-":
        return Program(by="shell", missing="a script")
    return Program(script=rest[0], by="shell")


def _of_shell_code(words: list[str]) -> Program:
    """Returns the first script that a line of shell code names. The code is not parsed, so the script is not certain."""
    if not words:
        return Program(by="shell", missing="the code after -c")
    try:
        inside = shlex.split(words[0])
    except ValueError:
        inside = words[0].split()
    return Program(script=next((word for word in inside if SCRIPT.fullmatch(word)), None), by="shell", is_certain=False)


def _of_starter(name: str, words: list[str]) -> Program:
    if name == "accelerate" and words[:1] != ["launch"]:
        return Program(is_certain=False)
    rest = words[1:] if name == "accelerate" else list(words)
    if not any(not word.startswith("-") for word in rest):
        return Program(missing="a script")
    is_certain = True
    while rest:
        word = rest.pop(0)
        option = f"--{word[2:].replace('-', '_')}" if word.startswith("--") else word  # torchrun accepts both spellings
        if option in ("-m", "--module"):
            return _of_module(rest[:1], rest[1:])
        if option == "--no_python":
            return program_of(rest) if rest else Program(missing="a program")
        if not word.startswith("-"):
            return Program(script=word, by="python", is_certain=is_certain and word.endswith(".py"))
        if "=" not in word and option not in STARTER_FLAGS and rest and not rest[0].endswith(".py"):
            rest.pop(0)  # the option's value
            is_certain = is_certain and option in STARTER_VALUES
    return Program(is_certain=False)


def _num_processes(words: list[str]) -> int | None:
    """Returns the number of processes from the options before the script; None if unknown."""
    counts: dict[str, str] = {}
    for word, following in itertools.zip_longest(words, words[1:], fillvalue=""):
        name, _, value = word.partition("=")
        option = f"--{name[2:].replace('-', '_')}"
        if name.startswith("--") and option in STARTER_COUNTS + STARTER_MACHINES:
            counts.setdefault(option, value or following)
        elif word in ("-m", "--module") or (not word.startswith("-") and SCRIPT.fullmatch(word)):
            break
    asked = [value for option, value in counts.items() if option in STARTER_COUNTS]
    is_here = all(value in ("1", "1:1") for option, value in counts.items() if option in STARTER_MACHINES)
    return int(asked[0]) if asked and asked[0].isdecimal() and is_here else None


def _of_wrapper(takes_value: tuple[str, ...], words: list[str]) -> Program | None:
    """Returns what the command inside a wrapper's arguments runs; None if nothing in them looks like a command."""
    rest = list(words)
    path = None
    while rest:
        name = Path(rest[0]).name
        if not rest[0].startswith("-") and not ASSIGNMENT.fullmatch(rest[0]):
            if PYTHON.fullmatch(name) or name in (*SHELLS, *STARTERS, *WRAPPERS):
                return program_of(rest)
            if SCRIPT.fullmatch(name):
                return Program(script=rest[0], is_certain=False)
            path = path or (rest[0] if "/" in rest[0] else None)
        rest = rest[2:] if rest[0] in takes_value else rest[1:]
    return Program(script=path, is_certain=False) if path else None
