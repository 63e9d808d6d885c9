"""Trains on made-up pictures; each stage of the loader has a file in which its runs are noted.

Words on its command line: "workers", "many" (the data set makes a batch's samples at once), "stream" (an iterable data set),
"two" (two loaders take turns), "dicts" (samples are dicts; the collate function and the training loop empty the dicts that they
get), "short" (an epoch has five batches), "valid" (every fourth step, the model is evaluated on a stream).
"""

import functools
import io
import itertools
import os
import sys

import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate
from torchvision.transforms import Compose

WORDS = sys.argv[1:]
FOLDER = os.path.dirname(os.environ["AUTOTUNE_SPEC"])


def note(stage):
    descriptor = os.open(os.path.join(FOLDER, f"ran.{stage}"), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, b".")
    os.close(descriptor)


def picture(color):
    stored = io.BytesIO()
    Image.new("RGB", (24, 16), (color, 0, 0)).save(stored, "png")
    return stored.getvalue()


PICTURES = [picture(color) for color in range(8)]


class Halve:
    def __call__(self, image):
        note("halve")
        return image.reduce(2)


class ToTensor:
    def __call__(self, image):
        note("tensor")
        return torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).float()


class Pictures(Dataset):
    def __init__(self):
        self.transform = Compose([Halve(), ToTensor()])

    def __len__(self):
        return 40 if "short" in WORDS else 1_000_000

    def __getitem__(self, index):
        note("item")
        return self.transform(Image.open(io.BytesIO(PICTURES[index % 8]))), index

    if "many" in WORDS:

        def __getitems__(self, indices):
            return [self[index] for index in indices]


class Stream(IterableDataset):
    def __iter__(self):
        pictures = Pictures()
        return (pictures[number] for number in range(1_000_000))


def evaluate(model, batches):
    model.eval()
    with torch.no_grad():
        model(next(batches)[0])
    model.train()


def collate(samples):
    note("collate")
    return default_collate(samples)


class Log:
    def write(self, loss):
        note("write")
        return loss.item()

    @torch.no_grad()
    def decorated(self, loss):
        return loss.item()

    @staticmethod
    def static(loss):
        note("static")
        return loss.item()

    @classmethod
    @torch.no_grad()
    def of_class(cls, loss):
        note("of_class")
        assert cls is Journal
        return loss.item()

    class Inner:
        def write(self, loss):
            note("inner")
            return loss.item()


class Journal(Log):
    pass


@functools.lru_cache(maxsize=1)
def cached(number):
    note("cached")
    return number


def moved(tensor):
    return tensor.to("cpu")


def stepping(optimizer):
    optimizer.step()


def loss_of(model, images):
    note("loss")
    return model(images).square().mean()


def taken(samples):
    note("collate")
    return default_collate([(sample.pop("image"), sample.pop("number")) for sample in samples])


class Dicts(Pictures):
    def __getitem__(self, index):
        image, number = super().__getitem__(index)
        return {"image": image, "number": number}


def main():
    log = Log()
    inner = Log.Inner()
    callbacks = [moved]
    model = torch.nn.Linear(288, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    data = Stream() if "stream" in WORDS else Pictures()
    data = Dicts() if "dicts" in WORDS else data
    of_batch = taken if "dicts" in WORDS else collate
    workers = 2 if "workers" in WORDS else 0
    loader = DataLoader(data, batch_size=8, collate_fn=of_batch, num_workers=workers)
    other = iter(DataLoader(Pictures(), batch_size=8, collate_fn=collate)) if "two" in WORDS else None
    valid = iter(DataLoader(Stream(), batch_size=8, collate_fn=collate, num_workers=workers)) if "valid" in WORDS else None
    for step, (images, numbers) in enumerate(itertools.chain.from_iterable(itertools.repeat(loader))):
        if valid is not None and step % 4 == 3:
            evaluate(model, valid)
        if other is not None:
            next(other)
        callbacks[0](images)
        images, numbers = moved(images), moved(numbers)
        assert images.shape == (8, 288)
        assert numbers.shape == (8,)
        loss = loss_of(model, images)
        optimizer.zero_grad()
        loss.backward()
        stepping(optimizer)
        log.decorated(loss)
        inner.write(loss)
        log.static(loss)
        Journal.of_class(loss)
        cached(step)
        assert isinstance(log.write(loss), float)


if __name__ == "__main__":
    main()
