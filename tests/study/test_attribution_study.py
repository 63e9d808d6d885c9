"""Attribution through the real study loop, on a program whose effects are known: one knob +30 %, one +5 %, three nothing."""

import pytest

from autotune.testing.fake_launcher import Surface

GAINS = {"A": 1.30, "B": 1.05, "C": 1.0, "D": 1.0, "E": 1.0}
ALL = {f"env.{name}": "1" for name in GAINS}


def surface(noise_frac, **more):
    gains = {(f"env.{name}", "1"): gain for name, gain in GAINS.items()}
    return Surface(gains=gains, loader_per_s=1e9, noise_frac=noise_frac, start_s=2.0, window_s=3.0, **more)


class OnlyEverything:
    """A search that finds one configuration, with every knob turned: what a search that chased noise may end with."""

    def __init__(self, session):
        self._session = session

    def run(self):
        space = self._session.resolved
        if len(self._session.searched) == 1:
            self._session.measure(space.active({**space.reference, **ALL}), "everything", origin="expert")
        return "found"


@pytest.fixture
def planted(bench, tmp_path, monkeypatch):
    (tmp_path / "planted.yaml").write_text("".join(f"env.{name}: ['0', '1']\n" for name in GAINS))

    def made(noise_frac, *overrides, is_found=True, failures=lambda _, __: None, **more):
        if is_found:
            monkeypatch.setattr("autotune.study.loop.Search", OnlyEverything)
        for name in GAINS:
            monkeypatch.setenv(name, "0")
        return bench(surface(noise_frac, failures=failures), f"search_space={tmp_path / 'planted.yaml'}", *overrides, **more)

    return made


def holds_truth(entry):
    return entry["ci"] and entry["ci"][0] <= GAINS[entry["knob"].removeprefix("env.")] <= entry["ci"][1]


def is_right(summary):
    named = [(entry["knob"], entry["verdict"]) for entry in summary["attribution"]]
    return (
        named == [("env.A", "faster"), ("env.B", "faster")]
        and all(map(holds_truth, summary["attribution"]))
        and summary["best"]["overrides"] == {"env.A": "1", "env.B": "1"}
    )


@pytest.mark.parametrize("noise_frac", [0.01, 0.02])
def test_planted_effects_are_named_and_the_rest_goes_back_in_18_of_20_studies(planted, noise_frac):
    summaries = [planted(noise_frac, seed=seed, minutes=12).run() for seed in range(20)]
    wrong = [[summary["attribution"], summary["best"]["overrides"]] for summary in summaries if not is_right(summary)]
    assert len(wrong) <= 2, wrong
