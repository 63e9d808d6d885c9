"""Predictions of peak memory.

The configurations of a class have the same values of all knobs that change the bytes of a sample or of the model. In a class,
the peak is about linear in the batch size.
"""

import itertools
import math

import pytest

from autotune.search.rates.memory import LEAST_CHANCE, MemoryModel, Peak

CAPACITY = 10_000.0


def bytes_of(batch, amp="off", compiled="off"):
    return 1000 + batch * (30 if amp == "off" else 18) * (1.1 if compiled != "off" else 1.0)


def peak(batch, amp="off", compiled="off", is_out=None):
    params = {"loader.batch_size": batch, "precision.amp": amp, "compile.mode": compiled}
    is_out = bytes_of(batch, amp, compiled) > CAPACITY if is_out is None else is_out
    return Peak(params=params, peak_bytes=None if is_out else bytes_of(batch, amp, compiled), is_out=is_out)


def test_two_batch_sizes_of_a_class_determine_its_memory_line():
    model = MemoryModel([peak(32), peak(128)], capacity_bytes=CAPACITY)
    for batch in (16, 64, 256, 300):
        share, spread = model.fraction(peak(batch).params)
        assert share == pytest.approx(bytes_of(batch) / CAPACITY, abs=0.05)
        assert spread < 0.1
    assert model.fits(peak(256).params)
    assert not model.fits(peak(512).params)


def test_each_class_has_its_own_line_and_an_unseen_class_is_uncertain():
    seen = [peak(32), peak(128), peak(32, "bf16"), peak(256, "bf16")]
    model = MemoryModel(seen, capacity_bytes=CAPACITY)
    assert model.fits(peak(448, "bf16").params)
    assert not model.fits(peak(448).params)
    assert model.fraction(peak(256, "bf16", "default").params)[1] > 3 * model.fraction(peak(256, "bf16").params)[1]


def test_batch_as_large_as_one_that_ran_out_of_memory_never_fits():
    small = [peak(8), peak(16)]
    out = peak(64, is_out=True)  # e.g. because other programs used the device; the model expects it to fit easily
    model = MemoryModel([*small, out], capacity_bytes=CAPACITY)
    assert not any(model.fits(peak(batch).params) for batch in (64, 128, 1024))
    assert model.fits(peak(16).params)


@pytest.mark.parametrize("capacity", [None, CAPACITY])
def test_out_of_memory_rules_out_larger_batches_only_within_its_class(capacity):
    model = MemoryModel([peak(32), peak(128, is_out=True)], capacity_bytes=capacity)
    for batch, amp in itertools.product((128, 256), ("off", "bf16")):
        assert model.is_known_out(peak(batch, amp).params) is (amp == "off")
    assert not model.is_known_out(peak(127).params)


@pytest.mark.parametrize(("key", "value"), [("backend.sdpa", "flash"), ("memory.allocator", "roundup_8")])
def test_out_of_memory_with_one_value_does_not_rule_out_other_values(key, value):
    def on_gpu(batch, value):
        return {"loader.batch_size": batch, key: value}

    out = Peak(params=on_gpu(128, value), peak_bytes=None, is_out=True)
    model = MemoryModel([Peak(params=on_gpu(32, "default"), peak_bytes=2000.0, is_out=False), out], capacity_bytes=CAPACITY)
    assert model.is_known_out(on_gpu(256, value))
    assert not model.is_known_out(on_gpu(256, "default"))
    assert model.chance(on_gpu(64, "default")) > LEAST_CHANCE


def test_uncertain_memory_line_rules_out_nothing_and_a_certain_one_does():
    """On a CPU, most of the memory may be in use before training, so small batches say little about large ones."""

    def on_cpu(batch):
        return Peak(params={"loader.batch_size": batch}, peak_bytes=0.95e9 + 2e5 * batch, is_out=False)

    unsure = MemoryModel([on_cpu(4), on_cpu(32)], capacity_bytes=1.1e9, is_cpu=True)
    assert LEAST_CHANCE < unsure.chance({"loader.batch_size": 512}) < 0.95
    sure = MemoryModel([on_cpu(4), on_cpu(32), on_cpu(512)], capacity_bytes=1.1e9, is_cpu=True)
    assert sure.chance({"loader.batch_size": 2048}) < LEAST_CHANCE


def test_loader_without_workers_shares_the_memory_of_the_step_only_on_a_cpu():
    def with_workers(workers, *, threads=1, is_out=False):
        params = {"loader.batch_size": 512, "loader.num_workers": workers, "threads.intra": threads}
        return Peak(params=params, peak_bytes=None if is_out else 0.96e9, is_out=is_out)

    out = with_workers(0, is_out=True)
    small = Peak(params={**out.params, "loader.batch_size": 32}, peak_bytes=0.9e9, is_out=False)
    on_cpu = MemoryModel([small, out], capacity_bytes=1.1e9, is_cpu=True)
    assert on_cpu.is_known_out(with_workers(0, threads=2).params)
    assert on_cpu.chance(with_workers(1).params) > 0.1
    assert MemoryModel([small, out], capacity_bytes=1.1e9).is_known_out(with_workers(1).params)
    full = MemoryModel([small, out, with_workers(1, threads=2)], capacity_bytes=0.97e9, is_cpu=True)
    assert full.fits(with_workers(2).params), "it needs no more than a configuration that did fit"


def test_largest_safe_batch_is_found_and_none_if_memory_is_ample():
    seen = [peak(32), peak(128)]
    params = peak(128).params
    assert MemoryModel(seen, capacity_bytes=CAPACITY).fills(params, [256, 512, 1024]) == 256
    assert MemoryModel(seen, capacity_bytes=100 * CAPACITY).fills(params, [256, 512, 1024]) is None
    assert MemoryModel(seen, capacity_bytes=None).fills(params, [256, 512, 1024]) is None


def test_out_of_memory_trial_raises_the_predicted_memory():
    before = MemoryModel([peak(32)], capacity_bytes=CAPACITY).fraction(peak(140).params)[0]
    after = MemoryModel([peak(32), peak(150, is_out=True)], capacity_bytes=CAPACITY).fraction(peak(140).params)[0]
    assert after > before


def test_model_without_trials_predicts_no_memory_and_rules_out_nothing():
    model = MemoryModel([], capacity_bytes=CAPACITY)
    assert math.isnan(model.fraction(peak(64).params)[0])
    assert model.fits(peak(64).params)


def test_host_memory_that_ran_out_on_a_gpu_does_not_count_as_the_gpus():
    def loaded(workers, prefetch, batch=64):
        return {"loader.batch_size": batch, "loader.num_workers": workers, "loader.prefetch_factor": prefetch}

    fitted = Peak(params={"loader.batch_size": 32, "loader.num_workers": 0}, peak_bytes=2000.0, is_out=False)
    out = Peak(params=loaded(8, 4), peak_bytes=None, is_out=True, is_host=True)
    model, without = (MemoryModel(peaks, capacity_bytes=CAPACITY) for peaks in ([fitted, out], [fitted]))
    assert all(model.is_known_out(params) for params in (loaded(8, 4), loaded(16, 8, batch=128)))
    less = [loaded(4, 4), loaded(8, 2), loaded(8, 4, batch=32), {"loader.batch_size": 256, "loader.num_workers": 0}]
    assert model.chances([*less, loaded(8, 4)]) == pytest.approx([*without.chances(less), 0.0])
    on_cpu = MemoryModel([fitted, out], capacity_bytes=CAPACITY, is_cpu=True)
    assert on_cpu.is_known_out(loaded(4, 4)), "it is the step's memory"
