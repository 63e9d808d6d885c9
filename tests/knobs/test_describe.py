"""The output of `autotune knobs [NAME]`."""

from __future__ import annotations

import shlex

import pytest

from autotune.config.domains import domain_of, parse
from autotune.errors import BadInput
from autotune.knobs import malloc
from autotune.knobs.base import HostContext
from autotune.knobs.catalogue import CATALOGUE, knob
from autotune.knobs.describe import describe, overview, page, uses
from autotune.knobs.values import value_of


@pytest.mark.parametrize("key", [*CATALOGUE, "env.LD_PRELOAD"])
def test_every_knob_renders(key: str) -> None:
    text = describe(key, HostContext(num_cores=2))
    assert text.startswith(f"# {key}\n")
    for part in ("When it helps", "When it hurts", "Start-up cost", "Tier", "Values", "On this machine", f"{key}="):
        assert part in text


def test_the_overview_has_a_row_for_every_knob_and_ends_with_the_environment() -> None:
    rows = [row for family in overview(HostContext(num_cores=2)).values() for row in family]
    assert sorted(row.key for row in rows) == sorted([*CATALOGUE, "env.NAME"])
    assert rows[-1].key == "env.NAME"
    assert all(row.brief and len(row.brief) <= 34 and row.tier for row in rows)
    assert {row.key: row.blocked for row in rows}["loader.pin_memory"]


@pytest.mark.parametrize("key", [*CATALOGUE, "env.SOME_SWITCH"])
def test_overrides_shown_for_a_knob_are_accepted(key: str) -> None:
    machine = HostContext(num_cores=2)
    for word, is_sweep in zip(uses(knob(key), machine), (False, True), strict=True):
        [typed] = shlex.split(word)
        override = parse(typed)
        assert override.is_sweep_override() is is_sweep
        if is_sweep:
            values = domain_of(knob(key), override, machine).values
            assert len(values) > 1, f"{key}: give the knob `examples`, its domain here has {values} only"
        else:
            value_of(knob(key), override.value(), machine)
        assert word in describe(key, machine)


def test_page_is_the_same_whatever_is_installed_or_set_here(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = set()
    for libraries, preloaded in (({}, ""), ({"jemalloc": "/usr/lib/libjemalloc.so.2"}, "/usr/lib/libtcmalloc.so.4")):
        monkeypatch.setattr(malloc, "installed", lambda found=libraries: found)
        monkeypatch.setenv("LD_PRELOAD", preloaded)
        pages.add(page({}))
    assert len(pages) == 1
    assert "A trial starts in a fresh interpreter if a value sets LD_PRELOAD." in pages.pop()


def test_description_names_the_search_spaces_that_contain_the_knob() -> None:
    spaces = {"default": ["compile.mode"], "full": ["compile.mode", "step.accumulation"], "memory": ["step.accumulation"]}
    assert "By default, and with search_space=full." in describe("compile.mode", spaces=spaces)
    assert "If you name it, or with search_space=full or memory." in describe("step.accumulation", spaces=spaces)
    assert "Only if you name it." in describe("threads.omp", spaces=spaces)


@pytest.mark.parametrize("name", ["precision.amps", "amp"])
def test_error_for_a_name_that_is_no_whole_key_suggests_the_nearest_key(name: str) -> None:
    with pytest.raises(BadInput, match=r"Did you mean 'precision\.amp'\? Allowed: precision\.amp, "):
        describe(name)
