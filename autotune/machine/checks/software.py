"""Makes the findings about a program's environment: torch and the driver, compilers, environment variables."""

from __future__ import annotations

import functools
import re
import shlex
from typing import Any

from autotune.harness.protocol import whole_number
from autotune.machine.checks.finding import Finding, Status, gpus_text

_finding = functools.partial(Finding, "program")
COUNTS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
# Debugging variables, which people forget to unset: name -> (value that slows programs down, what it costs).
DEBUGGING = {
    "CUDA_LAUNCH_BLOCKING": ("1", "the host waits for every kernel: nothing overlaps"),
    "TORCH_NCCL_BLOCKING_WAIT": ("1", "the host waits for every collective: nothing overlaps"),
    "NCCL_P2P_DISABLE": ("1", "GPUs of this machine do not read each other's memory: collectives go through the host"),
    "NCCL_IB_DISABLE": ("1", "other machines are reached by TCP, though there may be InfiniBand"),
    "NVIDIA_TF32_OVERRIDE": ("0", "no library computes in TF32, whatever precision.matmul says"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": ("1", "every tensor is allocated by the driver, which waits for the GPU"),
}


def check_program(
    found: dict[str, Any], problem: str, *, gpus: dict[str, Any], host: dict[str, Any], named: str = ""
) -> list[Finding]:
    """Returns the findings about an interpreter and the environment variables of its programs.

    Args:
        found: the interpreter probe's document; {} if there is none.
        problem: why there is no document.
        gpus: the GPU probe's document; {} if there is none.
        host: the host probe's document; {} if there is none.
        named: the interpreter that the user has named; "" for autotune's own.
    """
    torch = _torch(found, problem, gpus, named)
    findings = [torch]
    if not host:
        return findings
    if found.get("torch") and torch.status is not Status.error:
        findings += [_compiler(found, gpus, host), *_bytecode(found)]
    return [*findings, _threads(host), *_debugging(host["variables"])]


def _torch(found: dict[str, Any], problem: str, gpus: dict[str, Any], named: str) -> Finding:
    if not found and named:
        text = f"{named} is not a working Python interpreter: {problem}"
        cost, command = "nothing is known of the program's torch", "autotune doctor --python $(which python)"
        return _finding("torch", text, Status.error, cost, command)
    problem = problem or str(found.get("problem") or "")
    python = str(found.get("executable") or "the interpreter")
    if problem:
        cost = "no program can train with this interpreter"
        text = f"torch of {python} cannot be {'imported' if gpus.get('gpus') else 'read'}: {problem}"
        return _finding("torch", text, Status.error, cost, f"{_pip(found)} install --force-reinstall torch")
    if not found.get("torch") and named:
        cost = "no program can train with this interpreter"
        return _finding("torch", f"none in {python}", Status.error, cost, f"{_pip(found)} install torch")
    if not found.get("torch"):
        text = f"none in {python}: name your program's interpreter, `autotune doctor --python PYTHON`"
        return _finding("torch", text, Status.skipped)
    version = f"{found['torch']}, Python {found['python']}"
    if not gpus.get("gpus"):
        return _finding("torch", version)
    newest = ".".join(map(str, gpus.get("cuda") or [])) or "an unknown version"
    if not found.get("cuda"):
        text = f"{version}: built without CUDA, although this machine has {gpus_text([gpu['index'] for gpu in gpus['gpus']])}"
        command = f"{_pip(found)} install --force-reinstall torch   # a build for CUDA {newest} or older"
        return _finding("torch", text, Status.error, "everything is computed on the CPU", command)
    built = f"{version}, built for CUDA {found['cuda']} (the driver supports up to {newest})"
    if not found.get("is_available"):
        return _unavailable(found, built, gpus)
    return _architectures(found, f"{built}; imported in {found['import_s']:.1f} s", gpus)


def _unavailable(found: dict[str, Any], built: str, gpus: dict[str, Any]) -> Finding:
    why = str(found.get("why_not_available") or "")
    text, cost = f"{built}: torch has no GPU{f' ({why})' if why else ''}", "everything is computed on the CPU"
    theirs, ours = _version(str(found["cuda"])), tuple(gpus.get("cuda") or ())
    python = shlex.quote(str(found.get("executable") or "python"))
    command = f'{python} -c "import torch; torch.zeros(1).cuda()"   # shows the error'
    if ours and theirs[:1] > ours[:1]:
        newest = ".".join(map(str, ours))
        command = f"{_pip(found)} install --force-reinstall torch   # a build for CUDA {newest} or older; or a newer driver"
    elif "802" in why or "not yet initialized" in why:
        command = "sudo systemctl start nvidia-fabricmanager   # the NVSwitches are not set up"
    return _finding("torch", text, Status.error, cost, command)


def _architectures(found: dict[str, Any], text: str, gpus: dict[str, Any]) -> Finding:
    """Checks that torch has kernels or PTX for each GPU. Kernels also run on higher minor versions: sm_80's on sm_86."""
    built = [str(name) for name in found.get("arch_list") or []]
    late: list[int] = []
    missing: list[int] = []
    for gpu in gpus["gpus"]:
        capability = tuple(gpu.get("capability") or ())
        if not capability or not built:
            continue
        ready = [_architecture(name) for name in built if name.startswith("sm_")]
        if any(major == capability[0] and minor <= capability[1] for major, minor in ready):
            continue
        sources = [_architecture(name) for name in built if name.startswith("compute_")]
        (late if any(source <= capability for source in sources) else missing).append(gpu["index"])
    if missing:
        needed = sorted({"sm_{}{}".format(*gpu["capability"]) for gpu in gpus["gpus"] if gpu["index"] in missing})
        text = f"{text}; it has no kernels for {gpus_text(missing)} ({', '.join(needed)}), only {', '.join(built)}"
        cost = "every kernel on them fails: 'no kernel image is available'"
        return _finding("torch", text, Status.error, cost, f"{_pip(found)} install --upgrade torch   # a build for this GPU")
    if late:
        text = f"{text}; it has no kernels for {gpus_text(late)}, only PTX that the driver compiles"
        cost = "the first start compiles every kernel, and no kernel is made specially for this GPU"
        return _finding("torch", text, Status.warning, cost, f"{_pip(found)} install --upgrade torch   # a build for this GPU")
    return _finding("torch", text)


def _pip(found: dict[str, Any]) -> str:
    """Returns the pip command of the checked interpreter; plain `pip` may belong to another interpreter."""
    return f"{shlex.quote(str(found.get('executable') or 'python'))} -m pip"


def _compiler(found: dict[str, Any], gpus: dict[str, Any], host: dict[str, Any]) -> Finding:
    cost, missing, commands = "torch.compile fails, so compile.mode is not tuned", [], []
    if gpus.get("gpus"):
        if not found.get("has_triton"):
            missing, commands = ["triton"], [f"{_pip(found)} install triton"]
        if not host.get("cc"):
            missing, commands = [*missing, "a C compiler"], [*commands, "sudo apt-get install gcc"]
    elif not host.get("cxx"):
        missing, commands = ["a C++ compiler"], ["sudo apt-get install g++"]
    if not found.get("has_header"):
        missing, commands = [*missing, "Python.h"], [*commands, "sudo apt-get install python3-dev"]
    if missing:
        text = f"torch.compile lacks {' and '.join(missing)}"
        return _finding("compiler", text, Status.warning, cost, "; ".join(commands))
    what = f"triton and {host.get('cc')}" if gpus.get("gpus") else str(host.get("cxx"))
    return _finding("compiler", f"{what}, with Python.h")


def _bytecode(found: dict[str, Any]) -> list[Finding]:
    """Returns a finding if torch has no stored bytecode, so that every process has to compile torch's Python code.

    Without stored bytecode, importing torch 2.14 took 6.3 s of CPU time instead of 2.4 s (Intel Xeon).
    """
    if not found.get("bytecode"):
        return []
    text = f"torch has none, and none will be stored: {found['bytecode']}"
    cost = "each trial compiles the Python code of torch and of other libraries before it imports them"
    command = f"{shlex.quote(str(found['executable']))} -m compileall -q {shlex.quote(str(found['libraries']))}"
    if str(found["bytecode"]).endswith("is read-only"):
        command = "export PYTHONPYCACHEPREFIX=~/.cache/pycache"
    return [_finding("bytecode", text, Status.warning, cost, command)]


def _threads(host: dict[str, Any]) -> Finding:
    variables, cores, name = host["variables"], int(host["num_cores"]), "thread variables"
    # A value such as "4,2" has one number for each level of nested parallel regions. Libraries use the first number.
    given = {name: whole_number(str(variables.get(name, "")).partition(",")[0].strip()) for name in COUNTS}
    counts = {name: count for name, count in given.items() if count is not None}
    few = {name: count for name, count in counts.items() if count < cores}
    many = {name: count for name, count in counts.items() if count > cores}
    text = ", ".join(f"{name}={variables[name]}" for name in {**few, **many})
    unset = f"unset {' '.join({**few, **many})}"
    bad = [count for count in COUNTS if variables.get(count) and not _is_count(str(variables[count]))]
    if bad:
        text = ", ".join(f"{count}={variables[count]}" for count in bad)
        cost = "not a number of threads: each library reads it in its own way"
        return _finding(name, text, Status.warning, cost, f"unset {' '.join(bad)}")
    if many:
        cost = f"there are more threads than the {cores} effective cores, so the threads take turns"
        return _finding(name, text, Status.warning, cost, unset)
    if few:
        cost = (
            f"operators on the CPU leave the rest of the {cores} effective cores idle; that is right only if other ranks "
            "or loader workers need them"
        )
        return _finding(name, text, Status.warning, cost, f"{unset}   # or tune threads.intra")
    values = ", ".join(f"{name}={variables[name]}" for name in counts)
    return _finding(name, values or "none is set: libraries take all cores they see")


def _is_count(text: str) -> bool:
    """Whether a value is a positive number of threads, or several with commas ("4,2")."""
    return all(whole_number(part.strip()) for part in text.split(","))


def _debugging(variables: dict[str, str]) -> list[Finding]:
    return [
        _finding("debugging variable", f"{name}={value}", Status.warning, cost, f"unset {name}")
        for name, (value, cost) in DEBUGGING.items()
        if variables.get(name) == value
    ]


def _architecture(name: str) -> tuple[int, int]:
    """Returns (9, 0) for "sm_90", "sm_90a" and "compute_90", (12, 0) for "sm_120"."""
    digits = re.sub(r"\D", "", name.partition("_")[2])
    return (int(digits[:-1] or 0), int(digits[-1])) if digits else (0, 0)


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".") if part.isdigit())
