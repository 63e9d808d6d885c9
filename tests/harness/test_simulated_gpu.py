"""Trials on a GPU that the program simulates: the host runs ahead of the simulated GPU, and no real one is needed."""

import dataclasses
import json
from typing import Any

import pytest

from autotune.harness.explain import documents
from autotune.harness.explain.documents import BACKWARD, FORWARD, LINES, OPTIMIZER, OTHER, TRANSFER
from tests.harness.conftest import RULES, Trial

BATCH, STEP_S = 16, 0.020
ACCUMULATED_S = 4 * 0.018 + 0.002  # forward and backward pass of four batches, and an update
PROGRAM = "simulated_gpu.py"


@pytest.mark.parametrize("words", [(), ("host",)])
def test_rate_is_that_of_the_device_and_excludes_the_first_step_after_a_wait(trial: Trial, words: tuple[str, ...]) -> None:
    for _ in range(3):  # a pause of the machine can make one window too slow, but hardly three in a row
        found = trial(PROGRAM, *words, rules=dataclasses.replace(RULES, min_s=0.4)).result()
        if found.window is None or found.window.rate_per_s == pytest.approx(BATCH / STEP_S, rel=0.005):
            break
    assert (found.status, found.error, found.detected["device"]) == ("measured", None, "cuda")
    assert "harness_problems" not in found.detected
    assert found.window is not None
    assert found.window.rate_per_s == pytest.approx(BATCH / STEP_S, rel=0.005)
    assert (found.facts["device_uuids"], found.memory["peak_bytes"]) == (["GPU-1"], 800)


def test_waits_for_each_of_several_batches_do_not_slow_down_the_device(trial: Trial) -> None:
    for _ in range(3):  # as above
        found = trial(PROGRAM, "accumulates", rules=dataclasses.replace(RULES, warmup_max_s=6.0, min_s=0.8)).result()
        assert (found.status, found.error) == ("measured", None)
        assert found.device_rate_per_s is not None
        if found.device_rate_per_s == pytest.approx(4 * BATCH / ACCUMULATED_S, rel=0.1):
            break
    assert found.device_rate_per_s == pytest.approx(4 * BATCH / ACCUMULATED_S, rel=0.1)


@pytest.mark.parametrize("words", [(), ("copies",)])
def test_phases_are_timed_on_the_device_without_synchronisation(trial: Trial, words: tuple[str, ...]) -> None:
    for _ in range(3):  # as above
        run = trial(PROGRAM, *words, mode="explain", explain=LINES, max_s=0.7)
        assert run.result().status == "measured"
        found: dict[str, Any] = json.loads((run.folder / documents.document_file(LINES, 0)).read_text())
        phases_s, step_s = found["device_phases_s"], found["seconds"] / found["steps"]
        own_s = [phases_s[phase] for phase in (FORWARD, BACKWARD, OPTIMIZER)]
        if own_s == pytest.approx([0.006, 0.012, 0.002], abs=0.0006) and phases_s[TRANSFER] + phases_s[OTHER] < 0.05 * step_s:
            break
    assert own_s == pytest.approx([0.006, 0.012, 0.002], abs=0.0006)
    assert 0.0 <= phases_s[TRANSFER] + phases_s[OTHER] < 0.05 * step_s
    assert min(phases_s.values()) >= 0.0
    assert sum(phases_s.values()) == pytest.approx(step_s, rel=0.02)
    assert "synchronize" not in [site["kind"] for site in found["syncs"]]
    assert found["samples"] == pytest.approx(BATCH * found["steps"])
