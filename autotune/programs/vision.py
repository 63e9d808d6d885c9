"""Trains an image classifier from torchvision or timm, starting with random weights: a plain PyTorch script.

    python vision.py --model resnet18 --data photos --batch-size 32 --num-workers 4
    torchrun --standalone --nproc-per-node 2 vision.py --model resnet18     # batch size and workers are per process
    python vision.py --source timm --model convnextv2_tiny

It needs torch and torchvision, timm for timm's models, and scikit-learn the first time that `--data photos` makes its files.
Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torchvision
from PIL import Image
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchvision import transforms

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
ENDLESS_SAMPLES = 100_000  # samples in an epoch of built-in data: it is repeated, so that epochs are as long as usual
PHOTO_NAMES, PHOTOS_EACH = ("china", "flower"), 512
PHOTO_SIZE, PHOTO_QUALITY = (500, 375), 90  # like ImageNet's files
SYNTHETIC_BATCHES = 4
AUXILIARY_HEADS = ("googlenet", "inception_v3")  # built without auxiliary heads: with them, the model returns a tuple


class Repeated(Dataset[Any]):
    """`num_samples` samples in random order: `data` repeated if `data` is shorter, or a random subset if it is longer."""

    def __init__(self, data: Any, num_samples: int) -> None:
        self.data = data
        self.num_samples = num_samples
        self.order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0)).tolist()

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Any:
        return self.data[self.order[index % len(self.order)]]


class FakeCifar(Dataset[Any]):
    """10,000 random 32x32 images of ten classes, loaded as in the PyTorch profiler tutorial."""

    def __init__(self, transform: Any) -> None:
        self.images = torch.randint(0, 256, (10_000, 32, 32, 3), dtype=torch.uint8).numpy()
        self.labels = torch.randint(0, 10, (10_000,)).tolist()
        self.transform = transform

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(Image.fromarray(self.images[index])), self.labels[index]


class SyntheticBatches:
    """Random batches that are already on the device: training without an input pipeline."""

    def __init__(self, num_steps: int, shape: tuple[int, int, int, int], num_classes: int, device: torch.device) -> None:
        self.num_steps = num_steps
        # Several random batches, not one of zeros: with constant inputs some kernels run faster than with real data.
        self.batches = [
            (torch.randn(shape, device=device), torch.randint(0, num_classes, shape[:1], device=device))
            for _ in range(SYNTHETIC_BATCHES)
        ]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return (self.batches[step % len(self.batches)] for step in range(self.num_steps))


def default_photo_folder() -> Path:
    """Returns the folder in the user's cache that `--data photos` uses without --data-root."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vision-photos-v1"


def ensure_photos(folder: Path, per_photo: int = PHOTOS_EACH) -> None:
    """Makes the photos unless they exist: all or none, even if several processes try at the same time.

    Raises:
        FileExistsError: `folder` contains something else.
    """
    if (folder / PHOTO_NAMES[0]).is_dir():
        return
    print(f"making {len(PHOTO_NAMES) * per_photo} photos in {folder}", flush=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        unfinished.chmod(0o755)  # mkdtemp gives access to one user only
        write_photos(unfinished, per_photo)
        with contextlib.suppress(OSError):  # another process was faster, or `folder` holds something else
            unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    if not (folder / PHOTO_NAMES[0]).is_dir():
        raise FileExistsError(f"{folder} exists, but contains no photos; name a new or an empty folder")


def write_photos(folder: Path, per_photo: int) -> None:
    """Writes random crops of scikit-learn's two photographs as JPEG files, one subfolder per photograph."""
    from sklearn.datasets import load_sample_image

    generator = torch.Generator().manual_seed(0)
    for name in PHOTO_NAMES:
        photo = Image.fromarray(load_sample_image(f"{name}.jpg"))
        (folder / name).mkdir()
        for number in range(per_photo):
            share, x, y = torch.rand(3, generator=generator).tolist()
            width = int(photo.width * (0.5 + 0.38 * share))  # 320 to 563 of 640 pixels, so that a 4:3 crop is not too high
            height = width * PHOTO_SIZE[1] // PHOTO_SIZE[0]
            left, top = int(x * (photo.width - width)), int(y * (photo.height - height))
            crop = photo.resize(PHOTO_SIZE, Image.Resampling.BILINEAR, (left, top, left + width, top + height))
            crop.save(folder / name / f"{number:04d}.jpg", quality=PHOTO_QUALITY)


def training_transform(image_size: int) -> Any:
    """Returns the usual augmentation of ImageNet training."""
    return transforms.Compose(
        [
            transforms.RandomResizedCrop(image_size),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(IMAGENET_MEAN, IMAGENET_STD),
        ]
    )


def build_dataset(options: argparse.Namespace) -> Dataset[Any]:
    """Returns the samples of an epoch, as (float image of [3, size, size], class index).

    Raises:
        OSError: the files cannot be read or made.
    """
    if options.data == "fake_cifar":
        resize = [transforms.Resize(options.image_size), transforms.ToTensor(), transforms.Normalize((0.5,) * 3, (0.5,) * 3)]
        return Repeated(FakeCifar(transforms.Compose(resize)), options.samples_per_epoch or ENDLESS_SAMPLES)
    folder = options.data_root or default_photo_folder()
    if options.data == "photos":
        if is_first_here():
            ensure_photos(folder)
        if dist.is_initialized():
            dist.barrier()  # the other processes wait for the photos
    images = torchvision.datasets.ImageFolder(str(folder), training_transform(options.image_size))
    if options.data == "photos":
        return Repeated(images, options.samples_per_epoch or ENDLESS_SAMPLES)
    return Repeated(images, options.samples_per_epoch) if options.samples_per_epoch else images


def build_batches(options: argparse.Namespace, device: torch.device) -> Iterable[tuple[Tensor, Tensor]]:
    """Returns an iterable of batches (images of [batch, 3, size, size], classes), to be iterated once per epoch."""
    if options.data == "synthetic":
        num_steps = max(1, (options.samples_per_epoch or ENDLESS_SAMPLES) // options.batch_size)
        shape = (options.batch_size, 3, options.image_size, options.image_size)
        return SyntheticBatches(num_steps, shape, options.num_classes, device)
    dataset = build_dataset(options)
    sampler: Any = DistributedSampler(dataset, seed=options.seed) if dist.is_initialized() else None
    return DataLoader(dataset, options.batch_size, shuffle=sampler is None, sampler=sampler, num_workers=options.num_workers)


def build_model(name: str, num_classes: int, image_size: int, source: str = "torchvision") -> nn.Module:
    """Returns the model of that name with random weights."""
    model: nn.Module
    if source == "timm":
        import timm

        model = timm.create_model(name, pretrained=False, num_classes=num_classes)
        return model
    arguments: dict[str, Any] = {"num_classes": num_classes}
    if name.startswith("vit_"):
        arguments["image_size"] = image_size
    if name in AUXILIARY_HEADS:
        arguments |= {"aux_logits": False, "init_weights": True}
    model = torchvision.models.get_model(name, weights=None, **arguments)
    return model


def build_optimizer(name: str, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """Returns the optimizer over all parameters of the model."""
    if name == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=lr)
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=1e-4)


# Support for training in several processes, each with its part of the data. A launcher such as torchrun starts the processes.
# Without a launcher, these functions have no effect.


def join_processes(kind: str) -> torch.device:
    """Returns this process's device, such as "cuda:1"; joins the process group if a launcher started several processes."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return torch.device(kind)
    device = torch.device(kind, int(os.environ["LOCAL_RANK"])) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    return device


def is_first_here() -> bool:
    """Whether this is the only process, or the first on its machine."""
    return not dist.is_initialized() or os.environ["LOCAL_RANK"] == "0"


def in_step(model: nn.Module, device: torch.device, strategy: str = "ddp") -> nn.Module:
    """Returns the model. With several processes, it is wrapped to average gradients over them, or sharded across them."""
    if not dist.is_initialized():
        return model
    if strategy == "fsdp":
        return shared_out(model, device)
    return DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)


def shared_out(model: nn.Module, device: torch.device) -> nn.Module:
    """Returns the model with the parameters of rank 0, sharded across the processes and gathered block by block."""
    from torch.distributed.device_mesh import init_device_mesh

    try:
        from torch.distributed.fsdp import fully_shard
    except ImportError:  # torch before 2.6
        from torch.distributed._composable.fsdp import fully_shard  # type: ignore[attr-defined]

    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor, 0)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Yields the items of the outermost nn.Sequential and nn.ModuleList, such as a transformer's layers.

    Skips items without parameters. If an item is itself an nn.ModuleList, its items are yielded in its place.
    """
    is_list = isinstance(model, (nn.Sequential, nn.ModuleList))
    for child in model.children():
        if not is_list or type(child).forward is nn.Module.forward:  # a nested list, which is never called itself
            yield from blocks(child)
        elif any(True for _ in child.parameters()):
            yield child


def begin_epoch(batches: Any, epoch: int) -> None:
    """Reshuffles the data across the processes for an epoch."""
    if isinstance(sampler := getattr(batches, "sampler", None), DistributedSampler):
        sampler.set_epoch(epoch)


def train(options: argparse.Namespace, device: torch.device) -> None:
    """Trains for all epochs, printing this process's loss and rate every few steps."""
    batches = build_batches(options, device)
    model = build_model(options.model, options.num_classes, options.image_size, options.source).to(device)
    model = in_step(model, device, options.strategy)
    optimizer = build_optimizer(options.optimizer, model, options.lr)
    criterion = nn.CrossEntropyLoss()
    model.train()
    for epoch in range(options.epochs):
        begin_epoch(batches, epoch)
        since_s, num_samples = time.monotonic(), 0
        for step, (images, labels) in enumerate(batches, start=1):
            images = images.to(device, non_blocking=True)
            labels = labels.to(device, non_blocking=True)
            loss = criterion(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            num_samples += len(labels)
            if step % options.print_every == 0 and is_first_here():
                value = loss.item()  # waits for the device, so it is called rarely, and before the clock is read
                rate_per_s = num_samples / (time.monotonic() - since_s)
                print(f"epoch {epoch} step {step} loss {value:.4f} samples/s {rate_per_s:.1f}", flush=True)
                since_s, num_samples = time.monotonic(), 0


def positive(text: str) -> int:
    """Returns the positive integer in `text`."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {text}")
    return number


def model_names(source: str) -> list[str]:
    """Returns the names of the classifiers in torchvision or timm.

    Raises:
        ImportError: timm is not installed.
    """
    if source == "timm":
        import timm

        return list(timm.list_models())
    return list(torchvision.models.list_models(module=torchvision.models))


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(description="Trains an image classifier of torchvision or timm from random weights.")
    parser.add_argument("--source", choices=("torchvision", "timm"), default="torchvision", help="library of the model")
    parser.add_argument("--model", default="resnet18", help="name of the classifier in that library")
    parser.add_argument("--num-classes", type=positive, default=1000)
    parser.add_argument("--image-size", type=positive, default=224, help="height and width in pixels")
    parser.add_argument("--data", choices=("photos", "fake_cifar", "folder", "synthetic"), default="photos")
    parser.add_argument("--data-root", type=Path, help="where to make the photos; for --data folder: has a subfolder per class")
    parser.add_argument("--batch-size", type=positive, default=32)
    parser.add_argument("--num-workers", type=int, default=0, help="processes that load data")
    parser.add_argument("--epochs", type=positive, default=1)
    parser.add_argument("--samples-per-epoch", type=positive, help="default: all images of --data folder, else 100,000")
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--optimizer", choices=("sgd", "adamw"), default="sgd")
    strategy_help = "with several processes, each holds a replica (ddp) or a shard (fsdp) of the model"
    parser.add_argument("--strategy", choices=("ddp", "fsdp"), default="ddp", help=strategy_help)
    parser.add_argument("--print-every", type=positive, default=10, help="steps between two printed lines")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    return parser


def main() -> None:
    """Reads the command line and trains."""
    parser = build_parser()
    options = parser.parse_args()
    try:
        names = model_names(options.source)
    except ImportError as error:
        parser.error(f"--source: {error}. Install it: pip install timm")
    if options.model not in names:
        nearest = difflib.get_close_matches(options.model, names, n=3) or sorted(names)[:3]
        parser.error(f"--model: {options.source} has no classifier {options.model!r}. Nearest: {', '.join(nearest)}")
    if options.data == "folder" and (options.data_root is None or not options.data_root.is_dir()):
        parser.error(f"--data-root: --data folder needs a folder with one subfolder a class, got {options.data_root}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: torch sees no CUDA device, got cuda. Use auto or cpu")
    name = options.device if options.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    device = join_processes(name)
    # Each process has its own seed. `in_step` then gives all processes the weights of rank 0.
    torch.manual_seed(options.seed + (dist.get_rank() if dist.is_initialized() else 0))
    try:
        train(options, device)
    except FileExistsError as error:
        parser.error(f"--data-root: {error}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
