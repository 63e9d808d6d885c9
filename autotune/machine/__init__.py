"""What this machine is: cores, instruction sets, memory, GPUs."""

from autotune.machine.facts import circumstances, comparable, host_facts

__all__ = ["circumstances", "comparable", "host_facts"]
