"""Describes this machine: cores, instruction sets, memory, GPUs."""

from autotune.machine.facts import comparable, host_context, host_facts

__all__ = ["comparable", "host_context", "host_facts"]
