"""Compositions in tests: what Hydra has composed once is copied, and values are put into the copy as Hydra puts them.

A composition takes a tenth of a second, most of it for files that are always the same. `tests/config/test_compose.py` has them
made in full.
"""

import copy
from collections.abc import Callable

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from autotune.config import compose
from autotune.config.keys import LEAVES
from autotune.config.overrides import Split

in_full: Callable[[Split], DictConfig] = compose._hydra
_known: dict[str, DictConfig] = {}


def copied(given: Split) -> DictConfig:
    """Returns what Hydra composes of `given`."""
    values = [text for text in given.hydra if text.partition("=")[0] in LEAVES]
    rest = Split(hydra=[text for text in given.hydra if text not in values], files=given.files)
    key = repr((rest.hydra, rest.files))
    try:
        if key not in _known:
            _known[key] = in_full(rest)
        made = copy.deepcopy(_known[key])
        for override in OverridesParser.create().parse_overrides(values):
            OmegaConf.update(made, override.key_or_group, override.value(), merge=True)
    except Exception:
        return in_full(given)  # which says what is wrong
    return made
