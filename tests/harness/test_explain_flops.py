"""FLOPs of a step agree with counts by hand. Products in two precisions and peaks are measured on this device."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from autotune.harness.explain import peaks as peaks_of_device
from autotune.harness.explain.documents import BYTES, CASTS, NARROW, TIMED_FRAC, WIDE
from autotune.harness.explain.flops import StepFlops
from autotune.harness.explain.peaks import least_s, peaks
from autotune.harness.explain.products import ATTENTION, Products, _dtype

WITHIN = 0.02


def counted(model: nn.Module, x: torch.Tensor, loss_of: Callable[[torch.Tensor], torch.Tensor]) -> StepFlops:
    """Counts the FLOPs of one step."""
    counter = StepFlops()
    counter.begin()
    loss_of(model(x)).backward()
    counter.end()
    return counter


def mean(output: torch.Tensor) -> torch.Tensor:
    return output.float().mean()


def test_flops_of_resnet18() -> None:
    torchvision = pytest.importorskip("torchvision")
    counter = counted(torchvision.models.resnet18(num_classes=1000), torch.randn(2, 3, 64, 64), mean)

    def convolution(side: int, inputs: int, outputs: int, kernel: int) -> int:
        return 2 * side**2 * inputs * outputs * kernel**2

    # At 64x64: the stem gives 32x32, pooling 16x16, and the four stages 16, 8, 4 and 2.
    stem = convolution(32, 3, 64, 7)
    stages = 4 * convolution(16, 64, 64, 3)
    for side, inputs, outputs in ((8, 64, 128), (4, 128, 256), (2, 256, 512)):
        stages += convolution(side, inputs, outputs, 3) + 3 * convolution(side, outputs, outputs, 3)
        stages += convolution(side, inputs, outputs, 1)
    head = 2 * 512 * 1000
    assert counter.total == pytest.approx(2 * (2 * stem + 3 * (stages + head)), rel=WITHIN)  # images need no gradient


def transformer(tokens: int, width: int, *, hidden: int) -> int:
    """Returns the forward FLOPs of a block for one sample: projections, attention and the two layers of the MLP."""
    projections = 2 * tokens * width * (3 * width + width)
    attention = 2 * 2 * tokens**2 * width
    return projections + attention + 2 * 2 * tokens * width * hidden


def test_flops_of_a_tiny_vision_transformer() -> None:
    torchvision = pytest.importorskip("torchvision")
    width, depth, batch = 192, 3, 2  # ViT-Ti/16 at 64x64, with three of its twelve blocks
    model = torchvision.models.VisionTransformer(64, 16, depth, 3, width, 4 * width, num_classes=100)
    counter = counted(model, torch.randn(batch, 3, 64, 64), mean)
    tokens = (64 // 16) ** 2 + 1
    patches = 2 * (64 // 16) ** 2 * 3 * 16**2 * width
    rest = depth * transformer(tokens, width, hidden=4 * width) + 2 * width * 100
    assert counter.total == pytest.approx(batch * (2 * patches + 3 * rest), rel=WITHIN)


class Gpt(nn.Module):
    """A decoder like GPT-2, whose attention is a single torch call."""

    def __init__(self, width: int, depth: int, heads: int, vocabulary: int) -> None:
        super().__init__()
        self.heads, self.words = heads, nn.Embedding(vocabulary, width)
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(depth))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(depth)
        )
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        for qkv, out, mlp in zip(self.qkv, self.out, self.mlp, strict=True):
            query, key, value = qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
            mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            x = x + out(mixed.transpose(1, 2).flatten(2))
            x = x + mlp(x)
        output: torch.Tensor = self.head(x)
        return output


def test_flops_of_a_small_gpt() -> None:
    width, depth, vocabulary, tokens, batch = 64, 2, 500, 64, 2
    counter = counted(Gpt(width, depth, 4, vocabulary), torch.randint(0, vocabulary, (batch, tokens)), mean)
    head, attention = 2 * tokens * width * vocabulary, 2 * 2 * tokens**2 * width
    forward = batch * (depth * transformer(tokens, width, hidden=4 * width) + head)
    # The backward pass recomputes the attention scores instead of storing them.
    assert counter.total == pytest.approx(3 * forward + batch * depth * attention / 2, rel=WITHIN)


def test_matrix_products_of_a_step_are_timed_in_two_precisions() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 14 * 14, 32))
    found = counted(model, torch.randn(4, 3, 16, 16), mean).products.timed("cpu")
    assert set(found) == {WIDE, NARROW, CASTS, TIMED_FRAC}
    assert found[TIMED_FRAC] == pytest.approx(1.0)
    assert all(0 < found[name] < 1 for name in (WIDE, NARROW, CASTS))


def test_attention_is_timed_again_in_both_directions() -> None:
    products = counted(Gpt(64, 2, 4, 500), torch.randint(0, 500, (2, 64)), mean).products
    assert {name for name, _ in products._seen} >= set(ATTENTION)
    products._seen = {key: seen for key, seen in products._seen.items() if key[0] in ATTENTION}
    found = products.timed("cpu")
    assert found[TIMED_FRAC] == pytest.approx(1.0)
    assert all(0 < found[name] < 1 for name in (WIDE, NARROW, CASTS))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_in_16_bits_are_timed_apart_from_those_in_32(dtype: torch.dtype) -> None:
    products = counted(nn.Linear(64, 64).to(dtype), torch.randn(8, 64).to(dtype), mean).products
    found = products.timed_in_16_bits("cpu")
    assert found[TIMED_FRAC] == pytest.approx(1.0)
    assert found[WIDE] > 0 < found[NARROW]
    assert products.timed("cpu") == {}
    assert counted(nn.Linear(64, 64), torch.randn(8, 64), mean).products.timed_in_16_bits("cpu") == {}


def test_products_under_the_programs_own_autocast_are_timed_in_its_type() -> None:
    model = Gpt(64, 2, 4, 500)
    with torch.autocast("cpu", torch.bfloat16):
        products = counted(model, torch.randint(0, 500, (2, 64)), mean).products
    found = products.timed_in_16_bits("cpu")
    assert found[TIMED_FRAC] == pytest.approx(1.0)
    in_16_bits = {name for (name, _), seen in products._seen.items() if _dtype(seen[1]) == NARROW}
    assert in_16_bits >= {"addmm", *ATTENTION}


def test_16_bit_type_is_that_of_the_gpu_that_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    capabilities = {None: (8, 0), 1: (7, 5)}  # the current GPU is another one
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=None: capabilities[index])
    seen: list[Any] = []
    monkeypatch.setattr(Products, "_timed", lambda _, *given: seen.extend(given))
    Products().timed("cuda", 1)
    Products().timed("cuda")
    assert seen == ["float32", "float16", "cuda", 1, "float32", "bfloat16", "cuda", None]


def test_peaks_of_this_device_are_plausible() -> None:
    found = peaks("cpu")
    assert set(found) == {WIDE, NARROW, BYTES}
    assert found[WIDE] > 1e9
    assert found[BYTES] > 1e8


class Queue:
    """Simulated clocks of GPU and host. A call takes 30 us on the GPU and 5 us on the host; a wait takes 10 us more."""

    now_s = busy_until_s = 0.0

    def call(self) -> None:
        self.now_s += 5e-6
        self.busy_until_s = max(self.busy_until_s, self.now_s) + 30e-6

    def synchronize(self) -> None:
        self.now_s = max(self.now_s, self.busy_until_s) + 10e-6


def test_timing_of_short_gpu_calls_excludes_the_synchronisation(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = Queue()
    monkeypatch.setattr(torch.cuda, "synchronize", queue.synchronize)
    monkeypatch.setattr(peaks_of_device, "time", SimpleNamespace(perf_counter=lambda: queue.now_s))
    assert least_s(queue.call, "cuda") == pytest.approx(30e-6, rel=0.05)
