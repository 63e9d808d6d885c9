"""What can be known of a recipe before its program starts: whether its model exists, whether its data lie where it says."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

from autotune.config.keys import no_such
from autotune.config.locate import program
from autotune.config.schema import StudyConfig
from autotune.knobs.values import shown

# Classifiers of torchvision 0.19. Another name is looked up in the torchvision that the recipe runs with, which takes seconds.
NAMES = """
    alexnet convnext_base convnext_large convnext_small convnext_tiny densenet121 densenet161 densenet169 densenet201
    efficientnet_b0 efficientnet_b1 efficientnet_b2 efficientnet_b3 efficientnet_b4 efficientnet_b5 efficientnet_b6
    efficientnet_b7 efficientnet_v2_l efficientnet_v2_m efficientnet_v2_s googlenet inception_v3 maxvit_t mnasnet0_5
    mnasnet0_75 mnasnet1_0 mnasnet1_3 mobilenet_v2 mobilenet_v3_large mobilenet_v3_small regnet_x_16gf regnet_x_1_6gf
    regnet_x_32gf regnet_x_3_2gf regnet_x_400mf regnet_x_800mf regnet_x_8gf regnet_y_128gf regnet_y_16gf regnet_y_1_6gf
    regnet_y_32gf regnet_y_3_2gf regnet_y_400mf regnet_y_800mf regnet_y_8gf resnet101 resnet152 resnet18 resnet34 resnet50
    resnext101_32x8d resnext101_64x4d resnext50_32x4d shufflenet_v2_x0_5 shufflenet_v2_x1_0 shufflenet_v2_x1_5
    shufflenet_v2_x2_0 squeezenet1_0 squeezenet1_1 swin_b swin_s swin_t swin_v2_b swin_v2_s swin_v2_t vgg11 vgg11_bn vgg13
    vgg13_bn vgg16 vgg16_bn vgg19 vgg19_bn vit_b_16 vit_b_32 vit_h_14 vit_l_16 vit_l_32 wide_resnet101_2 wide_resnet50_2
"""
TORCHVISION = frozenset(NAMES.split())
LIST_MODELS = "import torchvision.models as models; print(*models.list_models(module=models))"
LIST_S = 60.0
IMAGES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")  # what torchvision's ImageFolder takes
PHOTO_CLASS = "china"  # a subfolder that the photos always have


def problems_of_recipe(config: StudyConfig) -> list[str]:
    """Returns what would make a recipe's program fail at its start."""
    return [*_model(config), *_data(config)]


def _model(config: StudyConfig) -> list[str]:
    name = config.model.name
    if name is None or name in TORCHVISION:
        return []
    there = _models_of(config.program.python or sys.executable)
    if not there or name in there:  # without an answer the baseline will tell
        return []
    return [no_such("model.name", name, there, "classifier of torchvision")]


def _models_of(python: str) -> list[str]:
    """Returns the classifiers of the torchvision that an interpreter has; [] when it cannot say."""
    try:
        said = subprocess.run(
            [python, "-c", LIST_MODELS],
            cwd=program("vision.py").parent,  # as in a trial: no module of the working directory in between
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIST_S,
            check=True,
        )
    except (OSError, ValueError, subprocess.SubprocessError):
        return []
    return said.stdout.split()


def _data(config: StudyConfig) -> list[str]:
    name, root = config.data.name, config.data.root
    if root is None:
        wanted = "Give data.root=DIR, one subfolder per class."
        return [f"data.root: data=folder needs a folder, got nothing. {wanted}"] if name == "folder" else []
    if not root.strip() or "\0" in root:  # said already
        return []
    if name == "photos":
        return _photos(root)
    if name == "folder":
        return _folder(root, config.model.num_classes)
    return [f"data.root: means nothing with data={name}, got {shown(root)}. Leave it out, or give data=folder."]


def _photos(root: str) -> list[str]:
    is_free = not os.path.lexists(root) or (os.path.isdir(root) and next(_entries(root), None) is None)
    if is_free or os.path.isdir(os.path.join(root, PHOTO_CLASS)):
        return []
    yours = "Give a new or an empty folder; for your own images: data=folder."
    return [f"data.root: exists and holds no photos of ours, got {shown(root)}. {yours}"]


def _folder(root: str, num_classes: int) -> list[str]:
    wanted = "Give data.root=DIR with one subfolder of images per class."
    if not os.path.isdir(root):
        return [f"data.root: no such folder, got {shown(root)}. {wanted}"]
    classes = sorted(entry.name for entry in _entries(root) if entry.is_dir())
    if not classes:
        return [f"data.root: no subfolder in it, got {shown(root)}. {wanted}"]
    empty = [name for name in classes if not _has_image(os.path.join(root, name))]
    if empty:
        allowed = f"Allowed: files ending in {', '.join(IMAGES)}."
        return [f"data.root: no image in its subfolder {empty[0]!r}, got {shown(root)}. {allowed} Remove it or fill it."]
    if len(classes) > num_classes:
        return [f"model.num_classes: fewer than the {len(classes)} subfolders of {shown(root)}, got {num_classes}. Give more."]
    return []


def _has_image(folder: str, levels: int = 8) -> bool:
    """Returns whether there is an image, or may be one below `levels`; ends at the first, since a class may hold a million."""
    if levels == 0:
        return True
    below = []
    for entry in _entries(folder):
        if entry.is_dir():
            below.append(entry.path)
        elif entry.name.lower().endswith(IMAGES):
            return True
    return any(_has_image(path, levels - 1) for path in below)


def _entries(folder: str) -> Iterator[os.DirEntry[str]]:
    """Yields what a folder holds; nothing where it cannot be read."""
    try:
        with os.scandir(folder) as entries:
            yield from entries
    except OSError:
        return
