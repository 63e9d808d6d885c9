import itertools

import optuna
import pytest
from optuna.distributions import CategoricalDistribution
from optuna.trial import TrialState, create_trial

from autotune.search import make_sampler
from autotune.search.rates import MACHINE, MEASURED, Machine, Rules, SamplerOptions, step
from autotune.search.rates.sampler import STOP_AFTER
from autotune.search.rates.step import lead_of

BATCH, WORKERS, AMP, PREFETCH = "loader.batch_size", "loader.num_workers", "precision.amp", "loader.prefetch_factor"
SPACE = {
    BATCH: CategoricalDistribution([16, 32, 64, 128]),
    WORKERS: CategoricalDistribution([0, 1, 2, 4, 8]),
    AMP: CategoricalDistribution(["off", "bf16"]),
    "env.SURPRISE": CategoricalDistribution(["a", "b"]),
    PREFETCH: CategoricalDistribution([2, 4]),
}
GPU = Machine(num_cores=16, memory_bytes=1e9)


def active(params):
    return {key: value for key, value in params.items() if key != PREFETCH or params[WORKERS] > 0}


def rates_of(params):
    """Returns D, L and the rate of a made-up program on a GPU."""
    device = 400 * params[BATCH] / (params[BATCH] + 24) * (1.8 if params[AMP] == "bf16" else 1.0)
    device *= 1.1 if params["env.SURPRISE"] == "b" else 1.0
    workers = params[WORKERS]
    loader = 50.0 * max(1, workers)
    return device, loader, 1 / (1 / device + 1 / loader) if not workers else (device**-8 + loader**-8) ** (-1 / 8)


def measured(params, **more):
    device, loader, rate = rates_of(params)
    return {"rate": rate, "device_rate": device, "loader_rate": loader, "peak_memory_bytes": 3e6 * params[BATCH], **more}


def new_study(known=(), *, seed=0, machine=GPU, rules=None, options=None, storage=None):
    sampler = make_sampler("rates", seed=seed, distributions=SPACE)
    sampler.rules = rules or Rules(active=active)
    sampler.options = options or SamplerOptions(stop=False)
    study = optuna.create_study(sampler=sampler, direction="maximize", storage=storage, study_name="s")
    study.set_user_attr(MACHINE, vars(machine))
    for params in known:
        add(study, params)
    return study


def add(study, params, *, score=None, constraints=None, **more):
    told = measured(params, **more)
    study.add_trial(
        create_trial(
            value=told["rate"] if score is None else score,
            params=params,
            distributions={key: SPACE[key] for key in params},
            user_attrs={MEASURED: told},
            constraints=constraints,
        )
    )


def asked(study):
    """Asks for a trial as the study loop does, without values for inactive knobs."""
    trial = study.ask()
    params = {}
    for key, distribution in SPACE.items():
        if key != PREFETCH or params[WORKERS] > 0:
            params[key] = trial._suggest(key, distribution)
    return trial, params


def tell(study, trial, params):
    trial.set_user_attr(MEASURED, measured(params))
    study.tell(trial, rates_of(params)[2])


def run_out(study, trial):
    trial.set_user_attr(MEASURED, {"outcome": "device_oom"})
    trial.set_constraint("memory", 0.1)
    study.tell(trial, 1.0)


START = {BATCH: 32, WORKERS: 0, AMP: "off", "env.SURPRISE": "a"}


def with_(**changed):
    names = {"batch": BATCH, "workers": WORKERS, "amp": AMP}
    params = {**START, **{names[name]: value for name, value in changed.items()}}
    return {**params, PREFETCH: 2} if params[WORKERS] else params


SOME = [with_(), with_(amp="bf16"), with_(batch=64, amp="bf16"), with_(workers=4, amp="bf16")]


def proposal(study):
    trial, params = asked(study)
    return params, study.sampler.proposed(trial.number)


@pytest.mark.parametrize("seed", range(3))
def test_the_optimum_is_found_in_few_trials(seed):
    study = new_study([with_()], seed=seed)
    for _ in range(12):
        trial, params = asked(study)
        tell(study, trial, params)
    best = max(rates_of(one)[2] for one in all_configurations())
    assert study.best_value > 0.97 * best


def all_configurations():
    for values in itertools.product(*(SPACE[key].choices for key in SPACE)):
        yield active(dict(zip(SPACE, values, strict=True)))


@pytest.mark.parametrize(("is_cpu", "batch"), [(True, 16), (False, 64)])
def test_batch_below_the_best_is_not_tried_on_a_gpu_only_because_it_is_uncertain(is_cpu, batch):
    """In a study of ten minutes of a made-up GPT on an H100, such a trial took half of the search's remaining time."""
    rules = Rules(active=active, is_open=lambda params: params == with_(batch=params[BATCH], amp="bf16"))
    study = new_study(machine=Machine(num_cores=16, memory_bytes=1e9, is_cpu=is_cpu), rules=rules)
    for params in [with_(batch=32), with_(batch=32, amp="bf16"), with_(batch=128, amp="bf16")]:
        flat = 100.0 if params[AMP] == "off" else 180.0  # about the same at any batch size
        add(study, params, rate=flat * (1 + params[BATCH] / 1e4), device_rate=flat * (1 + params[BATCH] / 1e4), loader_rate=1e6)
    params, _ = proposal(study)
    assert params[BATCH] == batch


def test_needlessly_small_batches_do_not_prolong_a_search(monkeypatch):
    expected = []
    for factor in (1.0, 0.1):
        monkeypatch.setattr(step, "SMALL_BATCH", factor)
        study = new_study(rules=Rules(active=active, is_open=lambda params: params == with_(batch=16, amp="bf16")))
        for params in [with_(batch=32), with_(batch=32, amp="bf16"), with_(batch=128, amp="bf16")]:
            rate = (100.0 if params[AMP] == "off" else 180.0) * (1 + params[BATCH] / 1e4)
            add(study, params, rate=rate, device_rate=rate, loader_rate=1e6)
        expected.append(proposal(study)[1].expected_improvement)
    assert 0 < expected[1] < 0.3 * expected[0]


def test_loader_bound_program_gets_more_workers_with_that_reason():
    study = new_study(SOME)
    params, found = proposal(study)
    assert params[WORKERS] == 8
    assert found.why.startswith("loader-bound: workers 4 -> 8, +")
    assert found.why.endswith(" % expected")


def test_device_bound_program_is_changed_on_the_device_side():
    fast = [with_(workers=8), with_(workers=8, batch=64), with_(workers=4), with_(workers=2)]
    slow_device = [{**measured(one), "device_rate": 90.0, "loader_rate": 5000.0 * one[WORKERS], "rate": 90.0} for one in fast]
    study = new_study()
    for params, told in zip(fast, slow_device, strict=True):
        add(study, params, **told)
    params, found = proposal(study)
    assert params[AMP] == "bf16" or params[BATCH] != fast[0][BATCH]
    assert "workers" not in found.why


@pytest.mark.parametrize(("side", "lead"), [("loader", "loader-bound"), ("device", "device-bound, too"), ("all", "one change")])
def test_reason_of_a_proposal_begins_with_the_bottleneck_that_it_addresses(side, lead):
    assert lead_of(side, ["loader", "device"]) == lead


def test_sampler_proposes_no_configuration_twice_and_reports_exhaustion():
    few = [one for one in all_configurations() if one[WORKERS] < 2 and one[BATCH] < 64]
    few = [one for n, one in enumerate(few) if one not in few[:n]]
    study = new_study([with_()], rules=Rules(active=active, is_open=lambda params: params in few))
    seen = [with_()]
    for _ in range(len(few) - 1):
        trial, params = asked(study)
        assert params not in seen
        seen.append(params)
        tell(study, trial, params)
    assert all(one in seen for one in few)
    asked(study)
    assert study.sampler.is_exhausted


def test_conditional_knob_is_left_out_if_it_is_inactive():
    study = new_study(SOME)
    for _ in range(20):
        trial, params = asked(study)
        assert set(trial.params) == set(params)
        assert (PREFETCH in study.sampler.proposed(trial.number).params) == (params[WORKERS] > 0)
        tell(study, trial, params)


def test_effect_of_an_unknown_knob_is_learned():
    study = new_study(SOME)
    for _ in range(20):
        trial, params = asked(study)
        tell(study, trial, params)
    assert study.best_params["env.SURPRISE"] == "b"


def test_sampler_continues_from_the_journal_alone():
    storage = optuna.storages.InMemoryStorage()
    first = new_study(SOME, storage=storage)
    again = optuna.load_study(study_name="s", storage=storage, sampler=make_sampler("rates", seed=0, distributions=SPACE))
    again.sampler.rules = Rules(active=active)
    assert again.sampler.proposed(0) is None
    params, found = proposal(again)
    fresh, expected = proposal(new_study(SOME))
    assert (params, found.why) == (fresh, expected.why)
    assert len(first.trials) == len(SOME) + 1


def test_running_trials_are_not_proposed_again():
    study = new_study(SOME)
    side_by_side = [asked(study)[1] for _ in range(6)]
    keys = {tuple(sorted(params.items())) for params in side_by_side}
    assert len(keys) == 6


def test_configuration_that_does_not_fit_the_memory_is_never_proposed():
    study = new_study(SOME, machine=Machine(num_cores=16, memory_bytes=3e6 * 100))  # 128 needs 1.28 times the memory
    for _ in range(25):
        trial, params = asked(study)
        assert params[BATCH] <= 64
        tell(study, trial, params)


def test_sampler_reports_that_the_remaining_configurations_do_not_fit_the_memory():
    known = [one for one in all_configurations() if one[BATCH] <= 32]
    known = [one for n, one in enumerate(known) if one not in known[:n]]
    study = new_study(known[:-1], machine=Machine(num_cores=16, memory_bytes=3e6 * 40))
    trial, params = asked(study)
    assert params == known[-1]
    tell(study, trial, params)
    asked(study)
    assert study.sampler.is_exhausted
    assert study.sampler.is_held_back, "64 and 128 are left"


def test_risky_large_gain_is_tried_only_just_before_the_search_ends():
    """A batch of 128 in bf16 fits only if bf16 halves the memory of a sample; no trial has shown yet how much it saves."""
    rules = Rules(active=active, is_open=lambda params: (params[BATCH], params[AMP]) in ((32, "off"), (128, "bf16")))
    machine = Machine(num_cores=16, memory_bytes=3e6 * 57)
    study = new_study([with_(), with_(batch=16)], machine=machine, rules=rules, options=SamplerOptions())
    best, risky = [], []
    while not (study.sampler.has_nothing_more or study.sampler.is_exhausted):
        trial, params = asked(study)
        if params[BATCH] == 32:
            tell(study, trial, params)
            best.append(study.best_value)
        else:
            risky.append((len(best), study.sampler.proposed(trial.number).why))
            run_out(study, trial)
    ((num_before, why),) = risky
    assert "likely to fit the memory" in why
    assert best[num_before - 1] > 0.97 * best[-1]


def test_batch_as_large_as_one_that_ran_out_of_memory_is_never_proposed():
    study = new_study(SOME, machine=Machine(num_cores=16))
    add(
        study, with_(batch=64, workers=8, amp="bf16"), score=1.0, rate=None, peak_memory_bytes=None, constraints={"memory": 0.1}
    )
    precisions = set()
    for _ in range(40):
        trial, params = asked(study)
        precisions.add(params[AMP])
        assert params[AMP] == "off" or params[BATCH] < 64
        tell(study, trial, params)
    assert "bf16" in precisions


def test_batch_that_left_too_little_memory_free_is_not_proposed_again():
    """The trial worked, so its batch seemed to fit in every configuration with the same arithmetic."""
    study = new_study(SOME[:2], machine=Machine(num_cores=16, memory_bytes=3e6 * 100))
    peak = {"peak_memory_bytes": 3e6 * 110, "violated": ["constraints.memory_free_frac"]}
    add(study, with_(batch=64, amp="bf16"), constraints={"limits": 0.1}, **peak)
    precisions = set()
    for _ in range(12):
        trial, params = asked(study)
        precisions.add(params[AMP])
        assert params[AMP] == "off" or params[BATCH] < 64
        tell(study, trial, params)
    assert "bf16" in precisions


@pytest.mark.parametrize("metric", ["step_p95_s", "gpu.power_w"])
def test_configurations_that_would_exceed_a_limit_are_hardly_tried(metric):
    """Larger batches would be faster, but their steps take too long, or too much power."""

    def value(params):
        return params[BATCH] / rates_of(params)[2] if metric == "step_p95_s" else 100.0 + 3 * params[BATCH]

    def num_over(limits):
        study, found = new_study(rules=Rules(active=active, limits=limits)), 0
        for params in SOME:
            add(study, params, metrics={metric: value(params)}, constraints={"limits": float(value(params) > most)})
        for _ in range(6):
            trial, params = asked(study)
            found += value(params) > most
            trial.set_user_attr(MEASURED, measured(params, metrics={metric: value(params)}))
            trial.set_constraint("limits", float(value(params) > most))
            study.tell(trial, rates_of(params)[2])
        return found

    most = 1.2 * value(with_(batch=32, workers=8, amp="bf16"))
    assert num_over({metric: most}) <= 1 < num_over({})


@pytest.mark.parametrize("is_held", [True, False])
def test_larger_batches_are_tried_under_a_limit_if_steps_keep_their_samples(is_held):
    """With `train.global_batch`, fewer batches make a step of the same samples. Otherwise a step of 128 takes too long."""
    known = [with_(workers=workers, amp="bf16") for workers in (2, 4)]
    times = [{"step_p95_s": START[BATCH] / rates_of(params)[2]} for params in known]
    limit = 1.05 * times[-1]["step_p95_s"]
    study = new_study(rules=Rules(active=active, limits={"step_p95_s": limit}, is_held=is_held))
    for params, metrics in zip(known, times, strict=True):
        add(study, params, metrics=metrics, constraints={"limits": metrics["step_p95_s"] - limit})
    assert (128 in [asked(study)[1][BATCH] for _ in range(4)]) is is_held


def test_too_large_batch_is_proposed_without_the_memory_model():
    study = new_study(
        SOME, machine=Machine(num_cores=16, memory_bytes=3e6 * 100), options=SamplerOptions(memory=False, stop=False)
    )
    assert any(asked(study)[1][BATCH] == 128 for _ in range(10))


def test_value_that_never_worked_is_not_proposed_again():
    study = new_study([with_(), with_(batch=64)])
    for batch in (16, 32):
        add(study, with_(batch=batch, amp="bf16"), score=1.0, rate=None, constraints={"works": 1.0})
    for _ in range(12):
        trial, params = asked(study)
        assert params[AMP] == "off"
        tell(study, trial, params)


def test_proposals_obey_the_rules_of_the_study():
    study = new_study(SOME, rules=Rules(active=active, is_open=lambda params: params[WORKERS] != 8))
    assert all(asked(study)[1][WORKERS] != 8 for _ in range(6))


def test_cheap_compilation_is_tried_before_an_expensive_one_that_may_gain_more():
    seconds = {"off": 30.0, "default": 90.0, "max-autotune": 270.0}
    space = {BATCH: CategoricalDistribution([32]), "compile.mode": CategoricalDistribution(list(seconds))}
    sampler = make_sampler("rates", seed=0, distributions=space)
    sampler.rules = Rules(
        expected_s=lambda params: seconds[params["compile.mode"]],
        costly={"compile.mode": "off"},
        gains={"compile.mode": {"default": 0.08, "max-autotune": 0.12}},
        ladders={"compile.mode": (tuple(seconds), 1.0)},
    )
    study = optuna.create_study(sampler=sampler, direction="maximize")
    study.set_user_attr(MACHINE, vars(GPU))
    params = {BATCH: 32, "compile.mode": "off"}
    told = {"rate": 90.0, "device_rate": 90.0, "loader_rate": 5000.0, "peak_memory_bytes": 1e8}
    study.add_trial(create_trial(value=90.0, params=params, distributions=space, user_attrs={MEASURED: told}))
    assert list(study.ask(space).params.values()) == [32, "default"]


def test_costly_value_is_tried_late_and_on_a_measured_configuration():
    costly = Rules(
        active=active, expected_s=lambda params: 60.0 if params["env.SURPRISE"] == "b" else 6.0, costly={"env.SURPRISE": "a"}
    )
    study = new_study([with_()], rules=costly)
    tried = []
    for _ in range(14):
        trial, params = asked(study)
        tried.append(params)
        tell(study, trial, params)
    first = next(n for n, params in enumerate(tried) if params["env.SURPRISE"] == "b")
    assert first >= 3
    rest = [{key: value for key, value in params.items() if key != "env.SURPRISE"} for params in tried]
    assert rest[first] in rest[:first], "the rest of the configuration was measured before, without the costly value"


def test_search_stops_when_no_improvement_is_expected():
    study = new_study([with_()], options=SamplerOptions())
    num = 0
    while not study.sampler.has_nothing_more:
        trial, params = asked(study)
        tell(study, trial, params)
        num += 1
    assert 8 < num < 100
    assert study.best_value > 0.99 * max(rates_of(one)[2] for one in all_configurations())


def test_search_stops_below_two_percent_since_expected_improvements_are_too_high():
    for expected, is_over in ((0.019, True), (0.021, False)):
        sampler = make_sampler("rates", seed=0, distributions=SPACE)
        for num in range(STOP_AFTER):
            sampler._count(step.Proposed(params={}, why="", expected_improvement=expected), num_over=num, is_provisional=False)
        assert sampler.has_nothing_more == is_over


def test_tpe_proposes_for_several_objectives_with_that_reason():
    sampler = make_sampler("rates", seed=0, distributions=SPACE)
    study = optuna.create_study(sampler=sampler, directions=["maximize", "maximize"])
    trial = study.ask(SPACE)
    assert study.sampler.proposed(trial.number).why == "TPE proposes: several objectives"
    study.tell(trial, [1.0, 2.0])
    assert study.trials[0].state is TrialState.COMPLETE


def test_tpe_proposes_if_scores_are_not_rates():
    study = new_study()
    for number, params in enumerate(SOME):
        add(study, params, score=1.0 + number)
    _, found = proposal(study)
    assert found.is_fallback
    assert found.why == "TPE proposes: the objective is not the rate"


def test_first_proposal_without_decomposition_says_that_it_uses_rates_alone():
    study = new_study(SOME, options=SamplerOptions(stop=False, decomposition=False))
    _, first = proposal(study)
    assert first.why.endswith("(from now on by the rates alone: search.decomposition=false)")
    _, second = proposal(study)
    assert "from now on" not in second.why


def some_neighbours():
    levels = itertools.product(("off", "bf16"), (0, 2, 4), (32, 64))
    return [with_(amp=amp, workers=workers, batch=batch) for amp, workers, batch in levels]


def test_rate_far_below_its_forecast_is_doubted_until_it_is_measured_again():
    known = some_neighbours()
    optimum = with_(amp="bf16", workers=8, batch=128)
    study = new_study([*known, with_(workers=8, batch=128)])
    assert study.sampler.doubted(study) is None, "all rates are as forecast"
    _, loader, rate = rates_of(optimum)
    add(study, optimum, score=rate / 2, rate=rate / 2, device_rate=rate / 2, loader_rate=loader)
    assert study.sampler.doubted(study) == optimum
    add(study, optimum)
    assert study.sampler.doubted(study) is None, "it was measured again"


def test_slow_configuration_that_would_not_win_anyway_is_not_measured_again():
    known = some_neighbours()
    study = new_study(known)
    add(study, with_(workers=8, batch=16), score=20.0, rate=20.0, device_rate=20.0)
    assert study.sampler.doubted(study) is None


def test_tpe_proposes_if_all_trials_have_knobs_outside_the_space():
    space = {BATCH: SPACE[BATCH], WORKERS: SPACE[WORKERS]}
    study = new_study([with_(amp="off")])
    study.sampler = make_sampler("rates", seed=0, distributions=space)
    trial = study.ask(space)
    assert trial.params.keys() == space.keys()
    proposed = study.sampler.proposed(trial.number)
    assert proposed.is_fallback
    assert "no rates are known for these knobs" in proposed.why


def test_proposal_of_tpe_is_not_mistaken_for_an_exhausted_space():
    study = new_study([with_(amp="off")])
    study.sampler.is_exhausted = study.sampler.is_held_back = True  # by an earlier proposal
    add(study, with_(amp="bf16"), score=1.0)  # the score does not follow the rate
    trial, _ = asked(study)
    assert study.sampler.proposed(trial.number).is_fallback
    assert not study.sampler.is_exhausted
    assert not study.sampler.is_held_back
