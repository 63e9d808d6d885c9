"""Lists the strategies that a replay compares, by name. To add one, add a row to STRATEGIES.

A strategy is the study's own search with some configuration keys set (`search.*`), or a rival that replaces it. Every
strategy can be varied on the command line as NAME:KEY=VALUE:KEY=VALUE, to measure what each part of a sampler contributes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import optuna

from autotune.config import yaml_file
from autotune.config.keys import LEAVES, check_value, unknown_key
from autotune.config.schema import SAMPLERS
from autotune.errors import BadInput, one_of
from autotune.replay.rivals import GridOrder, Ladder, RandomOrder, Sampled
from autotune.search.samplers import NUM_STARTUP_TRIALS
from autotune.trials.events import Searching
from autotune.trials.session import Session

SLOTS = "launch.slots"


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """One way to search.

    Attributes:
        name: its name.
        keys: configuration keys that it sets, with values.
        search: makes the rival that replaces the study's own search; None for the study's own.
    """

    name: str
    keys: dict[str, Any] = field(default_factory=dict)
    search: Callable[[Session], Searching] | None = None

    @property
    def num_slots(self) -> int:
        """How many search trials run in parallel. Whether they slow each other down is not measured first."""
        return int(self.keys.get(SLOTS, 1))


# After this many proposals of known configurations in a row, the GP strategy tries a random one. In a small space, the sampler
# would propose known configurations again and again, and each proposal takes half a second.
GP_PATIENCE = 5


def _tpe(seed: int, **options: Any) -> optuna.samplers.BaseSampler:
    return optuna.samplers.TPESampler(seed=seed, multivariate=True, constant_liar=True, **options)


_after_seeds = functools.partial(_tpe, n_startup_trials=NUM_STARTUP_TRIALS)


def _gp(seed: int) -> optuna.samplers.BaseSampler:
    return optuna.samplers.GPSampler(seed=seed)  # Optuna imports torch only here


# "default" is what `autotune run` does; "study-tpe" is TPE mixed with the expert's configurations and single changes.
STRATEGIES: dict[str, Strategy] = {
    strategy.name: strategy
    for strategy in (
        Strategy(name="default"),
        Strategy(name="study-tpe", keys={"search.sampler": "tpe"}),
        Strategy(name="random", search=RandomOrder),
        Strategy(name="grid", search=GridOrder),
        Strategy(name="expert", search=Ladder),
        Strategy(name="tpe", search=lambda session: Sampled(session, _tpe)),
        Strategy(name="tpe+seeds", search=lambda session: Sampled(session, _after_seeds, has_seeds=True)),
        Strategy(name="gp", search=lambda session: Sampled(session, _gp, patience=GP_PATIENCE)),
    )
}

# Parts of the study's search. The group "ablations" is the whole search and, for each part, the search without this part.
PARTS = ("search.seeds", "search.decomposition", "search.memory_model", "search.cost_aware", "search.stop", "measure.racing")
GROUPS = {"ablations": ("default", *(f"default:{key}=false" for key in PARTS))}


def names(text: str) -> tuple[str, ...]:
    """Returns the distinct names in a comma-separated list, with groups expanded."""
    words = [word.strip() for word in text.split(",")]
    return tuple(dict.fromkeys(name for word in words for name in GROUPS.get(word, (word,))))


def strategy(text: str) -> Strategy:
    """Returns the strategy for NAME or NAME:KEY=VALUE:...; NAME is a key of STRATEGIES or a value of `search.sampler`.

    Raises:
        BadInput: no such strategy, no such key, or an invalid value.
    """
    name, *words = text.split(":")
    found = STRATEGIES.get(name) or (Strategy(name=name, keys={"search.sampler": name}) if name in SAMPLERS else None)
    if found is None:
        raise BadInput(
            f"--sampler: no such strategy, got {name!r}. {one_of(name, dict.fromkeys([*STRATEGIES, *GROUPS, *SAMPLERS]))}"
        )
    keys = dict(found.keys)
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise BadInput(f"--sampler: no value, got {word!r}. Give NAME:KEY=VALUE, as in default:search.sampler=tpe.")
        if key not in LEAVES:
            raise BadInput(unknown_key(key, value))
        try:
            keys[key] = yaml_file.loaded(value)
        except ValueError as error:
            raise BadInput(f"--sampler: not a value of {key}, got {value!r:.80} ({error}). Give NAME:KEY=VALUE.") from error
        check_value(key, keys[key])
        if key == SLOTS and (found.search or not isinstance(keys[key], int) or keys[key] < 1):
            raise BadInput(f"--sampler: {SLOTS} must be at least 1, and only autotune's own search can use it, got {text!r}.")
    return Strategy(name=text, keys=keys, search=found.search)
