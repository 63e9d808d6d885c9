"""What this machine is: cores, instruction sets, memory, GPUs."""

from autotune.machine.facts import circumstances, fingerprint, host_facts

__all__ = ["circumstances", "fingerprint", "host_facts"]
