"""The sampler `rates` in whole studies, on the fake launcher."""

import re
from types import SimpleNamespace

import optuna
import pytest

from autotune.records import Kind, Tier
from autotune.search.rates import RatesSampler
from autotune.study import proposals, resume_study
from autotune.study.initial import Proposal, expert_seeds
from autotune.study.proposals import ANSWER_FIRST, NO_IMPROVEMENT, Search
from autotune.study.search_budget import ANSWER_AFTER, SearchBudget
from tests.study.conftest import MACHINE, RATES
from tests.support.fake_launcher import DEFAULTS, Failure, Surface
from tests.support.records import a_trial

GPU = {**MACHINE, "gpus": [{"name": "Fake GPU", "uuid": "GPU-1", "memory_bytes": 8 * 2**30, "has_energy_counter": True,
                            "has_power_reading": True}]}  # fmt: skip
H200 = {"name": "NVIDIA H200", "memory_bytes": 150 * 10**9, "index": 0, "uuid": "GPU-1", "compute_capability": [9, 0]}
ONE_H200 = {**MACHINE, "num_cores": 16, "num_cpus": 16, "gpus": [H200]}
HOPPER = {"torch": "2.11.0", "device": "cuda", "compute_capability": [9, 0], "has_compiler": True}
SPACE_OF_MODES = [
    "search_space=none",
    "compile.mode=choice(off,default,reduce-overhead,max-autotune)",
    "precision.amp=choice(off,bf16)",
]
FAST = {("precision.amp", "bf16"): 1.8, ("layout.channels_last", True): 1.3}


@pytest.fixture
def bench(bench):
    return lambda surface, *overrides, **more: bench(surface, RATES, *overrides, **more)


def sampled(study):
    return [trial for trial in study.trials if trial.origin == "sampler rates"]


@pytest.mark.thorough
def test_every_proposal_gives_its_reason_in_one_line(bench):
    study = bench(Surface(gains=FAST, loader_per_s=40.0), "study.budget.trials=8", minutes=30)
    study.run()
    lines = [trial.why for trial in sampled(study)]
    assert len(lines) >= 3
    assert all(re.search(r"(\+\d+ % expected|up to \+\d+ %|gain unknown|little gain expected)", line) for line in lines)
    assert not any("\n" in line for line in lines)
    assert any("-bound: " in line for line in lines)
    assert any("loader-bound: workers " in line for line in lines)
    started = [why for _, kind, _, why in study.listener.named("trial_started") if kind is Kind.search]
    assert set(lines) <= set(started), "the live table and the log show the reasons"


def test_search_ends_if_no_improvement_is_expected_and_says_so(bench, tmp_path):
    file = tmp_path / "space.yaml"
    file.write_text("loader.batch_size: [16, 32, 64, 128]\nprecision.amp: auto\nthreads.intra: [1, 2, 4]\n")
    surface = Surface(gains=FAST, loader_per_s=1e6, noise_frac=0.002, half_batch=2.0)
    study = bench(surface, f"search_space={file}", minutes=120)
    summary = study.run()
    assert summary["reason"] == NO_IMPROVEMENT
    assert summary["best"]["overrides"]["precision.amp"] == "bf16"
    assert study.clock.now_s - 1000 < 0.5 * 120 * 60, "the rest of the budget is not used"
    going_on = bench(surface, f"search_space={file}", "search.stop=false", minutes=120)
    assert going_on.run()["reason"] != NO_IMPROVEMENT


@pytest.mark.thorough
def test_configurations_expected_to_run_out_of_memory_are_not_tried(bench):
    class Filling(Surface):
        def peak_bytes(self, knobs):
            return 10**8 + 6 * 10**6 * int(knobs["loader.batch_size"])

    study = bench(Filling(gains=FAST, half_batch=30.0, capacity_bytes=10**9), "study.budget.trials=16", minutes=60)
    summary = study.run()
    assert "device_oom" not in summary["counts"]
    assert summary["best"]["knobs"]["loader.batch_size"] == 128, "the largest of 32, 64, 128, 256 that fits"


def test_batch_size_that_fills_the_memory_is_tried_after_a_larger_one_was_the_best(bench):
    class Filling(Surface):
        def peak_bytes(self, knobs):
            return 10**8 + 6 * 10**6 * int(knobs["loader.batch_size"])

    surface = Filling(gains=FAST, half_batch=100.0, capacity_bytes=2 * 10**9)
    space = ["search_space=none", "loader.batch_size=choice(16,32,64,128,256,512)", "precision.amp=choice(off,bf16)"]
    study = bench(surface, *space, "study.budget.trials=5", minutes=60)
    study.run()
    filling = [trial for trial in study.trials if "expected to fit the memory" in trial.why]
    assert [trial.knobs["loader.batch_size"] for trial in filling] == [256]


@pytest.mark.thorough
def test_compilation_is_tried_on_a_good_eager_configuration(bench):
    study = bench(Surface(gains={**FAST, ("compile.mode", "default"): 1.4}), "study.budget.trials=16", minutes=60)
    summary = study.run()
    first = next(trial for trial in study.trials if "compile.mode" in trial.changed)
    rest = {key: value for key, value in first.changed.items() if key != "compile.mode"}
    assert rest in [trial.changed for trial in study.trials[: first.number]]
    assert summary["best"]["overrides"]["compile.mode"] == "default"


def test_value_that_seemed_too_expensive_is_not_called_untried_if_it_was_tried(bench):
    """A compilation is first assumed to take a minute. Here it takes 5 s, so that the others fit, too."""
    modes = {"default": 1.4, "reduce-overhead": 1.5, "max-autotune": 1.6}
    gains = {**FAST, **{("compile.mode", mode): gain for mode, gain in modes.items()}}
    surface = Surface(gains=gains, compile_s=5.0, loader_per_s=1e5, facts=HOPPER)
    study = bench(surface, *SPACE_OF_MODES, minutes=7, machine=ONE_H200)
    study.run()
    tried = {trial.changed.get("compile.mode") for trial in study.trials}
    left_out = [line for line in study.listener.named("notice") if "does not fit the budget" in line]
    assert "max-autotune" in tried
    assert left_out == []


@pytest.mark.thorough
def test_tpe_proposes_if_the_objective_is_not_the_rate(bench):
    surface = Surface(gains=FAST, power_w=lambda knobs: 200.0 + 100.0 * (knobs.get("precision.amp") == "bf16"))
    asked = ["objective=energy_per_sample", "study.budget.trials=24"]
    study = bench(surface, *asked, machine=GPU, minutes=60)
    study.run()
    assert {trial.why for trial in sampled(study)} == {"TPE proposes: the objective is not the rate"}
    assert any(trial.origin.startswith("single ") for trial in study.trials)


def test_resumed_study_does_not_repeat_configurations(bench):
    study = bench(
        Surface(gains=FAST, failures=lambda trial, _: Failure(raises=KeyboardInterrupt) if trial == 5 else None), minutes=5
    )
    assert study.run()["status"] == "interrupted"
    study.surface.failures = lambda *_: None
    study.launcher.is_closed = False
    resume_study(study.inputs, study.folder, study.listener)
    settled = [tuple(sorted(t.changed.items())) for t in study.trials if t.kind is Kind.search and t.outcome.has_value]
    assert len(settled) == len(set(settled)) > 5
    assert sampled(study)


@pytest.mark.thorough
@pytest.mark.parametrize("part", ["seeds", "decomposition", "memory_model", "cost_aware", "stop"])
def test_each_part_of_the_sampler_can_be_disabled(bench, part):
    summary = bench(Surface(gains=FAST), f"search.{part}=false", "study.budget.trials=12", minutes=30).run()
    assert summary["status"] == "complete"
    assert summary["best"]["overrides"]["precision.amp"] == "bf16"


def test_single_change_is_not_tested_on_two_configurations_at_once():
    asking = Proposal(knobs={"precision.amp": "bf16", "threads.intra": 2}, why="", origin="single precision.amp")
    budget = SimpleNamespace(fits=lambda _: True)
    settled = SimpleNamespace(pending={0: asking}, is_known=lambda _: False)
    search = SimpleNamespace(_settled=settled, _budget=budget, _may_fit=lambda _: True)
    assert not Search._is_answerable(search, "precision.amp", {"precision.amp": "bf16", "threads.intra": 4})
    assert Search._is_answerable(search, "precision.amp", {"precision.amp": "fp16"})
    assert Search._is_answerable(search, "threads.intra", {"precision.amp": "bf16", "threads.intra": 2})


def test_search_does_not_end_on_a_provisional_estimate_of_little_gain():
    sampler, schedule = RatesSampler(optuna.samplers.RandomSampler()), SimpleNamespace(num_running=2)
    sampler.is_provisional = True
    session = SimpleNamespace(schedule=schedule, runner=SimpleNamespace(goal=SimpleNamespace(names=["throughput"])))
    search = SimpleNamespace(_rates=sampler, _session=session, _num_free=9, _budget=SearchBudget(session, is_led=True))
    search._budget._num_small = ANSWER_AFTER
    search._knows_more = lambda: Search._knows_more(search)
    search._is_turn_of_single_change, search._sampled = lambda: False, lambda: "a proposal"
    assert Search._new(search) is None
    schedule.num_running = 0
    assert Search._new(search) == "a proposal"
    sampler.is_provisional, search._budget._num_small = False, ANSWER_AFTER
    assert Search._new(search) is None
    assert search._reason == ANSWER_FIRST


@pytest.mark.parametrize(("num_searched", "best"), [(49, "b"), (50, "a")], ids=["one-may-win", "one-will-hardly-win"])
def test_late_proposals_wait_for_running_trials_unless_few_are_running(monkeypatch, num_searched, best):
    """When the late proposals begin, the best trial may still be running."""
    monkeypatch.setattr("autotune.study.proposals.without_ineffective", lambda *_: None)
    first, second = (SimpleNamespace(number=number, knobs={key: 1}, changed={key: 1}) for number, key in ((3, "a"), (4, "b")))
    schedule = SimpleNamespace(num_running=5, drain=lambda: setattr(search, "_incumbent", second))
    search = SimpleNamespace(_incumbent=first, _costly=[], _sampler_name="tpe")
    search._session, search._budget = SimpleNamespace(schedule=schedule), SimpleNamespace(num_searched=num_searched)
    search._wait_for_the_best = lambda: Search._wait_for_the_best(search)
    search._space = SimpleNamespace(reference={"a": 0, "b": 0}, active=lambda knobs: knobs, tier=lambda _: Tier.exact)
    proposals = list(Search._late(search))
    assert [proposal.knobs for proposal in proposals] == [{"a": 0, "b": 0, best: 1}] * 2
    assert all(f"trial {({'a': 3, 'b': 4})[best]}" in proposal.why for proposal in proposals)


def test_threads_of_the_host_are_not_among_the_first_trials_on_a_gpu(bench):
    """On a made-up GPU like an H200, an earlier version spent three of its first six trials on thread counts."""
    gains = {("precision.amp", "bf16"): 2.5, ("precision.matmul", "high"): 1.1, ("compile.mode", "default"): 1.3}
    surface = Surface(
        gains=gains, base_per_s=100.0, loader_per_s=3_000.0, half_batch=3.0, noise_frac=0.003, start_s=10.0, facts=HOPPER
    )
    study = bench(surface, minutes=5, machine=ONE_H200)
    study.run()
    searched = [trial for trial in study.trials if trial.kind is Kind.search]
    assert len(searched) >= 5
    assert not any("threads.intra" in trial.changed for trial in searched[:5])


@pytest.mark.parametrize(("loader_per_s", "has_workers"), [(20.0, True), (5_000.0, False)])
def test_first_trials_on_a_cpu_have_loader_workers_if_the_loader_is_slow(bench, loader_per_s, has_workers):
    """On 36 simulated CPUs, three trials without this choice reached .66 of the optimum instead of .74."""
    study = bench(Surface(gains=FAST, loader_per_s=loader_per_s), "study.budget.trials=2", minutes=30)
    study.run()
    expert = [trial for trial in study.trials if trial.origin == "expert"]
    assert [bool(trial.knobs["loader.num_workers"]) for trial in expert] == [has_workers] * 2


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("workers", "loader_per_s", "has_more"),
    [(0, 3_000.0, True), (0, 20_000.0, False), (2, 300.0, True), (2, 1_000.0, False)],
)
def test_expert_leaves_the_workers_on_a_gpu_if_the_loader_is_far_too_fast_to_matter(bench, workers, loader_per_s, has_more):
    observed = {**DEFAULTS, "loader.num_workers": workers}
    surface = Surface(gains=FAST, base_per_s=100.0, loader_per_s=loader_per_s, observed=observed, facts=HOPPER)
    study = bench(surface, "study.budget.trials=2", minutes=30, machine=ONE_H200)
    study.run()
    expert = [trial for trial in study.trials if trial.origin == "expert"]
    assert len(expert) == 2
    assert ["loader.num_workers" in trial.changed for trial in expert] == [has_more] * 2


@pytest.mark.parametrize(("given", "is_held"), [(["train.global_batch=32"], True), ([], False)])
def test_sampler_knows_whether_every_step_has_the_same_samples(bench, monkeypatch, given, is_held):
    told, inform = [], proposals.inform
    monkeypatch.setattr(proposals, "inform", lambda one, *args, **more: told.append(one) or inform(one, *args, **more))
    bench(Surface(), *given, "study.budget.trials=1", minutes=30).run()
    assert [sampler.rules.is_held for sampler in told] == [is_held]


@pytest.mark.parametrize(("num_tried", "num_left"), [(0, 2), (1, 2), (2, 0)])
def test_resumed_search_tries_no_more_of_the_experts_configurations(num_tried, num_left):
    """On a CPU the forecast sorts them. After a resume it knows more trials, and puts others first."""
    seeds = [(f"choice {number}", {"threads.intra": number}) for number in range(1, 6)]
    space = SimpleNamespace(seeds=lambda *_, **__: seeds, reference={}, active=lambda knobs: knobs, changed=lambda knobs: knobs)
    tried = [a_trial(number, origin="expert", changed=seeds[number - 1][1]) for number in range(1, num_tried + 1)]
    session = SimpleNamespace(
        resolved=space, searched=[a_trial(), *tried], baseline=a_trial(), host_context=SimpleNamespace(has_cuda=False),
        inputs=SimpleNamespace(config=SimpleNamespace(search=SimpleNamespace(seeds=True))),
    )  # fmt: skip
    found = expert_seeds(session, {}, lambda _: True, is_led=True, log_rates=lambda some: list(range(len(some))))
    assert len([*found]) == num_left
