"""Measures how much a language model computes and what this device can reach. It is a separate program, as it uses the device.

    python -m tests.benchmarks.gpu_campaign.arithmetic --size 8192 -- OPTIONS OF autotune/programs/text.py

It prints one JSON line, {"flop_per_token", "num_parameters", "matmul_flop_per_s"}. FLOPs are those of a training step, forward
and backward, as torch counts them. The rate is that of a bfloat16 product of two square matrices of random numbers, which is
the device's practical maximum.
"""

import argparse
import json
import sys
import time

import torch
from torch.utils.flop_counter import FlopCounterMode

from autotune.programs import text

REPEATS = 20


def flop_per_token(options: argparse.Namespace, device: str) -> tuple[float, int]:
    """Returns the FLOPs per token of a training step, and the number of parameters."""
    model = text.build_model(options).to(device)
    tokens = torch.randint(text.NUM_SPECIAL, text.vocab_size(options), (1, options.sequence_length), device=device)
    with FlopCounterMode(display=False) as counted:
        model(input_ids=tokens, labels=tokens).loss.backward()
    return counted.get_total_flops() / options.sequence_length, sum(each.numel() for each in model.parameters())


def matmul_flop_per_s(size: int, device: str) -> float:
    """Returns the FLOPs per second of a bfloat16 matrix product. The numbers are random, because zeros would run faster."""
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))

    def run(repeats: int) -> float:
        began_s = time.perf_counter()
        for _ in range(repeats):
            left @ right
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began_s

    run(3)
    return 2 * size**3 * REPEATS / run(REPEATS)


def main() -> None:
    """Counts the FLOPs, measures the rate and prints both."""
    own, words = sys.argv[1 : sys.argv.index("--")], sys.argv[sys.argv.index("--") + 1 :]
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=int, required=True)
    size = parser.parse_args(own).size
    device = "cuda" if torch.cuda.is_available() else "cpu"
    flop, num_parameters = flop_per_token(text.build_parser().parse_args(words), device)
    found = {"flop_per_token": flop, "num_parameters": num_parameters, "matmul_flop_per_s": matmul_flop_per_s(size, device)}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
