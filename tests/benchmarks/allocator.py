"""What does `memory.malloc=glibc_keep` gain on a CPU, and what memory does it cost?

    python -m tests.benchmarks.allocator [--rounds 4] [--seconds 6] [--only NAME ...]

Trains each network in fresh processes, which alternate between glibc's default and glibc keeping freed memory. Prints the
ratio of the median step times with its 95 % interval, the page faults per step, and the largest resident memory.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys

from autotune.harness.protocol import KEEPING
from autotune.stats import paired_ratio
from tests.benchmarks.reporting import interval, machine_lines, table

NETWORKS = ("resnet18", "resnet18-bf16", "mobilenet_v2", "gpt-8", "gpt-32", "mlp-256", "mlp-4096")
PROGRAM = """
import resource, statistics, sys, time
import torch
from torch import nn
name, seconds = sys.argv[1], float(sys.argv[2])
kind, _, rest = name.partition("-")
torch.manual_seed(0)
if kind == "gpt":
    layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True), 4)
    model = nn.Sequential(nn.Embedding(8000, 256), layers, nn.Linear(256, 8000), nn.Flatten(0, 1))
    inputs = torch.randint(0, 8000, (int(rest), 128))
    targets = inputs.flatten()
elif kind == "mlp":
    model = nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
    inputs, targets = torch.randn(int(rest), 784), torch.randint(0, 10, (int(rest),))
else:
    import torchvision
    model = getattr(torchvision.models, kind)(num_classes=10)
    inputs, targets = torch.randn(32, 3, 96, 96), torch.randint(0, 10, (32,))
if rest == "bf16":
    model, inputs = model.to(memory_format=torch.channels_last), inputs.contiguous(memory_format=torch.channels_last)
optimizer = torch.optim.AdamW(model.parameters())
times, until_s = [], None
while until_s is None or time.perf_counter() < until_s:
    if len(times) == 3 and until_s is None:  # warm-up is over
        times, until_s, faults = [], time.perf_counter() + seconds, resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    began_s = time.perf_counter()
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=rest == "bf16"):
        loss = nn.functional.cross_entropy(model(inputs), targets)
    loss.backward()
    optimizer.step()
    times.append(time.perf_counter() - began_s)
used = resource.getrusage(resource.RUSAGE_SELF)
print(statistics.median(times), (used.ru_minflt - faults) / len(times), used.ru_maxrss / 1024)
"""


def main() -> None:
    """Measures the networks and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4, help="pairs of processes for each network (default: 4)")
    parser.add_argument("--seconds", type=float, default=6.0, help="measured seconds of a process (default: 6)")
    parser.add_argument("--only", nargs="+", choices=NETWORKS, default=NETWORKS, metavar="NAME", help=", ".join(NETWORKS))
    options = parser.parse_args()
    print(*machine_lines(), sep="\n")
    header = ("network", "ms, glibc", "ms, glibc_keep", "ratio", "95 %", "page faults", "MiB")
    print(table(header, [row(name, options.rounds, options.seconds) for name in options.only]))


def row(name: str, rounds: int, seconds: float) -> list[str]:
    """Returns a network's row of the table; the ratio is glibc's median step time divided by glibc_keep's."""
    pairs = [tuple(measured(name, seconds, variables) for variables in ({}, KEEPING)) for _ in range(rounds)]
    usual, kept = zip(*pairs, strict=True)
    ratio = paired_ratio([1 / one[0] for one in kept], [1 / one[0] for one in usual])

    def both(number: int) -> str:
        return " -> ".join(f"{statistics.median(one[number] for one in each):,.0f}" for each in (usual, kept))

    times = [", ".join(f"{1000 * one[0]:.1f}" for one in each) for each in (usual, kept)]
    return [name, *times, f"{ratio.ratio:.3f}", interval(ratio.ci), both(1), both(2)]


def measured(name: str, seconds: float, variables: dict[str, str]) -> list[float]:
    """Runs one process; returns its median seconds and mean page faults per step, and its largest resident memory in MiB."""
    command = [sys.executable, "-c", PROGRAM, name, str(seconds)]
    return [float(word) for word in subprocess.check_output(command, env={**os.environ, **variables}, text=True).split()]


if __name__ == "__main__":
    main()
