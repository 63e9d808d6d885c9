"""Trains with your own model, data or training step, and takes the other parts from a script next to this one.

    python custom.py --base vision.py --model-factory my_pkg.models:build --data synthetic
    python custom.py --base tabular.py --model-factory my.models:build --data-factory my.data:build --step my.train:step

Name each of your parts as PACKAGE.MODULE:FUNCTION. Modules in the working directory take precedence. Signatures must be:

    def build() -> torch.nn.Module                       # --model-factory
    def build() -> Dataset | DataLoader | Iterable       # --data-factory; the last two yield batches
    def step(model, batch) -> Tensor                     # --step: the loss of a batch that is already on the device

Without --step, a batch is either a pair (inputs, class indices), or a mapping of keyword arguments for a model whose result has
an attribute `loss`. Parts that are not given come from the script named by --base, which also defines the other options.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

sys.path.append(str(Path(__file__).parent))
import recipe_parts

BASES = ("vision.py", "text.py", "tabular.py")


def load_base(script: str) -> ModuleType:
    """Returns a script of this folder as a module, under a name that does not clash with your modules."""
    path = Path(__file__).with_name(script)
    spec = importlib.util.spec_from_file_location(f"recipe_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be loaded")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def named(reference: str) -> Callable[..., Any]:
    """Returns the function that a reference PACKAGE.MODULE:FUNCTION names.

    Raises:
        ValueError: there is no such function; the error says why.
    """
    where, _, name = reference.partition(":")
    try:
        module = importlib.import_module(where)
    except ModuleNotFoundError as error:
        if error.name and (where == error.name or where.startswith(f"{error.name}.")):
            raise ValueError(f"no module {error.name!r} in {os.getcwd()} or among the installed packages") from error
        raise ValueError(f"its module needs another module, which is missing: {error}") from error
    except Exception as error:
        raise ValueError(f"its module cannot be imported: {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if function is None:
        near = difflib.get_close_matches(name, [each for each in vars(module) if callable(getattr(module, each))], n=3)
        file = getattr(module, "__file__", None) or where  # modules that are built in have no file
        raise ValueError(f"no {name!r} in {file}" + (f"; nearest: {', '.join(near)}" if near else ""))
    if not callable(function):
        raise ValueError(f"not a function but a {type(function).__name__}")
    return function


def default_step(model: nn.Module, batch: Any) -> Tensor:
    """Returns the model's own loss if the batch is a mapping of arguments, or the cross-entropy if it is a pair."""
    if isinstance(batch, Mapping):
        return model(**batch).loss
    if isinstance(batch, (list, tuple)) and len(batch) == 2:
        return recipe_parts.cross_entropy(model, batch)
    raise TypeError(f"a batch is neither a mapping nor a pair but a {type(batch).__name__}: give --step")


def build_model(own: argparse.Namespace, base: ModuleType, options: argparse.Namespace) -> nn.Module:
    """Returns your model, or the script's model if you give none.

    Raises:
        TypeError: your model is not a module.
    """
    if own.model_factory is None and own.base == "vision.py":
        return base.build_model(options.model, options.num_classes, options.image_size, options.source)
    if own.model_factory is None:
        return base.build_model(options)
    model = named(own.model_factory)()
    if not isinstance(model, nn.Module):
        raise TypeError(f"{own.model_factory} returns a {type(model).__name__}, not a torch.nn.Module")
    return model


def build_batches(
    own: argparse.Namespace, base: ModuleType, options: argparse.Namespace, device: torch.device
) -> Iterable[Any]:
    """Returns the batches of an epoch: from your data set, from your loader, or from the script."""
    if own.data_factory is None:
        return base.build_batches(options, device)
    data = named(own.data_factory)()
    if not isinstance(data, Dataset):
        return data
    return recipe_parts.build_loader(data, options)


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of this script's own options."""
    # Without allow_abbrev=False, the base script's option --model would be taken for an abbreviation of --model-factory.
    parser = argparse.ArgumentParser(description="Trains with your own parts.", add_help=False, allow_abbrev=False)
    parser.add_argument("--base", choices=BASES, default="tabular.py", help="script that provides all other parts")
    parser.add_argument("--model-factory", metavar="MODULE:FUNCTION")
    parser.add_argument("--data-factory", metavar="MODULE:FUNCTION")
    parser.add_argument("--step", metavar="MODULE:FUNCTION")
    parser.add_argument("--check", nargs="+", metavar="MODULE:FUNCTION", help="check these parts without training")
    return parser


def wrong_parts(references: Iterable[str], own: argparse.Namespace) -> list[str]:
    """Returns "REFERENCE: what is wrong" for each part that does not exist or has an unsuitable signature."""
    calls = {own.model_factory: "()", own.data_factory: "()", own.step: "(model, batch)"}
    found = []
    for reference in references:
        try:
            function = named(reference)
            if reference in calls:
                check_call(function, calls[reference])
        except ValueError as error:
            found.append(f"{reference}: {' '.join(str(error).split())}")
    return found


def check_call(function: Callable[..., Any], call: str) -> None:
    """Checks that a function accepts the arguments in `call`, such as "(model, batch)"; a built-in without a signature passes.

    Raises:
        ValueError: the function cannot be called like this; the error says why.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a built-in function
        return
    try:
        signature.bind(*call.strip("()").replace(",", " ").split())
    except TypeError as error:
        raise ValueError(f"it is called as {call}: {error}") from error


def main() -> None:
    """Reads the command line and trains."""
    parser = build_parser()
    own, rest = parser.parse_known_args()
    sys.path[0] = os.getcwd()  # instead of this folder, so that imports find your modules
    parts = own.check or [each for each in (own.model_factory, own.data_factory, own.step) if each]
    if wrong := wrong_parts(parts, own):
        parser.exit(2, "\n".join([*wrong, ""]))
    if own.check:
        return
    base = load_base(own.base)
    options = base.build_parser().parse_args(rest)

    def start(device: torch.device) -> None:
        batches = build_batches(own, base, options, device)
        step = named(own.step) if own.step else default_step
        recipe_parts.train(options, device, batches, build_model(own, base, options), step)

    recipe_parts.run(parser, options, start)


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":  # in a spawned loader worker, which unpickles a data set of the base script
    load_base(build_parser().parse_known_args()[0].base)
