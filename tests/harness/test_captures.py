"""Steps that a program captures as a CUDA graph and replays. The graphs are fakes, so no GPU is needed."""

import pytest

from autotune.harness.knobs.step import CAPTURED
from autotune.harness.protocol import NOT_APPLICABLE
from tests.harness.conftest import Trial


@pytest.mark.parametrize(("words", "source"), [(("loader",), "loader"), ((), "forward calls")])
def test_each_replay_of_a_captured_step_counts_as_a_step(trial: Trial, words: tuple[str, ...], source: str) -> None:
    run = trial("captured.py", *words)
    found = run.result()
    assert (found.status, found.error) == ("measured", None)
    assert "harness_problems" not in found.detected
    assert found.window is not None
    assert (found.unit, found.unit_source) == ("samples", source)
    assert found.window.samples == pytest.approx(16 * found.window.steps)
    losses = [float(line) for line in (run.folder / "losses.txt").read_text().splitlines()]
    assert found.detected["num_steps"] == 3 + len(losses) + 1  # the last replay ends the program
    assert found.loss is not None
    assert found.loss["is_finite"]
    assert found.loss["curve"][3:20] == pytest.approx(losses[:17])


def test_accumulation_is_not_applicable_to_captured_steps(trial: Trial) -> None:
    found = trial("captured.py", "loader", knobs={"step.accumulation": 2}).result()
    assert found.status == "measured"
    assert (found.knobs["step.accumulation"].status, found.knobs["step.accumulation"].reason) == (NOT_APPLICABLE, CAPTURED)
