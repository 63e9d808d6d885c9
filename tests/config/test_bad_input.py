"""Every input that cannot be used: one BadInput with every problem, key and value named."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf.errors import OmegaConfBaseException

from autotune.config.compose import compose
from autotune.errors import BadInput

FACTS = {"num_cores": 4, "isa": ["avx2"], "gpus": [], "has_compiler": True}
PYTHON = sys.executable


@pytest.mark.parametrize(
    ("text", "message"),
    [
        # unknown keys and names
        ("loader.batchsize=3", "loader.batchsize: there is no such key. Did you mean 'loader.batch_size'?"),
        ("batch_size=3", "batch_size: there is no such key. Did you mean 'loader.batch_size'?"),
        ("study.budget.minuts=3", "Did you mean 'study.budget.minutes'?"),
        ("studdy.name=x", "Did you mean 'study.name'?"),
        ("+loader.bogus=1", "loader.bogus: there is no such key"),
        ("loader.batchsize=choice(1,2)", "Did you mean 'loader.batch_size'?"),
        ("model=resnet81", "model: no such model, got 'resnet81'. Did you mean 'resnet18'?"),
        ("data=fotos", "data: no such data, got 'fotos'. Did you mean 'photos'?"),
        ("data.name=fotos", "data.name: no such data"),
        ("model.source=timn", "model.source: no such source"),
        ("search_space=defualt", "search_space: no such search space, got 'defualt'. Did you mean 'default'?"),
        ("search_space=/no/such.yaml", "search_space: cannot be read, got '/no/such.yaml'"),
        ("search.sampler=tpee", "search.sampler: no such sampler, got 'tpee'. Did you mean 'tpe'?"),
        ("objective=latency", "objective: no such objective, got 'latency'"),
        ("launcher=slrm", "launcher: no such launcher, got 'slrm'"),
        ("tiers=exakt", "tiers: no such value, got 'exakt'. Did you mean 'exact'?"),
        ("device.kind=tpu", "device.kind: no such device"),
        ("train.optimizer=adam", "train.optimizer: no such optimizer"),
        ("+nosuch=best", "nosuch: no such group of configuration files"),
        # named in plans, not built: nothing is accepted that does nothing
        ("search.warm_start=true", "search.warm_start: there is no such key"),
        ("study.samples=1000000", "study.samples: there is no such key"),
        ("machine.price_per_hour=3", "machine.price_per_hour: there is no such key"),
        # wrong types
        ("loader.num_workers=many", "loader.num_workers: not a whole number, got 'many'"),
        ("loader.num_workers=1.5", "not a whole number, got 1.5"),
        ("loader.num_workers=[1,2]", "not a whole number, got [1, 2]"),
        ("loader.pin_memory=maybe", "loader.pin_memory: not true or false, got 'maybe'"),
        ("precision.amp=fp16", "precision.amp: no such value, got 'fp16'"),
        ("study.budget.minutes=soon", "study.budget.minutes: wrong type, got 'soon'. Allowed: a number or null."),
        ("study.seed=1.5", "study.seed: wrong type, got 1.5"),
        ("loader=3", "loader: a group of keys"),
        ("env={A: b}", "env: cannot be set as a whole"),
        # empty or contradictory domains
        ("loader.num_workers=choice()", "loader.num_workers: an empty domain"),
        ("loader.num_workers=range(8,2,1)", "loader.num_workers: an empty domain, got 'range(8,2,1)'"),
        ("loader.num_workers=range(0,8,0)", "loader.num_workers: a range without an end"),
        ("loader.num_workers=range(0,100000000000)", "more than 256 values"),
        ("loader.num_workers=interval(8,2)", "an empty domain, got interval(8,2)"),
        ("loader.num_workers=interval(0.5,2)", "ends that are not whole numbers"),
        ("loader.num_workers=tag(log,interval(0,8))", "a logarithmic interval below 1"),
        ("loader.num_workers=tag(lin,interval(1,8))", "no such tag, got lin"),
        ("loader.num_workers=tag(log,choice(1,8))", "a tag that means nothing here"),
        ("loader.num_workers=glob(*)", "not a domain, got 'glob(*)'"),
        ("precision.amp=interval(0,1)", "an interval needs a knob of whole numbers"),
        ("precision.amp=choice(off,fp8)", "precision.amp: no such value, got 'fp8'"),
        ("train.lr=0.1,0.2", "train.lr: only knobs can be tuned"),
        ("model=resnet18,resnet50", "model: only knobs can be tuned"),
        # what this machine cannot serve
        ("loader.num_workers=10000", "more than this machine can serve (4 effective cores), got 10000. Allowed: 0 to 16."),
        ("loader.num_workers=choice(0,10000)", "more than this machine can serve"),
        ("loader.num_workers=interval(0,10000)", "more than this machine can serve"),
        ("loader.num_workers=-1", "too small, got -1"),
        ("threads.intra=0", "threads.intra: too small"),
        # values that make no sense
        ("study.name=../x", "study.name: not a plain name, got '../x'"),
        ("study.name=a/b", "study.name: not a plain name"),
        ("study.name=''", "study.name: not a plain name, got ''"),
        ("study.budget.minutes=0", "study.budget.minutes: not a number above 0"),
        ("study.budget.minutes=-1", "study.budget.minutes: not a number above 0"),
        ("study.budget.minutes=nan", "study.budget.minutes: not a number above 0"),
        ("study.budget.minutes=inf", "study.budget.minutes: not a number above 0"),
        ("study.budget.trials=0", "study.budget.trials: too small"),
        ("model.num_classes=0", "model.num_classes: too small"),
        ("runs_dir=''", "runs_dir: empty"),
        ("device.memory_limit=lots", "device.memory_limit: not an amount of memory, got 'lots'"),
        ("device.memory_limit=-1", "device.memory_limit: not an amount of memory"),
        ("measure.screening.max_s=nan", "measure.screening.max_s: not a finite number"),
        ("measure.finals.min_s=99", "measure.finals.min_s: more than max_s"),
        ("measure.step_s=0", "measure.step_s: not a number of seconds above 0"),
        ("launch.nproc=2", "launch.nproc: recipes run in one process so far"),
        ("program.python=nosuch-python", "program.python: no such program"),
        ("train.global_batch=256", "train.global_batch: not built yet, got 256"),
        ("data=folder", "data.root: data=folder needs a folder"),
        # hostile environment variables
        ("env.AUTOTUNE_SPEC=x", "env.AUTOTUNE_SPEC: not free to tune"),
        ("env.PYTHONPATH=x", "env.PYTHONPATH: not free to tune"),
        ("env.OMP_NUM_THREADS=4", "Use threads.omp"),
        ("env.A-B=1", "env.A-B: not a name of an environment variable"),
        ("env.X=${oc.env:SURELY_NOT_SET}", "env.X: cannot be resolved"),
        # what is no override at all
        ("foo", "'foo': not KEY=VALUE"),
        ("=x", "no key before the '='"),
        ("a=b=c", "'a=b=c': not KEY=VALUE"),
        ("study.name=a\0b", "NUL character"),
        ("~loader.batch_size", "nothing can be deleted"),
        ("hydra.run.dir=x", "Hydra's own settings"),
        ("hydra/launcher=x", "Hydra's own settings"),
        ("model@other=resnet18", "Hydra's own settings"),
    ],
)
def test_bad_overrides_are_refused_by_name(refused, text: str, message: str) -> None:
    problems = refused(text)
    assert any(message in problem for problem in problems), problems
    assert all("\n" not in problem for problem in problems)


def test_every_problem_of_one_input_is_in_one_message(refused) -> None:
    problems = refused("loader.batchsize=3", "tiers=exakt", "objective=latency", "search_space=no", "study.name=a/b", "foo")
    assert len(problems) == 6


def test_hydras_own_message_is_the_cause() -> None:
    with pytest.raises(BadInput) as caught:
        compose(["model=resnet18", "loader.batchsize=3"], command=None, facts=FACTS)
    assert isinstance(caught.value.__cause__, OmegaConfBaseException)
    assert "batchsize" in str(caught.value.__cause__)


def test_a_pin_and_a_sweep_of_one_key_contradict(refused) -> None:
    assert "pinned to one value and tuned" in refused("loader.num_workers=1", "loader.num_workers=1,2")[0]
    assert "two domains" in refused("loader.num_workers=0,1", "loader.num_workers=1,2")[0]


def test_pins_that_mean_nothing_beside_another_pin_contradict(refused) -> None:
    problems = refused("loader.num_workers=0", "loader.prefetch_factor=4", "loader.persistent_workers=true")
    assert len(problems) == 2
    assert "means nothing without workers" in problems[0]


def test_a_sweep_above_the_tier_bound_contradicts(refused) -> None:
    assert "tier is numerics" in refused("tiers=exact", "precision.amp=off,bf16")[0]


def test_nothing_to_tune_names_the_models() -> None:
    with pytest.raises(BadInput, match=r"nothing to tune\. Give model=NAME \(convnext_tiny"):
        compose([], command=None, facts=FACTS)


def test_a_command_has_no_use_for_a_recipes_keys(refused) -> None:
    problems = refused("model=resnet18", "train.lr=1", "program.python=python3", command=[PYTHON, "-c", "pass"])
    assert [problem.partition(":")[0] for problem in problems] == ["model", "train.lr", "program.python"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("loader.num_worker: auto\n", "Did you mean 'loader.num_workers'"),
        ("loader.num_workers: [0, 10000]\n", "more than this machine can serve"),
        ("loader.num_workers: []\n", "an empty domain"),
        ("loader.num_workers: 4\n", "not a domain, got 4"),
        ("loader.num_workers: 'choice('\n", "not KEY=VALUE"),
        ("env.X: auto\n", "not a domain, got 'auto'"),
        ("- 1\n", "not a mapping"),
        ("", "not a mapping"),
        ("a: [\n", "cannot be read"),
        ("!!python/object/apply:os.system ['true']\n", "cannot be read"),
    ],
)
def test_search_space_files_are_checked(refused, tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "space.yaml"
    path.write_text(content)
    problems = refused(f"search_space='{path}'")
    assert message in problems[0]
    assert str(path) in problems[0]


@pytest.mark.parametrize(
    ("content", "messages"),
    [
        (
            "loader: {batchsize: 3}\nprecision: {amp: fp8}\n",
            ["loader.batchsize: there is no such key", "precision.amp: no such value"],
        ),
        ("loader: 3\n", ["loader: a group of keys"]),
        ("evil: {_target_: os.system, _args_: [true]}\n", ["evil: there is no such key"]),
        ("env: {AUTOTUNE_SPEC: x, A: [1]}\n", ["env.AUTOTUNE_SPEC: not free", "env.A: not usable text"]),
        ("tiers: all\nstudy: {seed: x}\n", ["tiers: no such value", "study.seed: wrong type"]),
        ("- 1\n", ["not a mapping"]),
        ("a: [\n", ["not readable as YAML"]),
    ],
)
def test_configuration_files_are_checked_whole(refused, tmp_path: Path, content: str, messages: list[str]) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "best.yaml").write_text(f"# @package _global_\n{content}")
    problems = refused("+mine=best", config_dirs=[tmp_path])
    assert len(problems) == len(messages)
    for problem, message in zip(problems, messages, strict=True):
        assert message in problem
        assert str(tmp_path / "mine" / "best.yaml") in problem


def test_config_folders_and_their_files_must_exist(refused, tmp_path: Path) -> None:
    assert "--config-dir: no such folder" in refused(config_dirs=[tmp_path / "nosuch"])[0]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "best.yaml").write_text("# @package _global_\n")
    assert "Did you mean 'best'" in refused("+mine=bets", config_dirs=[tmp_path])[0]


TEXT = st.text(alphabet=st.sampled_from("ab.=,()[]{}'\"$~+@/\\: 019-_\0é\n"), max_size=24)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    st.one_of(TEXT, st.builds("{}={}".format, st.sampled_from(["loader.num_workers", "env.A", "study.name", "model"]), TEXT))
)
def test_no_text_gets_past_as_another_exception(text: str) -> None:
    with contextlib.suppress(BadInput):
        compose(["model=resnet18", text], command=None, facts=FACTS)
