"""Builds the command line of a recipe's script. Checks beforehand that model and data exist and fit together."""

from __future__ import annotations

import operator
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from autotune.config.keys import LEAVES, no_such
from autotune.config.locate import program
from autotune.config.schema import DATA, StudyConfig
from autotune.errors import one_of
from autotune.knobs.values import shown
from autotune.records import COST, TIME, objective_names

# Classifiers of torchvision 0.19. Other names are looked up in the recipe's own torchvision, which takes seconds.
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
LIST_MODELS = {
    "torchvision": "import torchvision.models as models; print(*models.list_models(module=models))",
    "timm": "import timm; print(*timm.list_models())",
}
HAS_TRANSFORMERS = "import importlib.util, sys; sys.exit(importlib.util.find_spec('transformers') is None)"
LIST_S = 60.0  # time limit for listing a library's models
CHECK_S = 120.0  # time limit for importing the user's own model, data or step, with all imports of their modules
REFERENCE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
PART_FORM = "Allowed: PACKAGE.MODULE:FUNCTION, searched for in the working directory first. Give one that exists."
IMAGES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")  # file types of torchvision's ImageFolder
PHOTO_CLASS = "china"  # a subfolder that the built-in photos always have
TEXTS = (".txt", ".md", ".rst", ".py")  # file types that the text program reads


@dataclass(frozen=True, kw_only=True)
class Script:
    """A built-in training script.

    Attributes:
        name: file of the script.
        data: data that the script can train on, the default first.
        flags: options of the script -> configuration keys.
        print_every: default number of steps between two printed lines.
    """

    name: str
    data: tuple[str, ...]
    flags: dict[str, str]
    print_every: int = 10


# Options of every built-in script -> configuration keys.
EVERYWHERE = {
    "--epochs": "train.epochs", "--lr": "train.lr", "--optimizer": "train.optimizer",
    "--samples-per-epoch": "train.samples_per_epoch", "--seed": "study.seed", "--device": "device.kind",
}  # fmt: skip
VISION = Script(
    name="vision.py",
    data=("photos", "fake_cifar", "folder", "synthetic"),
    flags={
        "--model": "model.name", "--num-classes": "model.num_classes", "--image-size": "model.image_size",
        "--data": "data.name", "--data-root": "data.root",
    },
)  # fmt: skip
TEXT = Script(
    name="text.py",
    data=("text", "synthetic"),
    flags={
        "--model": "model.name", "--num-layers": "model.num_layers", "--hidden-size": "model.hidden_size",
        "--num-heads": "model.num_heads", "--vocab-size": "model.vocab_size",
        "--data": "data.name", "--data-root": "data.root", "--sequence-length": "data.sequence_length",
    },
)  # fmt: skip
TABULAR = Script(
    name="tabular.py",
    data=("tabular", "synthetic"),
    flags={
        "--model": "model.name", "--num-layers": "model.num_layers", "--hidden-size": "model.hidden_size",
        "--num-classes": "model.num_classes", "--data": "data.name", "--num-features": "data.num_features",
    },
    print_every=100,
)  # fmt: skip
SCRIPTS = {"torchvision": VISION, "timm": VISION, "transformers": TEXT, "builtin": TABULAR}
MODELS = {"transformers": ("gpt2_small", "bert_base", "llama_small"), "builtin": ("mlp",)}
PARTS = {"--model-factory": "model.factory", "--data-factory": "data.factory", "--step": "train.step"}  # the user's own code
CUSTOM = "custom.py"
TRIAL_EPOCHS = 1_000_000  # default, so large that a trial ends when its measurement is complete, not when its data are used up
HEAD_SIZE = 64  # hidden_size / num_heads of a language model if num_heads is not set


def is_recipe(config: StudyConfig) -> bool:
    """Returns whether a configuration names a model to train."""
    return config.model.name is not None or config.model.factory is not None


def parts_of(config: StudyConfig) -> dict[str, str]:
    """Returns key -> PACKAGE.MODULE:FUNCTION for each part (model, data, step) that is the user's own code."""
    found = {key: _value(config, key) for key in PARTS.values()}
    return {key: str(value) for key, value in found.items() if value is not None}


def script_of(config: StudyConfig) -> Script:
    """Returns the built-in script of a recipe.

    If only some parts are the user's own code, this script supplies the others. The model's name decides which script it is. If
    the model has no name, the data decide.
    """
    if config.model.name is not None:
        return SCRIPTS.get(config.model.source, VISION)  # `checks.problems_of` rejects unknown sources
    if config.data.factory is not None:
        return TABULAR  # needs only torch
    return next((script for script in (TEXT, TABULAR) if config.data.name == script.data[0]), VISION)


def words_of(config: StudyConfig) -> list[str]:
    """Returns the script of a recipe and its options."""
    script, parts = script_of(config), parts_of(config)
    flags = {flag: _value(config, key) for flag, key in {**script.flags, **EVERYWHERE}.items()}
    flags["--epochs"] = config.train.epochs or TRIAL_EPOCHS
    if script is VISION and config.model.source == "timm":
        flags["--source"] = "timm"
    if script is TEXT and config.data.name != "text":
        flags.pop("--data-root")
    if "data.factory" in parts:
        flags.pop("--data")
    own = {"--base": script.name, **{flag: parts.get(key) for flag, key in PARTS.items()}} if parts else {}
    given = [text for flag, value in {**own, **flags}.items() if value is not None for text in (flag, str(value))]
    return [str(program(CUSTOM if parts else script.name)), *given]


def tokens_per_sample(config: StudyConfig) -> int | None:
    """Returns the tokens per sample if a recipe's rate is reported in tokens; None if it is reported in samples.

    Even a language model's rate is reported in samples if the objective is computed from a number of samples.
    """
    is_text = is_recipe(config) and script_of(config) is TEXT and config.data.factory is None
    by_samples = {TIME, COST} & set(objective_names(config.objective))
    return config.data.sequence_length if is_text and not by_samples else None


def _value(config: StudyConfig, key: str) -> object:
    return operator.attrgetter(key)(config)


def problems_of_recipe(config: StudyConfig) -> list[str]:
    """Returns the problems that would make a recipe's program fail at start."""
    if config.model.source not in SCRIPTS or config.data.name not in DATA:  # reported by checks.py
        return []
    return [*_fitting(config), *_data(config)] or _model(config)


def _model(config: StudyConfig) -> list[str]:
    name, source = config.model.name, config.model.source
    if name is None or config.model.factory is not None:
        return []
    if source in MODELS and name not in MODELS[source]:
        return [no_such("model.name", name, MODELS[source], f"model of {source}")]
    python = config.program.python or sys.executable
    if source == "transformers":
        there = _ask(python, HAS_TRANSFORMERS)
        return [_missing(source, python)] if there is not None and there.returncode == 1 else []
    if source == "builtin" or (source == "torchvision" and name in TORCHVISION):
        return []
    said = _ask(python, LIST_MODELS[source])
    if source == "timm" and said is not None and "No module named 'timm'" in said.stderr:
        return [_missing(source, python)]
    there_are = said.stdout.split() if said is not None and said.returncode == 0 else []
    if not there_are or name in there_are:  # without a list, an unknown model is noticed only when the baseline fails
        return []
    return [no_such("model.name", name, there_are, f"classifier of {source}")]


def _missing(source: str, python: str) -> str:
    install = f"{shlex.quote(python)} -m pip install {source}"
    return f"model.source: {source} is not installed where the recipe runs, got {shown(source)}. Install it: {install}"


def _ask(python: str, code: str) -> subprocess.CompletedProcess[str] | None:
    """Runs a line of code in an interpreter and returns the finished process; None if it cannot be run."""
    try:
        return _run([python, "-c", code], program(VISION.name).parent, LIST_S)  # as in a trial: no modules from the cwd
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def _run(words: list[str], cwd: Path, limit_s: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words, cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=limit_s
    )


def problems_of_parts(config: StudyConfig) -> list[str]:
    """Returns what is wrong with the references to the user's code, which the recipe's interpreter imports for this check."""
    parts = parts_of(config)
    wrong = [
        f"{key}: not a reference to a function, got {shown(reference)}. {PART_FORM}"
        for key, reference in parts.items()
        if not REFERENCE.fullmatch(reference)
    ]
    if wrong or not parts:
        return wrong
    said = _why_unusable(config.program.python or sys.executable, parts)
    return [
        f"{key}: cannot be used, got {shown(reference)} ({said[reference]}). {PART_FORM}"
        for key, reference in parts.items()
        if reference in said
    ]


def _why_unusable(python: str, parts: dict[str, str]) -> dict[str, str]:
    """Returns reference -> problem, as reported by the recipe's script; {} if the interpreter cannot be started."""
    references = list(parts.values())
    called = [word for flag, key in PARTS.items() if key in parts for word in (flag, parts[key])]
    try:
        done = _run([python, str(program(CUSTOM)), *called, "--check", *references], Path.cwd(), CHECK_S)
    except subprocess.TimeoutExpired:
        return dict.fromkeys(references, f"importing it takes more than {CHECK_S:.0f} s")
    except (OSError, ValueError):  # `checks.problems_of` reports an interpreter that does not exist
        return {}
    lines = done.stderr.splitlines()
    found = {each: line.removeprefix(f"{each}: ") for each in references for line in lines if line.startswith(f"{each}: ")}
    if done.returncode and not found:
        last = lines[-1].strip() if lines else "no output"
        return {references[0]: f"importing it ended Python with exit code {done.returncode}: {last}"}
    return found


def _fitting(config: StudyConfig) -> list[str]:
    """Returns problems of parts that do not fit together: two models, the wrong kind of data, sizes the model does not have."""
    if not is_recipe(config):
        return []
    if config.model.name is not None and config.model.factory is not None:
        got = f"got {shown(config.model.factory)} and model.name={config.model.name}"
        return [f"model.factory: two models are given, {got}. Leave out model=."]
    script, default = script_of(config), StudyConfig()
    what = config.model.name or config.model.factory
    if config.data.factory is None and config.data.name not in script.data:
        allowed = one_of(config.data.name, script.data)
        return [
            f"data.name: {what} cannot train on this data, got {shown(config.data.name)}. {allowed} Give data={script.data[0]}."
        ]
    used = {*script.flags.values(), *EVERYWHERE.values(), *PARTS.values(), "model.source", "train.global_batch"}
    problems = [
        f"{key}: has no effect with {what} on {config.data.factory or config.data.name}, got {shown(_value(config, key))}. "
        "Leave it out."
        for key in LEAVES
        if key.split(".")[0] in ("model", "data", "train") and key not in (used | {"data.root"})
        if _value(config, key) != _value(default, key)
    ]
    return [*problems, *(_heads(config) if script is TEXT else [])]


def _heads(config: StudyConfig) -> list[str]:
    hidden = config.model.hidden_size
    heads = config.model.num_heads or max(1, (hidden or 768) // HEAD_SIZE)
    if (hidden or 768) % (2 * heads) == 0:
        return []
    key, got = ("model.num_heads", heads) if hidden is None else ("model.hidden_size", hidden)
    why = "" if config.model.num_heads else f" ({heads}, one for each {HEAD_SIZE} of width, as model.num_heads is not set)"
    return [
        f"{key}: the width, {hidden or 768}, must be a multiple of {2 * heads}, twice the number of attention heads{why}, "
        f"got {got}. Give another number."
    ]


def _data(config: StudyConfig) -> list[str]:
    name, root = config.data.name, config.data.root
    if config.data.factory is not None:
        return [f"data.root: has no effect with data.factory, got {shown(root)}. Leave it out."] if root is not None else []
    if root is None:
        wanted = "Give data.root=DIR, one subfolder per class."
        return [f"data.root: not set, but data=folder needs a folder. {wanted}"] if name == "folder" else []
    if not root.strip() or "\0" in root:  # reported by checks.py
        return []
    if name == "photos":
        return _photos(root)
    if name == "folder":
        return _folder(root, config.model.num_classes)
    if name == "text":
        return _texts(root)
    return [f"data.root: has no effect with data={name}, got {shown(root)}. Leave it out, or give data=folder."]


def _texts(root: str) -> list[str]:
    if os.path.isdir(root) and any(name.endswith(TEXTS) for _, _, names in os.walk(root) for name in names):
        return []
    return [f"data.root: no folder with text in it, got {shown(root)}. Give one with files ending in {', '.join(TEXTS)}."]


def _photos(root: str) -> list[str]:
    is_free = not os.path.lexists(root) or (os.path.isdir(root) and next(_entries(root), None) is None)
    if is_free or os.path.isdir(os.path.join(root, PHOTO_CLASS)):
        return []
    yours = "Give a new or an empty folder; for your own images: data=folder."
    return [f"data.root: exists, but does not contain the built-in photos, got {shown(root)}. {yours}"]


def _folder(root: str, num_classes: int) -> list[str]:
    wanted = "Give data.root=DIR with one subfolder of images per class."
    if not os.path.isdir(root):
        return [f"data.root: no such folder, got {shown(root)}. {wanted}"]
    classes = sorted(entry.name for entry in _entries(root) if entry.is_dir())
    if not classes:
        return [f"data.root: no subfolder in it, got {shown(root)}. {wanted}"]
    empty = [name for name in classes if not _has_image(os.path.join(root, name))]
    if empty:
        allowed = f"Allowed: files ending in {', '.join(IMAGES)}. Delete this subfolder, or put images into it."
        return [f"data.root: no image in its subfolder {empty[0]!r}, got {shown(root)}. {allowed}"]
    if len(classes) > num_classes:
        return [f"model.num_classes: fewer than the {len(classes)} subfolders of {shown(root)}, got {num_classes}. Give more."]
    return []


def _has_image(folder: str, levels: int = 8) -> bool:
    """Returns whether a folder contains an image. Folders below `levels` levels are assumed to contain one.

    Stops at the first image, because a class may have a million images.
    """
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
    """Yields the entries of a folder; nothing if it cannot be read."""
    try:
        with os.scandir(folder) as entries:
            yield from entries
    except OSError:
        return
