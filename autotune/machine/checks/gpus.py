"""Makes the findings about driver and GPUs."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

from autotune.machine.checks.finding import Finding, Status, gpus_option, gpus_text
from autotune.machine.nvml import FOREIGN
from autotune.quantities import bytes_text, number_text

_finding = functools.partial(Finding, "GPU")
# A clock or power cap below this share of its default was lowered on purpose. NVML's rounding alone changes it by less.
CAPPED_FRAC = 0.99
# NVML's errors (nvml.h, nvmlReturn_t) with a specific remedy: number -> (meaning, command that fixes it).
REMEDIES = {
    4: ("this user may not use the devices", "ls -l /dev/nvidia*"),
    9: ("the driver is not loaded", "sudo modprobe nvidia"),
    12: ("the driver's library is not found: usually a container that was started without GPUs", "docker run --gpus all ..."),
    15: ("a GPU has fallen off the bus", "sudo dmesg | grep -i xid; sudo reboot"),
    18: ("driver and library are of different versions: the driver was updated since the system started", "sudo reboot"),
}
INSTALL = "pip install nvidia-ml-py"
REPLACE = "pip uninstall pynvml; pip install --force-reinstall nvidia-ml-py"  # uninstalling may delete nvidia-ml-py's files
SLOWED = {"thermal": "by heat", "hardware": "by the hardware (heat or power)", "power_brake": "by the power brake"}


def check_gpus(found: dict[str, Any], problem: str = "") -> list[Finding]:
    """Returns the findings about driver and GPUs from the GPU probe's document. `problem`: why there is no document, or ""."""
    if problem:
        cost = "a driver that does not answer blocks every program that uses it"
        text, command = f"NVML could not be queried: {problem}", "sudo dmesg | grep -i -e nvrm -e xid"
        return [_finding("driver", text, Status.error, cost, command)]
    gpus = found.get("gpus") or []
    findings = [_driver(found, gpus)]
    if gpus:
        findings += [_persistence(gpus), _clocks(gpus), _power(gpus), _processes(gpus)]
    return findings


def _driver(found: dict[str, Any], gpus: list[dict[str, Any]]) -> Finding:
    problem, code = str(found.get("problem") or ""), found.get("code")
    is_there = bool(found.get("has_nvidia_files"))
    if gpus:
        names = Counter(str(gpu.get("name") or "GPU") for gpu in gpus)
        what = ", ".join(f"{count} x {name}" if count > 1 else name for name, count in names.items())
        newest = ".".join(map(str, found.get("cuda") or []))
        if lost := int(found.get("num_lost") or 0):
            text = f"{what}, and {lost} more that do{'es' if lost == 1 else ''} not answer"
            cost = "programs fail if they use a GPU that does not answer, and so do programs that use all GPUs"
            return _finding("driver", text, Status.error, cost, "sudo dmesg | grep -i xid; sudo reboot")
        return _finding("driver", f"{what}, driver {found.get('driver')}{f' for CUDA up to {newest}' if newest else ''}")
    if problem and not is_there:
        text = "no NVIDIA driver: training runs on the CPU"
        if found.get("has_amd_files"):
            text = "no NVIDIA driver, only AMD's, which these checks do not cover"
        return _finding("driver", text, Status.skipped)
    cost = "no program can use a GPU"
    if problem and code is None:
        cost = "autotune sees neither the GPUs nor their clocks, power and connections; programs are not affected"
        command = REPLACE if problem.startswith(FOREIGN) else INSTALL
        return _finding("driver", f"the GPUs cannot be queried: {problem}", Status.warning, cost, command)
    if problem:
        meaning, command = REMEDIES.get(int(code or 0), ("", "sudo dmesg | grep -i nvrm"))
        return _finding("driver", f"NVML: {problem}{f' ({meaning})' if meaning else ''}", Status.error, cost, command)
    text = f"driver {found.get('driver')} is loaded and shows no GPU"
    return _finding("driver", text, Status.error, cost, "lspci | grep -i nvidia; sudo dmesg | grep -i nvrm")


def _persistence(gpus: list[dict[str, Any]]) -> Finding:
    off = [gpu["index"] for gpu in gpus if gpu.get("is_persistent") is False]
    if off:
        cost = "the driver unloads when no program uses the GPU, and each start waits until it is initialised again"
        command = f"sudo nvidia-smi{gpus_option(off, gpus)} -pm 1"
        return _finding("persistence mode", f"off on {gpus_text(off, gpus)}", Status.warning, cost, command)
    return _known("persistence mode", "on", any(gpu.get("is_persistent") for gpu in gpus))


def _clocks(gpus: list[dict[str, Any]]) -> Finding:
    slowed = [gpu for gpu in gpus if _slowdowns(gpu)]
    if slowed:
        parts = []
        for gpu in slowed:
            why, degrees = " and ".join(_slowdowns(gpu)), gpu.get("temperature_c")
            parts.append(f"GPU {gpu['index']} is slowed down now {why}{f', {degrees} °C' if degrees is not None else ''}")
        cost = "trials measured now are `disturbed` and get no rate; with several ranks, all wait for the slowest"
        option = gpus_option([gpu["index"] for gpu in slowed], gpus)
        return _finding("clocks", "; ".join(parts), Status.warning, cost, f"nvidia-smi -q -d PERFORMANCE,TEMPERATURE{option}")
    held = [gpu for gpu in gpus if _is_below(gpu.get("application_clock_mhz"), gpu.get("default_application_clock_mhz"))]
    if held:
        alike: dict[tuple[Any, Any], list[int]] = {}  # (clock, default) in MHz -> numbers of the GPUs
        for gpu in held:
            alike.setdefault((gpu["application_clock_mhz"], gpu["default_application_clock_mhz"]), []).append(gpu["index"])
        texts = [
            f"of {gpus_text(which, gpus)}: {clock} MHz instead of {default} MHz" for (clock, default), which in alike.items()
        ]
        cost = "kernels limited by computation are slower, in trials and in real runs"
        command = f"sudo nvidia-smi{gpus_option([gpu['index'] for gpu in held], gpus)} -rac"
        return _finding("clocks", f"application clock {'; '.join(texts)}", Status.warning, cost, command)
    now = {(gpu.get("clock_mhz"), gpu.get("max_clock_mhz")) for gpu in gpus}
    known = [f"{clock} of {highest} MHz" for clock, highest in sorted(now, key=str) if clock and highest]
    return _known("clocks", f"not lowered, now {', '.join(known)}", bool(known))


def _power(gpus: list[dict[str, Any]]) -> Finding:
    capped = [gpu for gpu in gpus if _is_below(gpu.get("power_cap_w"), gpu.get("default_power_cap_w"))]
    if capped:
        alike: dict[tuple[str, str], list[int]] = {}  # (cap, default) in W -> numbers of the GPUs
        for gpu in capped:
            watts = number_text(gpu["power_cap_w"]), number_text(gpu["default_power_cap_w"])
            alike.setdefault(watts, []).append(gpu["index"])
        cost = "at full load the clock is lowered to stay below the cap"
        texts, commands = [], []
        for (cap, default), which in alike.items():
            texts.append(f"{gpus_text(which, gpus)} capped at {cap} W, {default} W by default")
            commands.append(f"sudo nvidia-smi{gpus_option(which, gpus)} -pl {default.replace(',', '')}")
        return _finding("power cap", "; ".join(texts), Status.warning, cost, "; ".join(commands))
    caps = {gpu["power_cap_w"] for gpu in gpus if gpu.get("power_cap_w")}
    return _known("power cap", f"{', '.join(number_text(cap) for cap in sorted(caps))} W, the default", bool(caps))


def _processes(gpus: list[dict[str, Any]]) -> Finding:
    there = [(gpu["index"], process) for gpu in gpus for process in gpu.get("processes") or []]
    if not there:
        return _finding("other processes", "none on the GPUs")
    names = [f"GPU {index}: {_process_text(process)}" for index, process in there]
    shown = "; ".join(names[:4]) + (f"; and {len(names) - 4} more" if len(names) > 4 else "")
    cost = "these processes take memory and time from the training, so trials that run now are `disturbed`"
    return _finding("other processes", shown, Status.warning, cost, "nvidia-smi   # then end those that are yours")


def _process_text(process: dict[str, Any]) -> str:
    name = f"{process['name']}, pid {process['pid']}" if process.get("name") else f"pid {process['pid']} of another container"
    return f"{name}, {bytes_text(process['memory_bytes'])}" if process.get("memory_bytes") else name


def _slowdowns(gpu: dict[str, Any]) -> list[str]:
    """Returns what holds a GPU's clock down, in words. Leaves out a power cap, whose purpose is to lower clocks."""
    return [SLOWED[name] for name in gpu.get("slowdowns") or [] if name in SLOWED]


def _is_below(value: float | None, default: float | None) -> bool:
    return bool(value and default and value < CAPPED_FRAC * default)


def _known(name: str, text: str, is_known: bool) -> Finding:
    return _finding(name, text) if is_known else _finding(name, "the driver does not report it", Status.skipped)
