"""Overrides and files become a configuration, a search space and a command."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import hydra
import pytest
import yaml
from hydra.core.global_hydra import GlobalHydra

import autotune
from autotune.config.best_file import read_best
from autotune.config.compose import compose
from autotune.config.locate import folder, options
from autotune.config.recipe import TRIAL_EPOCHS
from autotune.errors import BadInput
from autotune.knobs.base import HostContext
from autotune.knobs.catalogue import CATALOGUE
from autotune.machine import host_context
from autotune.records import Tier
from autotune.space import Choice, IntInterval, resolve
from tests.compositions import in_full, yaml_in_full, yaml_of

BEST = """\
# @package _global_
loader:
  batch_size: 64
  num_workers: 2
precision:
  amp: off
layout:
  channels_last: true
env:
  MALLOC_ARENA_MAX: "2"
provenance:
  study: resnet18
  speedup: {ratio: 1.9, ci: [1.8, 2.0]}
"""


@pytest.fixture(autouse=True)
def _composed_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotune.config.compose._hydra", in_full)
    monkeypatch.setattr("autotune.config.compose._yaml", yaml_in_full)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    (tmp_path / "resnet18-2").mkdir()
    (tmp_path / "resnet18-2" / "best.yaml").write_text(BEST)
    return tmp_path


IMAGE_MODELS = ("convnext_tiny", "efficientnet_b0", "resnet18", "resnet50", "vit_b_16")
TEXT_MODELS = ("bert_base", "gpt2_small", "llama_small")


@pytest.mark.parametrize("value", ["plain", "'1e3'", "'off'", "''", "'x: y #z'", "'äö \U0001f600'", f"'{'long ' * 60}'"])
def test_other_tests_get_the_same_yaml_as_from_omegaconf(monkeypatch: pytest.MonkeyPatch, make, value: str) -> None:
    words = ("model=resnet18", f"env.A={value}", "env.B='1.50'", "objective=[throughput,time_for_samples]")
    usual = make(*words, "study.samples=115e6").yaml
    monkeypatch.setattr("autotune.config.compose._yaml", yaml_of)
    assert make(*words, "study.samples=115e6").yaml == usual


def test_every_model_of_conf_is_composed_by_a_test() -> None:
    assert {*IMAGE_MODELS, *TEXT_MODELS, "mlp", "timm"} == set(options("model", [folder("conf")]))


@pytest.mark.parametrize("model", IMAGE_MODELS)
@pytest.mark.parametrize("data", ["photos", "fake_cifar", "folder", "synthetic"])
def test_every_image_model_is_composed_with_every_kind_of_images(make, tmp_path: Path, model: str, data: str) -> None:
    (tmp_path / "some_class").mkdir()
    (tmp_path / "some_class" / "image.png").touch()
    place = [f"data.root={tmp_path}"] if data == "folder" else []
    composed = make(f"model={model}", f"data={data}", *place)
    assert composed.config.model.name == model
    assert composed.config.data.name == data
    assert composed.command.parts[2:6] == ["--model", model, "--num-classes", "1000"]


@pytest.mark.parametrize("model", [*TEXT_MODELS, "mlp"])
def test_model_selects_its_default_kind_of_data(make, model: str) -> None:
    own = "tabular" if model == "mlp" else "text"
    composed = make(f"model={model}")
    assert composed.config.data.name == own
    parts = composed.command.parts
    assert Path(parts[1]).name == ("tabular.py" if model == "mlp" else "text.py")
    assert parts[2:4] == ["--model", model]
    assert parts[parts.index("--data") + 1] == own


@pytest.mark.parametrize(
    "words", [["model=mlp", "data=synthetic"], ["data=synthetic", "model=mlp"], ["data=tabular", "model=mlp", "data=synthetic"]]
)
def test_named_data_take_precedence_over_the_default_of_the_model(make, words: list[str]) -> None:
    composed = make(*words)
    assert composed.config.data.name == "synthetic"
    assert composed.command.placeholders == {"loader.batch_size": 32}


def test_sizes_reach_the_recipe_as_flags(make) -> None:
    sizes = [
        "model.num_layers=2",
        "model.hidden_size=64",
        "model.num_heads=4",
        "model.vocab_size=100",
        "data.sequence_length=16",
    ]
    parts = make("model=gpt2_small", *sizes).command.parts
    for flag, value in [
        ("num-layers", "2"),
        ("hidden-size", "64"),
        ("num-heads", "4"),
        ("vocab-size", "100"),
        ("sequence-length", "16"),
    ]:
        assert parts[parts.index(f"--{flag}") + 1] == value
    parts = make("model=mlp", "model.num_layers=2", "data.num_features=8").command.parts
    assert parts[parts.index("--num-layers") + 1] == "2"
    assert parts[parts.index("--num-features") + 1] == "8"


def test_batches_without_a_loader_take_their_size_from_the_command_line(make) -> None:
    command = make("model=resnet18", "data=synthetic").command
    assert command.placeholders == {"loader.batch_size": 32}
    parts = command.argv({"loader.batch_size": 64})
    assert parts[parts.index("--batch-size") + 1] == "64"
    assert "--batch-size" not in make("model=resnet18", "data=photos").command.parts


@pytest.mark.parametrize("name", options("search_spaces", [folder("search_spaces").parent]))
def test_every_search_space_is_read(make, name: str) -> None:
    domains = make(f"search_space={name}").space.domains
    assert domains
    assert all(domain is None for domain in domains.values())


def test_full_space_contains_every_knob_except_four(make) -> None:
    assert set(make("search_space=full").space.domains) == CATALOGUE.keys() - {
        "threads.omp", "threads.mkl", "threads.interop", "memory.fraction",
    }  # fmt: skip


@pytest.mark.parametrize("word", ["env.LD_PRELOAD=x.so", "env.LD_PRELOAD=choice(x.so,y.so)"])
def test_variable_on_the_command_line_removes_its_knob_from_a_named_space(make, word: str) -> None:
    space = make("search_space=memory", word).space
    assert "memory.malloc" not in space.domains
    assert "memory.allocator" in space.domains
    assert space.left_out == {"memory.malloc": "env.LD_PRELOAD sets the same variable"}
    assert resolve(space, HostContext(num_cores=2), passed={}).dropped.items() >= space.left_out.items()


def test_key_can_be_pinned_given_a_domain_or_left_to_the_search_space(make) -> None:
    space = make("loader.num_workers=2", "loader.batch_size=choice(16,32)").space
    assert space.pinned == {"loader.num_workers": 2}
    assert space.domains["loader.batch_size"] == Choice((16, 32))
    assert space.domains["layout.channels_last"] is None
    assert "loader.num_workers" not in space.domains


@pytest.mark.parametrize(
    ("text", "domain"),
    [
        ("loader.num_workers=choice(0,4,8)", Choice((0, 4, 8))),
        ("loader.num_workers=0,4,8", Choice((0, 4, 8))),
        ("loader.num_workers=range(0,16,4)", Choice((0, 4, 8, 12))),  # the stop is excluded, as in Hydra
        ("loader.num_workers=range(3)", Choice((0, 1, 2))),
        ("loader.num_workers=range(8,0,-4)", Choice((8, 4))),
        ("loader.num_workers=interval(1,8)", IntInterval(1, 8)),
        ("loader.batch_size=tag(log,interval(8,512))", IntInterval(8, 512, log=True)),
        ("loader.batch_size=tag(log, interval(8, 512))", IntInterval(8, 512, log=True)),
        ("loader.num_workers=choice(1,1,2)", Choice((1, 2))),
        ("precision.amp=choice(off,bf16)", Choice(("off", "bf16"))),
        ("precision.amp=choice(false,bf16)", Choice(("off", "bf16"))),
        ("compile.mode=off,reduce-overhead", Choice(("off", "reduce-overhead"))),
        ("layout.channels_last=true,false", Choice((True, False))),
        ("env.KMP_AFFINITY=choice('granularity=fine,compact',none)", Choice(("granularity=fine,compact", "none"))),
        ("env.FLAG=0,1", Choice(("0", "1"))),
        ("env.FLAG=choice(0.10, 1_0, True,'1.0')", Choice(("0.10", "1_0", "True", "1.0"))),
        ("env.FLAG=sort(0.2,0.1)", Choice(("0.1", "0.2"))),
    ],
)
def test_sweeps_become_domains(make, text: str, domain: object) -> None:
    assert make(text).space.domains[text.partition("=")[0]] == domain


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("env.A=0.10", "0.10"),
        ("env.A=true", "true"),
        ("env.A=007", "007"),
        ("env.A='a b, {c}'", "a b, {c}"),
        ('env.A="it\'s"', "it's"),
        ("env.A=", ""),
        ("+env.A=1", "1"),
        ("env.A=/usr/lib/libjemalloc.so.2", "/usr/lib/libjemalloc.so.2"),
    ],
)
def test_environment_variables_are_kept_literally_and_need_no_plus_sign(make, text: str, value: str) -> None:
    assert make(text).space.pinned == {"env.A": value}


@pytest.mark.parametrize("word", ["off", "false", "'off'", "Off"])
def test_off_and_false_mean_off_and_capitalized_off_is_refused(make, word: str) -> None:
    if word == "Off":
        with pytest.raises(BadInput):
            make(f"precision.amp={word}")
    else:
        assert make(f"precision.amp={word}").space.pinned == {"precision.amp": "off"}


def test_null_removes_a_pin(make) -> None:
    assert make("loader.num_workers=2", "loader.num_workers=null").space.pinned == {}


@pytest.mark.parametrize("name", ["2026_12_01", "1.10", "12e4", "true"])
def test_text_that_looks_like_a_number_is_taken_as_typed(make, name: str) -> None:
    config = make(f"study.name={name}", f"++tracker.experiment={name}", f"runs_dir={name}", "study.seed=1_0").config
    assert (config.study.name, config.tracker.experiment, config.runs_dir, config.study.seed) == (name, name, name, 10)


@pytest.mark.parametrize(("typed", "asked"), [("2026_12_01", "2026_12_01"), ("1.10", "1.10"), ("false", False)])
def test_a_study_whose_name_looks_like_a_number_can_start_a_search(make, typed: str, asked: object) -> None:
    assert make(f"search.warm_start={typed}").config.search.warm_start == asked


def test_off_in_a_file_switches_warm_starts_off(make, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "made.yaml").write_text("# @package _global_\nlaunch: {warm: off}\n")
    assert make("+mine=made", config_dirs=[tmp_path]).config.launch.warm == "off"


def test_options_reach_the_recipe_as_flags(make) -> None:
    parts = make(
        "train.lr=0.1", "train.optimizer=adamw", "study.seed=7", "device.kind=cpu", "model.image_size=64"
    ).command.parts
    assert parts[0] == sys.executable
    assert Path(parts[1]).parts[-2:] == ("programs", "vision.py")
    for flag, value in [
        ("--lr", "0.1"),
        ("--optimizer", "adamw"),
        ("--seed", "7"),
        ("--device", "cpu"),
        ("--image-size", "64"),
        ("--epochs", str(TRIAL_EPOCHS)),  # with fewer epochs, small data could end a trial before its measurement
    ]:
        assert parts[parts.index(flag) + 1] == value
    assert not {"--batch-size", "--num-workers"} & set(parts)


def test_command_is_kept_unchanged(make, tmp_path: Path) -> None:
    script = tmp_path / "train.v2.py"
    script.touch()
    composed = make(command=[sys.executable, str(script), "--epochs", "90"])
    assert not composed.command.is_recipe
    assert composed.command.argv({"loader.batch_size": 8}) == [sys.executable, str(script), "--epochs", "90"]
    assert composed.name == "train-v2"
    assert composed.title.endswith("--epochs 90")


def test_a_placeholder_is_tuned_even_when_the_space_does_not_name_it(make, tmp_path: Path) -> None:
    (tmp_path / "t.py").touch()
    command = [sys.executable, str(tmp_path / "t.py"), "{threads.omp=2}"]
    assert make("search_space=quick", command=command).space.domains["threads.omp"] is None
    assert "threads.omp" not in make("search_space=quick", "threads.omp=1", command=command).space.domains


def test_exported_file_composes_with_plain_hydra_and_with_autotune(make, runs: Path) -> None:
    with hydra.initialize_config_dir(str(runs / "resnet18-2"), version_base="1.3"):
        plain = hydra.compose("best")
    assert plain.loader.batch_size == 64
    composed = make("+resnet18-2=best", config_dirs=[runs])
    assert composed.space.pinned == {
        "loader.batch_size": 64,
        "loader.num_workers": 2,
        "precision.amp": "off",
        "layout.channels_last": True,
        "env.MALLOC_ARENA_MAX": "2",
    }
    assert composed.config.provenance["speedup"]["ratio"] == 1.9


@pytest.mark.parametrize("text", ["true", "True", "off", "1.10", "010", "0x10", "1_000", "1:30", "1e3", "2026-12-01"])
def test_variables_in_a_file_keep_their_spelling_in_run_and_apply(make, tmp_path: Path, text: str) -> None:
    """`run` passed "True" for true, `apply` "true"; 010 became "8" in both."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "best.yaml").write_text(f"# @package _global_\nenv: {{X: {text}}}\n")
    composed = make("+mine=best", config_dirs=[tmp_path])
    assert composed.space.pinned == {"env.X": text}
    assert composed.config.env == {"X": text}
    assert read_best(tmp_path / "mine" / "best.yaml").knobs == {"env.X": text}
    assert yaml.safe_load(composed.yaml)["env"] == {"X": text}


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("loader: {batch_size: 1e3}", "loader.batch_size: not a whole number, got '1e3'"),
        ("loader: {batch_size: 1.0e+3}", "loader.batch_size: wrong type, got 1000.0. Allowed: a whole number or null."),
        ("loader: {batch_size: 1:30}", "loader.batch_size: not a whole number, got '1:30'"),
        ("study: {budget: {minutes: 1:30}}", "study.budget.minutes: wrong type, got '1:30'. Allowed: a number or null."),
        ("env: {X: null}", "env.X: not usable text, got None"),
    ],
)
def test_numbers_in_a_file_that_only_yaml_reads_so_are_refused(refused, tmp_path: Path, line: str, problem: str) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "best.yaml").write_text(f"# @package _global_\n{line}\n")
    (said,) = refused("+mine=best", config_dirs=[tmp_path])
    assert problem in said


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("loader: {batch_size: 1.0e+3}", "loader.batch_size: wrong type, got 1000.0. Allowed: a whole number"),
        ("loader: {num_workers: 2.0}", "loader.num_workers: wrong type, got 2.0. Allowed: a whole number"),
        ("loader: {pin_memory: ' on '}", "loader.pin_memory: wrong type, got ' on '. Allowed: true or false"),
    ],
)
def test_values_in_a_file_are_refused_alike_by_run_and_apply(refused, tmp_path: Path, line: str, problem: str) -> None:
    """`apply` took them."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "best.yaml").write_text(f"# @package _global_\n{line}\n")
    (said,) = refused("+mine=best", config_dirs=[tmp_path])
    assert problem in said
    with pytest.raises(BadInput) as caught:
        read_best(tmp_path / "mine" / "best.yaml")
    assert [found.startswith(problem) for found in caught.value.problems] == [True]


def test_leading_zeros_in_a_file_mean_the_same_as_on_the_command_line(make, tmp_path: Path) -> None:
    """YAML 1.1 reads 016 as 14."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "best.yaml").write_text("# @package _global_\nloader: {batch_size: 016}\nstudy: {seed: 010}\n")
    composed = make("+mine=best", config_dirs=[tmp_path])
    assert (composed.space.pinned["loader.batch_size"], composed.config.study.seed) == (16, 10)
    assert make("loader.batch_size=016", "study.seed=010").space.pinned["loader.batch_size"] == 16


@pytest.mark.parametrize(
    ("words", "source", "name"),
    [
        (("model=timm/vit_tiny", "model=resnet50"), "torchvision", "resnet50"),
        (("model=timm/", "model=timm/vit_tiny", "model=torchvision/resnet34"), "torchvision", "resnet34"),
        (("model=resnet50", "model=torchvision/resnet34"), "torchvision", "resnet34"),
        (("model=torchvision/resnet34", "model.name=resnet50"), "torchvision", "resnet50"),
    ],
)
def test_last_of_several_models_is_the_one_that_is_tuned(make, words: tuple[str, ...], source: str, name: str) -> None:
    """The name of the first one was kept."""
    model = make(*words).config.model
    assert (model.source, model.name) == (source, name)


@pytest.mark.parametrize("word", ["+model=resnet50", "++model=resnet50", "+model=torchvision/resnet50"])
def test_model_typed_with_a_plus_is_the_one_that_is_tuned(make, word: str) -> None:
    assert make(word).config.model.name == "resnet50"
    assert make(word, "model=resnet18").config.model.name == "resnet18"


@pytest.mark.parametrize("plus", ["", "+", "++"])
def test_model_file_of_the_user_may_be_typed_with_a_plus(make, tmp_path: Path, plus: str) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("source: torchvision\nname: resnet50\n")
    assert make(f"{plus}model=mine", config_dirs=[tmp_path]).config.model.name == "resnet50"


@pytest.mark.parametrize(
    ("wrong", "right"),
    [("model=tim/vit_tiny", "model=resnet18"), ("model=resnt18", "model=resnet18"), ("data=fotos", "data=photos")],
)
def test_unknown_choice_is_refused_even_if_a_later_word_replaces_it(refused, wrong: str, right: str) -> None:
    """`model=tim/vit_tiny` was left out, as a known library is."""
    key, _, value = wrong.partition("=")
    (said,) = refused(wrong, right)
    assert said.startswith(f"{key}: no such {key}, got {value!r}.")


def test_device_typed_with_a_plus_is_known_before_values_are_checked(make, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def noted(*facts: Any, device: str, **more: Any) -> HostContext:
        asked.append(device)
        return host_context(*facts, device=device, **more)

    monkeypatch.setattr("autotune.config.compose.host_context_of", noted)
    make("device.kind=auto", "++device.kind=cpu")
    assert set(asked) == {"cpu"}


def test_misspelt_domain_typed_with_a_plus_is_corrected(refused) -> None:
    (said,) = refused("+loader.num_workers=choise(1,2)")
    assert said.startswith("loader.num_workers: not a value in Hydra's grammar")
    assert said.endswith("Values to try are written loader.num_workers=choice(1,2).")


def test_command_line_overrides_an_exported_file(make, runs: Path) -> None:
    space = make("+resnet18-2=best", "loader.num_workers=0,1", "loader.batch_size=8", config_dirs=[runs]).space
    assert space.pinned["loader.batch_size"] == 8
    assert space.domains["loader.num_workers"] == Choice((0, 1))
    assert "loader.num_workers" not in space.pinned


def test_folders_with_hostile_names_are_searched(make, runs: Path, tmp_path: Path) -> None:
    hostile = tmp_path / "a b'\"\\,[x]"
    shutil.copytree(runs / "resnet18-2", hostile / "mine")
    assert make("+mine=best", config_dirs=[hostile]).space.pinned["loader.batch_size"] == 64


def test_models_in_a_user_folder_are_found(make, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("name: resnet34\nimage_size: 96\n")
    composed = make("model=mine", config_dirs=[tmp_path])
    assert composed.config.model.name == "resnet34"
    assert composed.name == "resnet34"


def test_stored_configuration_keeps_references_to_the_environment(make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "s3cret")
    monkeypatch.setenv("MY_WORD", "plain")
    composed = make("env.WORD=${oc.env:MY_WORD}", "tracker.uri=http://${oc.env:MY_TOKEN}@host")
    assert composed.config.env["WORD"] == "plain"
    assert composed.config.tracker.uri == "http://s3cret@host"
    assert "s3cret" not in composed.yaml
    assert yaml.safe_load(composed.yaml)["env"]["WORD"] == "${oc.env:MY_WORD}"


@pytest.mark.parametrize(
    "word",
    [
        "env.MY_TOKEN=abc123",
        "env.MY_TOKEN=choice(abc123,beta)",
        "env.MY_TOKEN=${oc.env:OWN}",
        "env.PROXY=http://me:abc123@host",
    ],
)
def test_secret_values_of_environment_variables_are_refused(make, monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    monkeypatch.setenv("OWN", "abc123")
    with pytest.raises(BadInput) as caught:
        make(word)
    name = word.partition("=")[0]
    assert caught.value.problems == [
        f"{name}: a secret, which cannot be a setting. Leave it out, and set the variable {name.removeprefix('env.')} before "
        "autotune starts: each trial inherits it."
    ]


def test_secrets_in_a_search_space_or_placeholder_are_refused(make, tmp_path: Path) -> None:
    (tmp_path / "space.yaml").write_text("env.A_TOKEN: [abc123, beta]\n")
    command = [sys.executable, "-c", "pass", "--login={env.B_TOKEN=xyz}"]
    with pytest.raises(BadInput) as caught:
        make(f"search_space={tmp_path}/space.yaml", command=command)
    assert [problem.partition(":")[0] for problem in caught.value.problems] == ["env.A_TOKEN", "env.B_TOKEN"]


def test_variables_that_only_sound_secret_stay_settings(make) -> None:
    composed = make(
        "env.OMP_PROC_BIND=choice(true,false)", "env.TOKENIZERS_PARALLELISM=false", "env.USE_TOKEN=True", "env.KEY=12"
    )
    assert composed.space.domains["env.OMP_PROC_BIND"] == Choice(("true", "false"))
    pinned = {"TOKENIZERS_PARALLELISM": "false", "USE_TOKEN": "True", "KEY": "12"}
    assert composed.space.pinned == {f"env.{name}": value for name, value in pinned.items()}
    assert yaml.safe_load(composed.yaml)["env"] == pinned


def test_a_secret_in_the_command_reaches_the_program_and_no_title(make) -> None:
    composed = make(command=[sys.executable, "-c", "pass", "--api-key", "abc", "--lr={env.LR=0.1}"])
    assert composed.command.argv(composed.command.placeholders)[3:] == ["--api-key", "abc", "--lr=0.1"]
    assert composed.title == "python -c pass --api-key '***' '--lr={env.LR=0.1}'"


def test_search_space_can_be_given_as_a_path(make, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "loader.num_workers: [0, 2]\nprecision.amp: [off, bf16]\nthreads.intra: 'interval(1,4)'\nenv.X: 'choice(a,b)'\n"
    )
    assert make(f"search_space={path}").space.domains == {
        "loader.num_workers": Choice((0, 2)),
        "precision.amp": Choice(("off", "bf16")),
        "threads.intra": IntInterval(1, 4),
        "env.X": Choice(("a", "b")),
    }


def test_tiers_bound_the_search(make) -> None:
    assert make("tiers=exact").space.tiers is Tier.exact


def test_compose_leaves_the_hydra_of_the_calling_program_unchanged(make, runs: Path) -> None:
    with hydra.initialize_config_dir(str(runs / "resnet18-2"), version_base="1.2"):
        theirs = GlobalHydra.instance().hydra
        make()
        assert GlobalHydra.instance().hydra is theirs
        assert hydra.compose("best").loader.num_workers == 2


def test_several_threads_can_compose_at_once(make) -> None:
    found: list[int] = []
    threads = [threading.Thread(target=lambda n=n: found.append(make(f"study.seed={n}").config.study.seed)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == list(range(6))


def test_layout_of_a_wheel_works_like_a_checkout(tmp_path: Path) -> None:
    package = Path(autotune.__file__).parent
    shutil.copytree(package, tmp_path / "autotune", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("conf", "search_spaces"):  # as the build configuration's force-include does
        shutil.copytree(folder(name), tmp_path / "autotune" / name, dirs_exist_ok=True)
    code = (
        "from autotune.config.compose import compose; import autotune;"
        "print(autotune.__file__); compose(['model=vit_b_16'], command=None)"
    )
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
    )
    assert run.returncode == 0, run.stderr.decode()
    assert run.stdout.decode().startswith(str(tmp_path))


def test_composing_loads_no_torch_no_mlflow_and_no_optuna() -> None:
    code = (
        "import sys; from autotune.config.compose import compose; compose(['model=resnet18'], command=None);"
        "sys.exit(bool({'torch', 'mlflow', 'optuna'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-W", "error", "-c", code]).returncode == 0


def test_the_facts_of_this_host_are_used_when_none_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["model=resnet18", "threads.intra=200"]
    monkeypatch.setattr("autotune.config.compose.host_facts", lambda: {"num_cores": 256, "gpus": []})
    assert compose(words, command=None).space.pinned["threads.intra"] == 200
    monkeypatch.setattr("autotune.config.compose.host_facts", lambda: {"num_cores": 2, "gpus": []})
    with pytest.raises(BadInput, match=r"threads\.intra"):
        compose(words, command=None)


def user_file(folder: Path, name: str, text: str) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)


@pytest.mark.parametrize("name", ["resnet18.v2", "2026-11-21", "a.b.c-2", "train", "loader", "model", "data", "run_1"])
def test_file_of_a_study_with_any_name_can_be_selected(make, tmp_path: Path, name: str) -> None:
    user_file(tmp_path, f"{name}/best.yaml", BEST)
    assert make(f"+{name}=best", config_dirs=[tmp_path]).space.pinned["loader.batch_size"] == 64


def test_file_of_a_study_named_train_can_be_selected_with_a_command(make, tmp_path: Path) -> None:
    user_file(tmp_path, "train/best.yaml", BEST)
    command = [sys.executable, "-c", "pass"]
    assert make("+train=best", command=command, config_dirs=[tmp_path]).space.pinned["loader.batch_size"] == 64


def test_selected_file_may_not_set_recipe_keys_with_a_command(refused, tmp_path: Path) -> None:
    user_file(tmp_path, "mine/lr.yaml", "# @package _global_\ntrain: {lr: 0.1}\n")
    problems = refused("+mine=lr", command=[sys.executable, "-c", "pass"], config_dirs=[tmp_path])
    assert problems == ["train.lr: belongs to a built-in recipe, got '+mine=lr'. Leave it out, or leave out '-- COMMAND'."]


def test_user_folders_are_searched_in_order_and_before_conf(make, tmp_path: Path) -> None:
    user_file(tmp_path, "one/model/resnet18.yaml", "name: resnet34\n")
    user_file(tmp_path, "two/model/resnet18.yaml", "name: resnet50\n")
    user_file(tmp_path, "two/data/synthetic.yaml", "name: fake_cifar\n")
    config = make("model=resnet18", "data=synthetic", config_dirs=[tmp_path / "one", tmp_path / "two"]).config
    assert (config.model.name, config.data.name) == ("resnet34", "fake_cifar")


def test_unselected_files_in_a_user_folder_change_nothing(make, tmp_path: Path) -> None:
    for name in ("config.yaml", "study_config.yaml", "hydra/config.yaml", "data/photos.yaml"):
        user_file(tmp_path, name, "study: {seed: 99}\nname: synthetic\n")
    config = make("model=resnet18", config_dirs=[tmp_path]).config
    assert (config.study.seed, config.data.name) == (0, "photos")


@pytest.mark.parametrize(
    ("words", "name"),
    [(["model=resnet50", "model=mine"], "resnet34"), (["model=mine", "model=resnet50"], "resnet50")],
)
def test_last_choice_of_a_group_applies(make, tmp_path: Path, words: list[str], name: str) -> None:
    user_file(tmp_path, "model/mine.yaml", "name: resnet34\n")
    assert make(*words, config_dirs=[tmp_path]).config.model.name == name


def test_stored_configuration_keeps_references_of_a_selected_file(
    make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_WORD", "plain")
    user_file(tmp_path, "mine/word.yaml", "# @package _global_\nenv: {WORD: '${oc.env:MY_WORD}'}\n")
    composed = make("+mine=word", config_dirs=[tmp_path])
    assert composed.config.env == {"WORD": "plain"}
    assert "WORD: ${oc.env:MY_WORD}" in composed.yaml


def test_byte_order_mark_in_a_file_is_ignored(make, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "best.yaml").write_bytes(b"\xef\xbb\xbf" + BEST.encode())
    assert make("+mine=best", config_dirs=[tmp_path]).space.pinned["loader.batch_size"] == 64


@pytest.mark.parametrize(
    "name", ["a, b [c] {d}", 'it\'s "quoted"', "${oc.env:HOME}", "\\${x}", "$HOME", "a=b", "\\", "#x", "null", " x "]
)
def test_runs_folder_given_as_an_option_is_taken_literally(name: str) -> None:
    assert compose(["model=resnet18"], command=None, runs_dir=name).config.runs_dir == name


def test_tilde_in_a_path_is_expanded_to_the_home_folder(make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    config = make("runs_dir='~/runs'", "data.root='~/photos'").config
    assert config.runs_dir == f"{tmp_path}/runs"
    assert config.data.root == f"{tmp_path}/photos"


@pytest.mark.parametrize("has_driver", [False, True])
def test_cuda_is_refused_on_a_machine_without_a_gpu_driver(monkeypatch: pytest.MonkeyPatch, has_driver: bool) -> None:
    monkeypatch.setattr("autotune.config.checks.has_gpu_driver", lambda: has_driver)  # NVML may be missing even with a driver
    facts = {"num_cores": 4, "gpus": []}
    words = ["model=resnet18", "device.kind=cuda"]
    if has_driver:
        assert compose(words, command=None, facts=facts).config.device.kind == "cuda"
    else:
        with pytest.raises(
            BadInput,
            match=r"^device\.kind: this machine has neither a GPU nor a GPU driver, got 'cuda'\. Give device\.kind=cpu",
        ):
            compose(words, command=None, facts=facts)


def test_unknown_gpu_index_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {"num_cores": 4, "gpus": [{"name": "Fake"}, {"name": "Fake"}]}
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert compose(["model=resnet18", "device.index=1"], command=None, facts=facts).config.device.index == 1
    with pytest.raises(BadInput, match=r"device\.index: no such GPU, got 2\. Allowed: 0 to 1"):
        compose(["model=resnet18", "device.index=2"], command=None, facts=facts)


@pytest.mark.parametrize("node", [None, {"num_cores": 8, "gpus": [{"name": "Fake", "uuid": "GPU-7"}]}])
@pytest.mark.parametrize("visible", ["1", ""])
def test_visible_gpus_of_this_machine_say_nothing_about_a_node(
    monkeypatch: pytest.MonkeyPatch, visible: str, node: dict[str, Any] | None
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    here, pinned = {"num_cores": 4, "gpus": []}, ["model=resnet18", "loader.pin_memory=true"]
    on_node = compose([*pinned, "launcher=slurm"], command=None, facts=here, node=node)
    local = compose(pinned, command=None, facts=here)
    assert not [note for note in on_node.notes if "no CUDA device" in note]
    assert [note for note in local.notes if "no CUDA device" in note]
