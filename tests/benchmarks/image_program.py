"""Trains a classifier of torchvision, or a small one, on random images and measures its own rate. It does not use autotune.

    python image_program.py                                       # trains forever
    python image_program.py --skip-s 3 --seconds 20               # trains, prints its rate and ends
    python image_program.py --warm-steps 3 --steps 50             # the same, for a number of steps
    python image_program.py --amp bf16 --channels-last --fused --compile default    # settings written by hand
    python image_program.py --workers 4 --size 224                # images from a loader, not one fixed batch

It prints one JSON line, {"rate_per_s", "steps", "seconds"}.
"""

import argparse
import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

CLASSES, NUM_IMAGES = 10, 4096
SMALL = "small"  # a model that needs torch alone
LOOK_S = 0.05  # seconds of steps between two readings of the clock; each reading waits for the device
FIRST_STEPS = 3  # steps that compile and record CUDA graphs
FOREVER_S = 1e9

Batches = Iterator[tuple[Tensor, Tensor]]


class Images(Dataset[tuple[Tensor, int]]):
    """Random 8-bit images, flipped and scaled as by an augmentation."""

    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.images = torch.randint(0, 256, (64, 3, size, size), dtype=torch.uint8, generator=generator)

    def __len__(self) -> int:
        return NUM_IMAGES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = self.images[index % len(self.images)].float().div_(255.0).sub_(0.5)
        return (image.flip(-1) if index % 2 else image), index % CLASSES


def make_model(name: str) -> nn.Module:
    """Returns the classifier with random weights, the same in every process."""
    torch.manual_seed(0)
    if name == SMALL:
        return nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, CLASSES)
        )
    import torchvision

    model: nn.Module = torchvision.models.get_model(name, weights=None, num_classes=CLASSES)
    return model


def make_batch(batch: int, size: int, device: str) -> tuple[Tensor, Tensor]:
    """Returns random images and classes on the device."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(batch, 3, size, size, generator=generator)
    return images.to(device), torch.randint(0, CLASSES, (batch,), generator=generator).to(device)


def make_batches(options: argparse.Namespace) -> Batches:
    """Yields batches forever: one fixed batch, or the batches of a loader."""
    if options.workers is None:
        batch = make_batch(options.batch, options.size, options.device)
        while True:
            yield batch
    loader = DataLoader(Images(options.size), options.batch, shuffle=True, drop_last=True, num_workers=options.workers)
    while True:
        for images, labels in loader:
            yield images.to(options.device), labels.to(options.device)


def make_step(options: argparse.Namespace) -> Callable[[], None]:
    """Returns a function that makes one training step, with the settings of the command line."""
    model = make_model(options.model).to(options.device)
    if options.channels_last:
        model = model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True if options.fused else None)
    called = model
    if options.compile != "off":
        called = torch.compile(model, mode=None if options.compile == "default" else options.compile)
    scaler = torch.amp.GradScaler(options.device, enabled=options.amp == "fp16")
    batches = make_batches(options)

    def precision() -> contextlib.AbstractContextManager[None]:
        if options.amp == "off":
            return contextlib.nullcontext()
        return torch.autocast(options.device, dtype=torch.bfloat16 if options.amp == "bf16" else torch.float16)

    def step() -> None:
        images, labels = next(batches)
        if options.channels_last:
            images = images.to(memory_format=torch.channels_last)
        optimizer.zero_grad()
        with precision():
            loss = nn.functional.cross_entropy(called(images), labels)
        if scaler.is_enabled():
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            optimizer.step()

    return step


def rate(step: Callable[[], None], batch: int, device: str, *, skip_s: float, seconds: float) -> dict[str, float]:
    """Returns the measured rate of a step. The device is waited for only about every LOOK_S seconds."""
    chunk, num_steps, started_s = 1, 0, math.inf
    for _ in range(FIRST_STEPS):
        step()
    wait(device)
    begun_s = time.perf_counter()
    while True:
        before_s = time.perf_counter()
        for _ in range(chunk):
            step()
        wait(device)
        now_s = time.perf_counter()
        if started_s < math.inf:
            num_steps += chunk
        elif now_s - begun_s >= skip_s:
            started_s = now_s
        if now_s - started_s >= seconds:
            elapsed_s = now_s - started_s
            return {"rate_per_s": num_steps * batch / elapsed_s, "steps": num_steps, "seconds": elapsed_s}
        if now_s - before_s < LOOK_S:
            chunk *= 2


def rate_of_steps(step: Callable[[], None], batch: int, device: str, *, warm_steps: int, steps: int) -> dict[str, float]:
    """Returns the rate of `steps` steps that follow `warm_steps` warm-up steps."""
    for _ in range(warm_steps):
        step()
    wait(device)
    began_s = time.perf_counter()
    for _ in range(steps):
        step()
    wait(device)
    seconds = time.perf_counter() - began_s
    return {"rate_per_s": steps * batch / seconds, "steps": steps, "seconds": seconds}


def wait(device: str) -> None:
    """Waits until the device has finished its work."""
    if device == "cuda":
        torch.cuda.synchronize()


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="resnet18", help=f"model of torchvision, or {SMALL}")
    parser.add_argument("--size", type=int, default=32, help="height and width of an image")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--workers", type=int, help="workers of the image loader; default: one fixed batch, no loader")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--skip-s", type=float, default=0.0, help="seconds of training before the measurement")
    parser.add_argument("--seconds", type=float, default=FOREVER_S, help="length of the measurement")
    parser.add_argument("--warm-steps", type=int, default=3, help="warm-up steps before --steps")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--amp", choices=("off", "bf16", "fp16"), default="off")
    parser.add_argument("--compile", choices=("off", "default", "reduce-overhead", "max-autotune"), default="off")
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--fused", action="store_true")
    parser.add_argument("--tf32", action="store_true")
    parser.add_argument("--cudnn-benchmark", action="store_true")
    parser.add_argument("--threads", type=int)
    return parser


def main() -> None:
    """Trains and prints the rate."""
    options = build_parser().parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.tf32:
        torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = options.cudnn_benchmark
    step = make_step(options)
    if options.steps:
        found = rate_of_steps(step, options.batch, options.device, warm_steps=options.warm_steps, steps=options.steps)
    else:
        found = rate(step, options.batch, options.device, skip_s=options.skip_s, seconds=options.seconds)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
