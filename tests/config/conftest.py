"""Fixtures that compose configurations for a fixed machine, so that bounds are the same on every host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hydra.core.global_hydra import GlobalHydra

from autotune.config.compose import Composed, compose
from autotune.errors import BadInput

FACTS: dict[str, Any] = {"num_cores": 4, "isa": ["avx2"], "gpus": [], "has_compiler": True}
Make = Callable[..., Composed]


@pytest.fixture
def make() -> Make:
    def _make(*overrides: str, command: Sequence[str] | None = None, config_dirs: Sequence[Path] = ()) -> Composed:
        chosen = overrides if command is not None else ("model=resnet18", *overrides)
        return compose(chosen, command=command, config_dirs=config_dirs, facts=FACTS)

    return _make


@pytest.fixture
def refused(make: Make) -> Callable[..., list[str]]:
    """Returns a function that composes bad input and returns the reported problems."""

    def _refused(*overrides: str, **rest: Any) -> list[str]:
        with pytest.raises(BadInput) as caught:
            make(*overrides, **rest)
        return caught.value.problems

    return _refused


@pytest.fixture(autouse=True)
def _hydra_is_left_clean() -> Any:
    yield
    assert not GlobalHydra.instance().is_initialized()
