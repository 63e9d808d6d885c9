"""Makes the data that the programs of `planted/` read, once, from data that every machine has."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np

DONE_FILE = ".done"
NUM_PHOTOS, PHOTO_SIZE, PHOTO_QUALITY = 160, (448, 336), 92
NUM_RECORDS, RECORD_SHAPE = 400, (8, 513)


def prepare(folder: Path) -> None:
    """Makes the data, unless an earlier call has finished them."""
    if (folder / DONE_FILE).exists():
        return
    photos(folder / "photos")
    records(folder / "records")
    (folder / DONE_FILE).touch()


def photos(folder: Path) -> None:
    """Writes crops of scikit-learn's photographs, each as a JPEG file and as a file of decoded pixels."""
    from PIL import Image
    from sklearn.datasets import load_sample_images

    folder.mkdir(parents=True, exist_ok=True)
    whole, choose = [Image.fromarray(image) for image in load_sample_images().images], random.Random(0)
    for number in range(NUM_PHOTOS):
        source, path = whole[number % len(whole)], folder / f"{number:04d}.jpg"
        x, y = (choose.randrange(size - kept) for size, kept in zip(source.size, PHOTO_SIZE, strict=True))
        source.crop((x, y, x + PHOTO_SIZE[0], y + PHOTO_SIZE[1])).save(path, quality=PHOTO_QUALITY)
        np.save(path.with_suffix(".npy"), np.asarray(Image.open(path).convert("RGB")))


def records(folder: Path) -> None:
    """Writes arrays of random numbers, one per file."""
    folder.mkdir(parents=True, exist_ok=True)
    chance = np.random.default_rng(0)
    for number in range(NUM_RECORDS):
        np.save(folder / f"{number:04d}.npy", chance.standard_normal(RECORD_SHAPE).astype(np.float32))
