"""What a step is, and what it holds."""

import pytest

from tests.harness.conftest import Trial


@pytest.mark.parametrize(
    ("kind", "samples", "source"),
    [
        ("without_loader", 14, "forward calls"),
        pytest.param("rebuilt_optimizer", 12, "loader", marks=pytest.mark.thorough),
    ],
)
def test_samples_of_a_step_are_counted_once(trial: Trial, kind: str, samples: int, source: str) -> None:
    found = trial("kinds.py", kind).result()
    assert found.status == "measured"
    assert (found.unit, found.unit_source) == ("samples", source)
    assert set(found.steps["samples"][3:]) - {65 * samples} == {samples}  # 65: an optimizer that took over


def test_a_step_without_any_batch_counts_as_a_step(trial: Trial) -> None:
    found = trial("kinds.py", "without_batch").result()
    assert (found.status, found.unit) == ("measured", "steps")
    assert set(found.steps["samples"]) == {1}


@pytest.mark.parametrize("flags", [(), ("fused",)])
@pytest.mark.thorough
def test_iterations_that_a_scaler_skips_are_iterations(trial: Trial, flags: tuple[str, ...]) -> None:
    found = trial("kinds.py", "scaler", *flags).result()
    assert (found.status, found.detected["num_steps"]) == ("ended", 5)
    assert set(found.steps["samples"]) == {12}
    skipped = 0 if flags else 2  # a fused optimizer skips inside itself: its scale tells
    assert found.scaling == {"scale": 0.5, "skipped": skipped, "skipped_in_window": skipped}
