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
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torchvision
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import Dataset
from torchvision import transforms

sys.path.append(str(Path(__file__).parent))
from recipe_parts import ENDLESS_SAMPLES, SyntheticBatches, add_options, build_loader, cross_entropy, positive, run, train

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
PHOTO_NAMES, PHOTOS_EACH = ("china", "flower"), 512
PHOTO_SIZE, PHOTO_QUALITY = (500, 375), 90  # like ImageNet's files
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


def default_photo_folder() -> Path:
    """Returns the folder in the user's cache that `--data photos` uses without --data-root."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vision-photos-v1"


def ensure_photos(folder: Path, per_photo: int = PHOTOS_EACH) -> None:
    """Makes the photos unless they exist. The folder appears complete or not at all, even if several processes do this at once.

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
        size, num_classes = options.image_size, options.num_classes
        shape = (options.batch_size, 3, size, size)
        return SyntheticBatches(
            options, lambda: (torch.randn(shape, device=device), torch.randint(0, num_classes, shape[:1], device=device))
        )
    return build_loader(build_dataset(options), options)


def build_model(name: str, num_classes: int, image_size: int, source: str = "torchvision") -> nn.Module:
    """Returns the model of that name with random weights."""
    model: nn.Module
    if source == "timm":
        import timm

        usual = timm.get_pretrained_cfg(name)  # None for a model that has no such settings
        is_other = getattr(usual, "fixed_input_size", False) and usual.input_size[-1] != image_size
        size = {"img_size": image_size} if is_other else {}  # models for images of any size, such as ResNets, lack `img_size`
        model = timm.create_model(name, pretrained=False, num_classes=num_classes, **size)
        return model
    arguments: dict[str, Any] = {"num_classes": num_classes}
    if name.startswith("vit_"):
        arguments["image_size"] = image_size
    if name in AUXILIARY_HEADS:
        arguments |= {"aux_logits": False, "init_weights": True}
    model = torchvision.models.get_model(name, weights=None, **arguments)
    return model


def is_first_here() -> bool:
    """Whether this is the only process, or the first on its machine."""
    return not dist.is_initialized() or os.environ["LOCAL_RANK"] == "0"


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
    add_options(parser, lr=0.01, optimizer="sgd")
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

    def start(device: torch.device) -> None:
        try:
            batches = build_batches(options, device)
        except FileExistsError as error:
            parser.error(f"--data-root: {error}")
        model = build_model(options.model, options.num_classes, options.image_size, options.source)
        count = {"unit": "samples", "count": lambda batch: len(batch[1])}
        train(options, device, batches, model, cross_entropy, **count, weight_decay=1e-4)

    run(parser, options, start)


if __name__ == "__main__":
    main()
