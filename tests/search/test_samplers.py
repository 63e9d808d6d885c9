import optuna
import pytest
from optuna.distributions import CategoricalDistribution, IntDistribution

from autotune.errors import BadInput
from autotune.search import SAMPLERS, make_sampler
from autotune.search.samplers import grid_levels

SPACE = {"loader.num_workers": CategoricalDistribution([0, 2, 4]), "precision.amp": CategoricalDistribution(["off", "bf16"])}


@pytest.mark.parametrize("name", sorted(SAMPLERS))
def test_same_seed_gives_the_same_proposals(name):
    def proposals():
        study = optuna.create_study(sampler=make_sampler(name, seed=5, distributions=SPACE), direction="maximize")
        found = []
        for n in range(6):
            trial = study.ask(SPACE)
            found.append(trial.params)
            study.tell(trial, float(n))
        return found

    assert proposals() == proposals()


@pytest.mark.parametrize("name", ["tpe", "random", "grid"])
def test_trials_may_be_added_to_the_largest_seed(name):
    """The sampler of a resumed study gets `study.seed` plus the number of trials, but NumPy's seeds end at 2**32 - 1."""
    study = optuna.create_study(sampler=make_sampler(name, seed=2**32 + 4, distributions=SPACE), direction="maximize")
    assert study.ask(SPACE).params.keys() == SPACE.keys()


def test_unknown_sampler_is_refused_with_the_nearest_name():
    with pytest.raises(BadInput, match=r"search\.sampler: no such sampler, got 'tpa'\. Did you mean 'tpe'\?"):
        make_sampler("tpa", seed=0, distributions={})


def test_grid_visits_every_point_once_although_the_first_trial_was_the_baseline():
    study = optuna.create_study(sampler=make_sampler("grid", seed=0, distributions=SPACE), direction="maximize")
    study.add_trial(optuna.trial.create_trial(value=1.0, params={}, distributions={}))
    seen = set()
    while not study.sampler.is_exhausted(study):
        trial = study.ask(SPACE)
        seen.add(tuple(sorted(trial.params.items())))
        study.tell(trial, 1.0)
    assert len(seen) == 6
    assert len(study.trials) == 7


@pytest.mark.parametrize(
    ("distribution", "levels"),
    [
        (CategoricalDistribution(["a", "b"]), ["a", "b"]),
        (IntDistribution(2, 8, step=2), [2, 4, 6, 8]),
        (IntDistribution(8, 100, log=True), [8, 16, 32, 64, 100]),
    ],
)
def test_grid_levels_of_choices_stepped_ranges_and_log_ranges(distribution, levels):
    assert grid_levels(distribution) == levels


def test_grid_with_too_many_points_is_refused():
    space = {f"k{n}": IntDistribution(0, 9) for n in range(6)}
    with pytest.raises(BadInput, match="1,000,000 points"):
        make_sampler("grid", seed=0, distributions=space)
