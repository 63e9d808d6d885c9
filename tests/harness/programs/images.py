"""Trains on images that torchvision turns into tensors; words choose how. Writes its losses and facts about its batches."""

import json
import sys

import numpy
import torch
import torchvision
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset, default_collate
from torchvision import transforms
from torchvision.transforms import v2

OPTIONS = dict(word.split("=", 1) for word in sys.argv[1:])
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
V1 = [transforms.RandomCrop(32), transforms.RandomHorizontalFlip(), transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
V2 = [v2.ToImage(), v2.RandomCrop(32), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
PIPELINES = {
    "v1": transforms.Compose(V1),
    "v2": v2.Compose(V2),
    "alone": transforms.ToTensor(),
    "by_hand": lambda image: torch.from_numpy(numpy.array(image)).permute(2, 0, 1).float().div(255) * 2 - 1,
    "erased": transforms.Compose([*V1, transforms.RandomErasing(p=1.0)]),
    "sometimes_erased": transforms.Compose([*V1, transforms.RandomErasing(p=0.02)]),
    "numpy": lambda image: torch.from_numpy(numpy.asarray(image, numpy.float32).transpose(2, 0, 1) / 255),
}


class Images(Dataset):
    """One data set for training and evaluation, as in many programs."""

    def __init__(self):
        self.pixels = numpy.random.default_rng(0).integers(0, 256, (96, 36, 36, 3), numpy.uint8)
        self.transform = PIPELINES[OPTIONS.get("pipeline", "v1")]

    def __len__(self):
        return len(self.pixels)

    def __getitem__(self, index):
        image = self.transform(Image.fromarray(self.pixels[index]))
        return {"image": image, "views": [image, index % 3]} if "nested" in OPTIONS else (image, index % 3)


def listed(samples):
    return [image for image, _ in samples], torch.tensor([label for _, label in samples])


def mixed(samples):
    images, labels = default_collate(samples)
    return images.flip(0).mul_(0.25).add_(images.mul(0.75)), labels


COLLATES = {"default": None, "listed": listed, "mixed": mixed}


def parts(batch):
    if "nested" in OPTIONS:
        return batch["image"] + batch["views"][0], batch["views"][1]
    images, labels = batch
    return torch.stack(images) if isinstance(images, list) else images, labels


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features, self.head = nn.Conv2d(3, 4, 3, stride=2), nn.LazyLinear(3)

    def forward(self, images):
        seen = [type(images) is torch.Tensor, str(images.dtype), self.training]
        if seen not in SEEN:
            SEEN.append(seen)
            with open("seen.json", "w") as file:
                json.dump(SEEN, file)
        return self.head(self.features(images).relu().flatten(1))


SEEN = []


def main():
    torch.manual_seed(0)
    data = Images()
    workers = int(OPTIONS.get("workers", "0"))
    loader = DataLoader(
        data,
        batch_size=8,
        shuffle=True,
        num_workers=workers,
        collate_fn=COLLATES[OPTIONS.get("collate", "default")],
        persistent_workers="persistent" in OPTIONS,
        multiprocessing_context=OPTIONS.get("method"),
    )
    held_out = DataLoader(data, batch_size=32)
    model = Net()
    model(parts(next(iter(loader)))[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    number = 0
    with open("losses.txt", "w") as losses:
        while True:
            for batch in loader:
                images, labels = parts(batch)
                loss = nn.functional.cross_entropy(model(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                number += 1
                print(float(loss).hex(), file=losses, flush=True)
                if number == int(OPTIONS.get("steps", "0")):
                    return
            if "evaluate" in OPTIONS:
                model.eval()
                kinds = {type(batch["image"] if "nested" in OPTIONS else batch[0]).__name__ for batch in held_out}
                with open("held_out.json", "w") as file:
                    json.dump(sorted(kinds), file)
                model.train()


if __name__ == "__main__":
    assert torchvision.__version__
    main()
