import os
import subprocess
import sys

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from autotune.errors import BadInput
from autotune.export import FORMATS, export
from autotune.records import Tier

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
    exact = {"trial": 3, "value": 110.0, "ci": None, "overrides": {"loader.num_workers": 4}}
    best = {"trial": 7, "value": 180.0, "ci": [178.0, 182.0], "overrides": OVERRIDES, "knobs": OVERRIDES}
    return {
        "study": "s", "title": "python train.py --out ${HOME}", "status": "complete", "objective": "throughput",
        "unit": "samples", "machine": {"cpu_model": "Fake CPU", "num_cores": 4, "gpus": []},
        "baseline": {"trial": 0, "value": 100.0, "ci": [99.0, 101.0], "knobs": {}}, "best": best,
        "best_by_tier": {"exact": exact, "numerics": best, "training": best},
        "speedup": {"ratio": 1.8, "ci": [1.75, 1.85], "verdict": "faster", "reason": ""},
        "fingerprint": "abc", "versions": {"torch": "2.14.1"}, "started_at": 1_750_000_000.0,
        "pinned": {"loader.batch_size": 64},
        "trials": [{"number": 0, "value": 98.0}, {"number": 3, "value": 110.0}, {"number": 7, "value": 180.0}],
    }  # fmt: skip


def test_yaml_begins_with_the_package_line_and_says_what_it_claims(summary):
    text = export(summary, "yaml", None)
    assert text.startswith("# @package _global_\n")
    assert "# 1.800 x the baseline, 95 % interval 1.750 to 1.850: faster" in text
    assert "# Measured on Fake CPU, 4 cores, 2025-06-15." in text


def test_yaml_keeps_off_a_word_and_pins_beside_the_changes(summary):
    text = export(summary, "yaml", None)
    document = OmegaConf.to_container(OmegaConf.create(text))
    assert document["precision"]["amp"] == "off"
    assert document["loader"] == {"batch_size": 64, "num_workers": 4, "pin_memory": True}
    assert document["env"] == {"MALLOC_ARENA_MAX": "2"}
    assert document["provenance"]["speedup"]["ratio"] == 1.8


def test_yaml_loads_with_plain_hydra_whatever_the_title_holds(summary, tmp_path):
    (tmp_path / "runs" / "s").mkdir(parents=True)
    (tmp_path / "runs" / "s" / "best.yaml").write_text(export(summary, "yaml", None))
    (tmp_path / "runs" / "main.yaml").write_text("loader: {num_workers: 0}\nmodel: mine\n")
    with initialize_config_dir(str(tmp_path / "runs"), version_base="1.3"):
        config = compose("main", overrides=["+s=best"])
    assert config.loader.num_workers == 4
    assert config.model == "mine"
    assert config.provenance.title == "python train.py --out ${HOME}"


def test_env_exports_variables_and_names_what_is_none(summary, tmp_path):
    file = tmp_path / "best.env"
    file.write_text(export(summary, "env", None))
    shown = subprocess.run(
        ["sh", "-c", f". {file} && echo $OMP_NUM_THREADS $MALLOC_ARENA_MAX"],
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout.split() == ["2", "2"]
    assert "# loader.num_workers=4 is no environment variable" in file.read_text()


def test_python_defines_a_dictionary_and_how_each_knob_is_set(summary):
    text = export(summary, "python", None)
    source = f"{text}\nassert BEST['loader.num_workers'] == 4 and BEST['precision.amp'] == 'off'"
    subprocess.run([sys.executable, "-c", source], check=True)
    assert "# DataLoader(..., num_workers=4)" in text
    assert "torch.compile(model, mode='reduce-overhead')" in text
    assert "before Python starts: OMP_NUM_THREADS=2" in text


def test_tier_picks_its_own_best_and_says_how_it_was_measured(summary):
    text = export(summary, "yaml", Tier.exact)
    document = OmegaConf.to_container(OmegaConf.create(text))
    assert "precision" not in document
    assert document["provenance"]["trial"] == 3
    assert "1.122 x the baseline, no interval: ambiguous (from the search: one measurement, picked as the best" in text


def test_unknown_format_names_the_nearest(summary):
    with pytest.raises(BadInput, match=r"--format: no such format, got 'yml'\. Did you mean 'yaml'\?"):
        export(summary, "yml", None)


@pytest.mark.parametrize("format", sorted(FORMATS))
def test_a_study_without_winner_cannot_be_exported(summary, format):
    summary["best"] = None
    with pytest.raises(BadInput, match="has no winner to export, got 's' \\(complete\\)"):
        export(summary, format, None)


@pytest.mark.parametrize("format", sorted(FORMATS))
def test_a_baseline_that_won_is_a_valid_file_that_changes_nothing(summary, format):
    summary["best"] = {"trial": 0, "value": 100.0, "ci": None, "overrides": {}, "knobs": {}}
    summary["pinned"] = {}
    assert "nothing to change" in export(summary, format, None)


def test_measured_values_have_the_digits_they_are_worth_and_knobs_all_of_theirs(summary):
    summary["baseline"] |= {"value": 12345.678912, "ci": [12300.123456, 12391.98765]}
    summary["pinned"] = {"loader.batch_size": 1048576}
    text = export(summary, "yaml", None)
    assert "# 12,346 samples/s -> 180.0 samples/s" in text
    document = OmegaConf.to_container(OmegaConf.create(text))
    assert document["provenance"]["baseline"] == {"value": 12346.0, "ci": [12300.0, 12392.0]}
    assert document["loader"]["batch_size"] == 1048576


def test_text_that_looks_like_a_reference_stays_text(summary, tmp_path):
    summary["pinned"] = {"env.A": "${oc.env:HOME}", "env.B": "\\${x}", "env.C": "$HOME"}
    (tmp_path / "best.yaml").write_text(export(summary, "yaml", None))
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        config = compose("best")
    assert (config.env.A, config.env.B, config.env.C) == ("${oc.env:HOME}", "\\${x}", "$HOME")


@pytest.mark.parametrize("format", sorted(FORMATS))
def test_a_title_of_several_lines_stays_a_comment(summary, format):
    summary["title"] = "python -c 'x'\nloader: {num_workers: 99}\nexport EVIL=1\nimport os"
    lines = export(summary, format, None).splitlines()
    assert not any(line.startswith(("loader: {num_workers: 99}", "export EVIL", "import os")) for line in lines)


def test_yaml_says_what_each_change_is_worth_and_what_bought_nothing(summary):
    worth = {"ratio": 1.4, "ci": [1.35, 1.45], "verdict": "faster", "reason": ""}
    summary["attribution"] = [
        {"knob": "loader.num_workers", "from": 0, "to": 4, **worth},
        {"knob": "precision.amp", "ratio": None, "ci": None, "verdict": "not separated", "reason": "no time"},
    ]
    summary["minimality"] = {"dropped": [{"knob": "threads.intra", **worth, "ratio": 1.0, "verdict": "same"}]}
    text = export(summary, "yaml", None)
    assert "# loader.num_workers: faster, 1.400 x, 1.350 to 1.450\n" in text
    assert "# precision.amp: not separated, no time\n" in text
    assert "# Bought nothing, so left as they were: threads.intra.\n" in text
    provenance = OmegaConf.to_container(OmegaConf.create(text))["provenance"]
    assert provenance["attribution"]["loader.num_workers"] == {"ratio": 1.4, "ci": [1.35, 1.45], "verdict": "faster"}
    assert provenance["bought_nothing"]["threads.intra"]["verdict"] == "same"
    assert "Bought nothing" not in export(summary, "yaml", Tier.exact)
