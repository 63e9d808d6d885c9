import pytest

OVERRIDES = {
    "loader.num_workers": 4,
    "loader.pin_memory": True,
    "precision.amp": "off",
    "compile.mode": "reduce-overhead",
    "threads.omp": 2,
    "env.MALLOC_ARENA_MAX": "2",
}


@pytest.fixture
def summary():
    own = {"loader.num_workers": 0, "loader.batch_size": 64}
    exact = {"trial": 3, "value": 110.0, "ci": None, "overrides": {"loader.num_workers": 4}}
    best = {"trial": 7, "value": 180.0, "ci": [178.0, 182.0], "overrides": dict(OVERRIDES), "knobs": dict(OVERRIDES)}
    return {
        "study": "s", "title": "python train.py --out ${HOME}", "status": "complete", "objective": "throughput",
        "unit": "samples",
        "machine": {"cpu_model": "Fake CPU", "num_cores": 4, "gpus": [], "device": "cpu", "python": "3.11.7"},
        "baseline": {"trial": 0, "value": 100.0, "ci": [99.0, 101.0], "knobs": own},
        "best": best, "best_by_tier": {"exact": exact, "numerics": best, "training": best},
        "speedup": {"ratio": 1.8, "ci": [1.75, 1.85], "verdict": "faster", "reason": ""},
        "fingerprint": "abc", "versions": {"torch": "2.14.1", "autotune": "0.1.0"}, "started_at": 1_750_000_000.0,
        "pinned": {"loader.batch_size": 64}, "detected": {"optimizers": ["AdamW"], "world_size": 1},
        "trials": [{"number": 0, "value": 98.0}, {"number": 3, "value": 110.0}, {"number": 7, "value": 180.0}],
    }  # fmt: skip


@pytest.fixture
def changed(summary):
    """Returns a function that makes a summary whose best configuration has the given changes, on a given device."""

    def _changed(overrides, device="cpu", **more):
        summary["best"] |= {"overrides": overrides, "knobs": overrides}
        summary["machine"]["device"] = device
        return {**summary, "pinned": {}, **more}

    return _changed


@pytest.fixture
def forked(changed):
    """Returns the summary of a study on Python 3.14 whose best trial had to fork its added workers."""
    found = changed({"loader.num_workers": 2})
    found["best"]["worker_start"] = "fork"
    return found
