"""The attribution benchmark judges which planted effects a study found."""

import pytest

from tests.benchmarks import attribution


@pytest.mark.thorough
def test_a_simulated_study_finds_the_large_effects(capsys):
    status = attribution.simulated(1, minutes=8, noise=0.005, seed=0)
    printed = capsys.readouterr().out
    rows = {line.split("|")[1].strip(): line for line in printed.splitlines() if "1 of 1" in line or "0 of 1" in line}
    assert set(rows) == set(attribution.GAINS)
    assert rows["A"].count("1 of 1") == 2, printed  # exported, and named
    assert status == 0, printed


def test_mistakes_lists_unnamed_large_effects_and_exported_knobs_without_effect():
    entries = [{"knob": f"env.PLANT_{name}", "verdict": "faster", "ratio": 1.3, "ci": (1.2, 1.4)} for name in "AD"]
    summary = {"attribution": entries[:1], "minimality": {"dropped": entries[1:]}, "best": {"overrides": {"env.PLANT_D": "1"}}}
    assert [line.split()[0] for line in attribution.mistakes(summary)] == ["D", "B"]
    assert [(row[0], row[-1]) for row in attribution.rows(summary)] == [("A", "kept"), ("D", "put back")]
