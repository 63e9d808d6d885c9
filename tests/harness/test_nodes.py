"""What a rank must know if there are several nodes: its number, the tuner's clock, and how early to announce the last step."""

import json
import os
import time
from types import SimpleNamespace

import pytest

from autotune.harness import last_step
from autotune.harness.last_step import Announcement, num_ahead
from autotune.harness.peers import Peers
from autotune.harness.process import num_nodes
from autotune.harness.protocol import Spec, clock_offset_s, place_of
from tests.harness.contexts import context

TWO_NODES = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "2"}


@pytest.mark.parametrize(
    ("environment", "place", "spread"),
    [
        ({}, None, False),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, (1, 2), False),
        ({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", **TWO_NODES}, (1, 4), True),
        (TWO_NODES, (3, 8), True),
        ({**TWO_NODES, "SLURM_STEP_NUM_NODES": "1"}, (3, 8), False),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, None, False),  # a batch script, which is not a rank
        ({"RANK": "first", "WORLD_SIZE": "2"}, None, False),
    ],
)
def test_rank_and_number_of_nodes_are_read_from_the_variables_of_the_launcher(environment, place, spread):
    assert (place_of(environment), num_nodes(environment) > 1) == (place, spread)


def test_clock_offset_to_another_machine_is_computed_from_the_time_of_day():
    here_s = time.time() - time.monotonic()
    specs = [Spec(trial=0, nonce="", folder="", epoch_s=epoch_s) for epoch_s in (None, here_s, here_s + 1000)]
    offsets_s = [clock_offset_s(spec) for spec in specs]
    assert offsets_s[:2] == [0.0, 0.0]
    assert offsets_s[2] == pytest.approx(-1000, abs=0.1)


def test_last_step_is_announced_earlier_on_several_nodes(monkeypatch):
    ends_s = SimpleNamespace(steps={"end_s": [0.07 * n for n in range(20)]})
    made = context(clock=SimpleNamespace(run_ahead=1), window=ends_s)
    assert num_ahead(made) == 3
    for name, value in TWO_NODES.items():
        monkeypatch.setenv(name, value)
    assert num_ahead(made) == 3 + 5


def test_announcement_is_read_from_the_store_if_its_file_is_not_visible(monkeypatch, tmp_path):
    told = {}
    store = SimpleNamespace(set=told.__setitem__, check=lambda keys: keys[0] in told, get=lambda key: told[key].encode())
    monkeypatch.setattr(last_step, "_store", lambda: store)
    for name, value in TWO_NODES.items():
        monkeypatch.setenv(name, value)
    first, second = (Announcement(context(spec={"folder": str(tmp_path / name)}), "stop.json") for name in "ab")
    (tmp_path / "a").mkdir()
    assert second.heard() is None
    first.tell(12)
    second._next_s = 0.0
    assert second.heard() == 12
    assert first.heard() == 12  # from the file


def test_a_second_rank_0_ends_its_program_only_if_it_is_on_another_node(tmp_path):
    gave_up = []
    ending = SimpleNamespace(give_up=gave_up.append)
    made = context(spec={"folder": str(tmp_path)}, ending=ending, pid=7)
    Peers(made).lead()
    Peers(made).lead()  # torchrun has started it anew
    assert gave_up == []
    (tmp_path / "peer.leader.json").write_text(json.dumps({"host": "n2", "pid": 7}))
    Peers(made).lead()
    (why,) = gave_up
    assert f"there is a rank 0 on n2 and one on {os.uname().nodename}" in why
