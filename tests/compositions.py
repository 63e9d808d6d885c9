"""Makes compositions faster in tests: copies one composition of Hydra and sets the values in the copy as Hydra does.

A full composition takes a tenth of a second, mostly for files that never change. `tests/config/test_compose.py` tests full
compositions.
"""

import copy
import functools
from collections.abc import Callable

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from autotune.config import compose
from autotune.config.keys import LEAVES
from autotune.config.overrides import Split
from autotune.masking import Secrets

in_full: Callable[[Split], DictConfig] = compose._hydra
yaml_in_full: Callable[[DictConfig, Secrets], str] = compose._yaml
parsed = functools.cache(OverridesParser.create().parse_override)  # parsing KEY=VALUE takes a millisecond
_known: dict[str, DictConfig] = {}


def copied(given: Split) -> DictConfig:
    """Returns what Hydra would compose from `given`."""
    values = [text for text in given.hydra if text.partition("=")[0] in LEAVES]
    rest = Split(hydra=[text for text in given.hydra if text not in values], files=given.files)
    key = repr((rest.hydra, rest.files))
    try:
        if key not in _known:
            _known[key] = in_full(rest)
        made = copy.deepcopy(_known[key])
        for override in map(parsed, values):
            OmegaConf.update(made, override.key_or_group, override.value(), merge=True)
    except Exception:
        if not values:
            raise
        return in_full(given)  # reports what is wrong
    return made


class _Dumper(yaml.Dumper):
    """Writes texts as OmegaConf does."""


class _FastDumper(getattr(yaml, "CDumper", yaml.Dumper)):
    """The same by libyaml, which escapes some characters that are not ASCII."""


def _write_text(dumper: yaml.Dumper, text: str) -> yaml.ScalarNode:
    """Quotes what looks like a number or a truth value."""
    try:
        float(text)
    except ValueError:
        looks_so = text.lower() in ("y", "n")
    else:
        looks_so = True
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="'" if looks_so else None)


for _each in (_Dumper, _FastDumper):
    _each.add_representer(str, _write_text)


def yaml_of(raw: DictConfig, secrets: Secrets) -> str:
    """Returns what `compose._yaml` returns, without making a second composition."""
    made = secrets.document(OmegaConf.to_container(raw, resolve=False, enum_to_str=True))
    dumper = _FastDumper if repr(made).isascii() else _Dumper
    return yaml.dump(made, default_flow_style=False, allow_unicode=True, sort_keys=False, Dumper=dumper)
