import json
import os
import re
import shlex
import subprocess

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from autotune.config.best_file import read_best
from autotune.config.command import CommandTemplate
from autotune.errors import BadInput
from autotune.export import accelerate
from autotune.export.formats import DOCUMENTS, FORMATS, render
from autotune.knobs import malloc
from autotune.records import Tier


def loaded(text):
    return OmegaConf.to_container(OmegaConf.create(text), resolve=True)


def test_yaml_starts_with_the_package_line_and_describes_the_result(summary):
    text = render(summary, "yaml", None).text
    assert text.startswith("# @package _global_\n")
    assert "# 1.800 x the baseline, 95 % interval 1.750 to 1.850: faster" in text
    assert "\n    ci: [178.0, 182.0]\n" in text
    assert "# Measured on Fake CPU, 4 cores, 2025-06-15, torch 2.14.1, autotune 0.1.0." in text


def test_yaml_quotes_off_and_contains_pins_and_changes(summary):
    text = render(summary, "yaml", None).text
    document = loaded(text)
    assert document["precision"]["amp"] == "off"
    assert document["loader"] == {"batch_size": 64, "num_workers": 4, "pin_memory": True}
    assert document["env"] == {"MALLOC_ARENA_MAX": "2"}
    assert document["provenance"]["speedup"]["ratio"] == 1.8
    assert "  batch_size: 64  # pinned by you, in the baseline too\n" in text
    assert "  num_workers: 4  # was 0\n" in text


def test_yaml_loads_with_plain_hydra_for_any_title(summary, tmp_path):
    (tmp_path / "runs" / "s").mkdir(parents=True)
    (tmp_path / "runs" / "s" / "best.yaml").write_text(render(summary, "yaml", None).text)
    (tmp_path / "runs" / "main.yaml").write_text("loader: {num_workers: 0}\nmodel: mine\n")
    with initialize_config_dir(str(tmp_path / "runs"), version_base="1.3"):
        config = compose("main", overrides=["+s=best"])
    assert config.loader.num_workers == 4
    assert config.model == "mine"
    assert config.provenance.title == "python train.py --out ${HOME}"


def test_yaml_provenance_names_machine_program_tiers_and_caveats(summary):
    target = [{"site": "/home/me/train.py:40", "ordinal": 0, "code": "train.py:main:1f", "nth": 0}]
    gpu = {"name": "NVIDIA H100", "driver": "580.65"}
    summary["machine"] |= {"gpus": [gpu, gpu], "device": "cuda", "device_name": "NVIDIA H100", "cuda": "13.0"}
    summary |= {
        "target": target, "detected": {"optimizers": ["AdamW"], "modules": ["Net"], "world_size": 2},
        "parity": {"verdict": "not checked", "text": "not checked: the program was not seen to call backward()"},
        "command": ["torchrun", "train.py", "--lr", "${LR}"], "cwd": "/home/me", "is_recipe": False, "placeholders": {},
        "identity": {"space.loader.num_workers": {}, "space.backend.cudnn_benchmark": {}, "machine.num_cores": 4},
        "disturbed_by": {"words": "other programs took 1.0 core"}, "drift": "ran at 405 first",
    }  # fmt: skip
    text = render(summary, "yaml", None).text
    said = loaded(text)["provenance"]
    assert (said["device"], said["driver"], said["cuda"]) == ("NVIDIA H100", "580.65", "13.0")
    assert said["program"] == {
        "command": ["torchrun", "train.py", "--lr", "${LR}"], "cwd": "/home/me", "python": "3.11.7",
        "optimizers": ["AdamW"], "modules": ["Net"], "world_size": 2,
    }  # fmt: skip
    assert said["target"] == target
    assert said["tiers"]["exact"]["changes"] == ["loader.num_workers"]
    assert said["tiers"]["numerics"]["ci"] == [1.75, 1.85]
    assert said["parity"].startswith("not checked: ")
    assert said["left_alone"] == ["backend.cudnn_benchmark"]
    assert said["caveats"] == ["disturbed while it was measured: other programs took 1.0 core", "ran at 405 first"]
    assert "# Loss parity: not checked: " in text
    assert "# Note: disturbed while it was measured: " in text


@pytest.mark.parametrize("format", FORMATS)
def test_program_arguments_are_shown_with_the_exported_values(summary, format):
    summary |= {
        "command": ["python", "train.py", "--workers={loader.num_workers=0}"],
        "placeholders": {"loader.num_workers": 0},
    }
    exported = render(summary, format, None)
    line = "Some of these settings are command-line arguments of the program: python train.py --workers=4"
    assert (line in exported.text) or (format == "deepspeed" and line in exported.header)
    if format == "yaml":
        assert loaded(exported.text)["provenance"]["program"]["placeholders"] == {"loader.num_workers": 0}


def test_env_exports_variables_and_lists_settings_that_are_not_variables(summary, tmp_path):
    file = tmp_path / "best.env"
    exported = render(summary, "env", None)
    file.write_text(exported.text)
    shown = subprocess.run(
        ["sh", "-c", f". {shlex.quote(str(file))} && env"],
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=True,
    )
    assert {"OMP_NUM_THREADS=2", "MALLOC_ARENA_MAX=2"} <= set(shown.stdout.splitlines())
    assert "loader.num_workers=4: DataLoader(..., num_workers=4)" in exported.left_out
    assert "#   loader.num_workers=4: DataLoader(..., num_workers=4)\n" in exported.text


def test_env_preloads_the_allocator_of_the_node_on_which_it_was_measured(changed, monkeypatch):
    """On a login node without the library, the file had no LD_PRELOAD; with another path there, it had a wrong one."""
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    monkeypatch.setattr(malloc, "installed_here", lambda: {"tcmalloc": "/login/libtcmalloc.so.4"})
    summary = changed({"memory.malloc": "jemalloc"})
    summary["machine"]["allocators"] = {"jemalloc": "/node/libjemalloc.so.2"}
    assert "\nexport LD_PRELOAD=/node/libjemalloc.so.2\n" in render(summary, "env", None).text
    assert malloc.installed() == {"tcmalloc": "/login/libtcmalloc.so.4"}
    del summary["machine"]["allocators"]
    assert "export LD_PRELOAD" not in render(summary, "env", None).text


def test_yaml_shows_the_tier_of_the_changes_and_the_allowed_tier(summary):
    summary["trials"][2]["tier"] = "exact"
    text = render(summary, "yaml", None).text
    said = loaded(text)["provenance"]
    assert (said["tier"], said["tier_of_changes"]) == ("training", "exact")
    assert "# Tier of the changes: exact." in text.splitlines()
    assert "# `tier` is the highest tier that was allowed, `tier_of_changes` is the tier of what this file changes." in text
    del summary["trials"][2]["tier"]
    assert "tier_of_changes" not in loaded(render(summary, "yaml", None).text)["provenance"], "an older summary lacks it"


def test_tier_option_exports_the_best_of_that_tier_and_its_measurement(summary):
    text = render(summary, "yaml", Tier.exact).text
    document = loaded(text)
    assert "precision" not in document
    assert document["provenance"]["trial"] == 3
    said = text.replace("\n#   ", " ")  # long comments are wrapped
    assert "1.122 x the baseline, no interval: ambiguous (from the search: a single measurement, likely overstated" in said


@pytest.mark.parametrize("format", FORMATS)
def test_file_says_if_no_configuration_of_the_tier_was_measured(summary, format):
    baseline = {"trial": 0, "value": 100.0, "ci": [99.0, 101.0], "overrides": {}}
    summary["best_by_tier"]["exact"] = baseline
    summary["speedup"] |= {"overrides": summary["best"]["overrides"]}
    summary["trials"] = [{"number": 0, "value": 98.0}, {"number": 7, "value": 180.0, "tier": "numerics"}]
    exported = render(summary, format, Tier.exact)
    text = "\n".join([exported.text, *exported.header, *exported.notes])
    assert "the best configuration up to tier exact found for python train.py" in text
    assert "Up to tier exact, only the baseline was measured, which is the program as it was run" in text
    assert "The best of all tiers is 1.800 x the baseline, with " in text
    for contradiction in ("was better than", "was kept", "faster"):
        assert contradiction not in " ".join([*exported.header, *(line for line in text.splitlines() if line[:1] == "#")])
    if format == "yaml":
        said = loaded(exported.text)["provenance"]
        assert (said["speedup"]["ratio"], said["speedup"]["verdict"]) == (None, "none")
        assert said["tiers"]["exact"]["verdict"] == "none"


def test_file_says_if_all_configurations_of_the_tier_lost(summary):
    summary["best_by_tier"]["exact"] = {"trial": 0, "value": 100.0, "ci": None, "overrides": {}}
    summary["trials"][1]["tier"] = "exact"
    text = render(summary, "env", Tier.exact).text
    assert "# Nothing measured up to tier exact was better than the program as it was run" in text
    assert "The baseline was kept" not in text


def test_error_for_an_unknown_format_names_the_nearest_one(summary):
    with pytest.raises(BadInput, match=r"--format: no such format, got 'yml'\. Did you mean 'yaml'\?"):
        render(summary, "yml", None)


@pytest.mark.parametrize("format", FORMATS)
def test_a_study_without_winner_cannot_be_exported(summary, format):
    summary["best"] = None
    with pytest.raises(BadInput, match=r"has no winner to export, got 's' \(complete\)\. `autotune show s` lists"):
        render(summary, format, None)


def test_error_for_a_tier_without_winner_names_the_tier(summary):
    summary["best_by_tier"].pop("exact", None)
    with pytest.raises(BadInput, match="has no winner up to tier exact to export"):
        render(summary, "yaml", Tier.exact)


@pytest.mark.parametrize("format", FORMATS)
def test_a_winning_baseline_is_exported_as_a_file_without_changes(summary, format):
    summary["best"] = {"trial": 0, "value": 100.0, "ci": None, "overrides": {}, "knobs": {}}
    summary["pinned"] = {}
    exported = render(summary, format, None)
    assert "nothing to change" in exported.text + "".join(exported.header)
    assert exported.left_out == []


def test_measured_values_are_rounded_and_knob_values_are_not(summary):
    summary["baseline"] |= {"value": 12345.678912, "ci": [12300.123456, 12391.98765]}
    summary["pinned"] = {"loader.batch_size": 1048576}
    text = render(summary, "yaml", None).text
    assert "# 12,346 samples/s -> 180.0 samples/s" in text
    document = loaded(text)
    assert document["provenance"]["baseline"] == {"value": 12346.0, "ci": [12300.0, 12392.0]}
    assert document["loader"]["batch_size"] == 1048576


def test_values_that_look_like_references_are_not_interpolated(summary, tmp_path):
    values = {"env.A": "${oc.env:HOME}", "env.B": "\\${x}", "env.C": "$HOME", "env.D": "two\nlines", "env.E": "a # b: c"}
    summary["pinned"] = values
    (tmp_path / "best.yaml").write_text(render(summary, "yaml", None).text)
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        config = compose("best")
    assert {f"env.{name}": config.env[name] for name in "ABCDE"} == values


@pytest.mark.parametrize("format", FORMATS)
def test_a_title_of_several_lines_stays_a_comment(summary, format):
    evil = "python -c 'x'\nloader: {num_workers: 99}\nexport EVIL=1\nimport os"
    summary["title"] = evil
    summary["baseline"]["knobs"]["env.MALLOC_ARENA_MAX"] = evil
    summary["best"]["overrides"]["env.MINE"] = evil
    exported = render(summary, format, None)
    if format == "env":  # a quoted value may contain line breaks
        shell = ["sh", "-c", 'eval "$1" && env -0', "sh", exported.text]
        shown = subprocess.run(shell, env={"PATH": os.environ["PATH"]}, capture_output=True, text=True, check=True).stdout
        variables = dict(line.split("=", 1) for line in shown.split("\0") if line)
        assert variables["MINE"] == evil
        assert "EVIL" not in variables
        return
    lines = exported.text.splitlines()
    assert not any(line.startswith(("loader: {num_workers: 99}", "export EVIL", "import os")) for line in lines)
    assert all("\n" not in line for line in exported.left_out)


def test_yaml_shows_the_gain_of_each_change_and_reverted_changes(summary):
    worth = {"ratio": 1.4, "ci": [1.35, 1.45], "verdict": "faster", "reason": ""}
    summary["attribution"] = [
        {"knob": "loader.num_workers", "from": 0, "to": 4, **worth},
        {"knob": "precision.amp", "ratio": None, "ci": None, "verdict": "not measured", "reason": "no time"},
    ]
    summary["minimality"] = {"dropped": [{"knob": "threads.intra", **worth, "ratio": 1.0, "verdict": "same"}]}
    text = render(summary, "yaml", None).text
    assert "  num_workers: 4  # was 0; 1.400 x [1.350, 1.450]\n" in text
    assert '  amp: "off"  # not measured (no time)\n' in text
    assert "# Reverted, because they had no clear effect: threads.intra.\n" in text
    provenance = loaded(text)["provenance"]
    assert provenance["attribution"]["loader.num_workers"] == {"ratio": 1.4, "ci": [1.35, 1.45], "verdict": "faster"}
    assert provenance["without_effect"]["threads.intra"]["verdict"] == "same"
    assert "Reverted, because" not in render(summary, "yaml", Tier.exact).text


@pytest.mark.parametrize("format", [name for name in FORMATS if name != "yaml"])
def test_a_pin_without_effect_on_the_winner_is_left_out(changed, format):
    summary = changed({"loader.num_workers": 0}, pinned={"loader.prefetch_factor": 4})
    exported = render(summary, format, None)
    assert "prefetch_factor" not in exported.text
    assert "prefetch_factor" in render(summary, "yaml", None).text  # `verify` has to know all pins


@pytest.mark.parametrize("format", DOCUMENTS)
def test_every_knob_of_the_winner_is_exported_or_listed_as_left_out(summary, format):
    exported = render(summary, format, None)
    values = {"loader.batch_size": "batch_size", "loader.num_workers": "num_workers", "loader.pin_memory": "pin_memory"}
    amp = {"hf": "bf16", "lightning": "32-true", "accelerate": "mixed_precision", "deepspeed": "torch_autocast"}[format]
    words = {**values, "compile.mode": "reduce-overhead", "precision.amp": amp, "threads.omp": "OMP_NUM_THREADS=2"}
    for key, word in words.items():
        is_left_out = any(line.startswith(f"{key}=") for line in exported.left_out)
        assert is_left_out or word in exported.text, key
    assert any("OMP_NUM_THREADS=2" in line for line in exported.left_out)
    assert any(line.startswith("env.MALLOC_ARENA_MAX=2: ") for line in exported.left_out)


def test_notes_replace_the_comments_in_json_files(summary):
    exported = render(summary, "lightning", None, file="best.json")
    assert json.loads(exported.text) == {"trainer": {"precision": "32-true"}}
    assert any('"num_workers": 4' in note for note in exported.notes)


def test_hugging_face_export_sets_the_optimizer_for_adamw_only(changed):
    for optimizers, device, value, name in (
        (["AdamW"], "cpu", "fused", "adamw_torch_fused"),
        (["AdamW"], "cuda", "foreach", "adamw_torch"),
        (["AdamW"], "cpu", "default", "adamw_torch"),
        (["AdamW"], "cpu", "foreach", None),
        (["SGD"], "cuda", "fused", None),
        ([], "cuda", "fused", None),
    ):
        summary = changed({"optimizer.implementation": value}, device, detected={"optimizers": optimizers})
        exported = render(summary, "hf", None, file="x.json")
        assert json.loads(exported.text).get("optim") == name
        assert bool(exported.left_out) is (name is None)


def test_hugging_face_export_sets_tf32_as_measured_if_the_model_is_compiled(changed):
    summary = changed({"compile.mode": "default"}, "cuda")
    for matmul, expected in (("highest", False), ("high", True), ("medium", None)):
        summary["baseline"]["knobs"]["precision.matmul"] = matmul
        assert json.loads(render(summary, "hf", None, file="x.json").text).get("tf32") is expected


def test_hugging_face_export_gives_the_batch_size_of_one_gpu_under_data_parallel(changed):
    for num_replicas, expected in ((4, 16), (1, 64), (None, 64), (3, None)):
        summary = changed({"loader.batch_size": 64}, "cuda", detected={"num_replicas": num_replicas})
        exported = render(summary, "hf", None, file="x.json")
        assert json.loads(exported.text).get("per_device_train_batch_size") == expected
        assert bool(exported.left_out) is (expected is None)


def test_hugging_face_export_turns_off_the_other_16_bit_format(changed):
    for value, formats in (("fp16", (True, False)), ("bf16", (False, True)), ("off", (False, False))):
        said = json.loads(render(changed({"precision.amp": value}, "cuda"), "hf", None, file="x.json").text)
        assert (said["fp16"], said["bf16"]) == formats


def test_accelerate_export_of_several_machines_says_how_to_start_on_each(changed):
    summary = changed({"precision.amp": "bf16"}, "cuda", detected={"world_size": 16})
    summary["machine"]["num_nodes"] = 2
    exported = render(summary, "accelerate", None, file="x.json")
    said = json.loads(exported.text)
    assert (said["num_machines"], said["num_processes"]) == (2, 16)
    assert any("on each of them, with --machine_rank (0 to 1)" in note for note in exported.notes)


def test_accelerate_export_contains_the_number_of_processes(changed):
    for device, kind in (("cuda", "MULTI_GPU"), ("cpu", "MULTI_CPU")):
        summary = changed({"precision.amp": "bf16"}, device, detected={"world_size": 4})
        said = json.loads(render(summary, "accelerate", None, file="x.json").text)
        assert (said["distributed_type"], said["num_processes"], said["use_cpu"]) == (kind, 4, device == "cpu")
        assert accelerate.SHARDED not in render(summary, "accelerate", None).text
        summary["baseline"]["knobs"]["parallel.strategy"] = "fsdp"
        assert accelerate.SHARDED in render(summary, "accelerate", None).text
        del summary["baseline"]["knobs"]["parallel.strategy"]


@pytest.mark.parametrize("format", ["hf", "lightning", "deepspeed", "accelerate", "env", "python"])
def test_exported_accumulation_includes_the_programs_own(changed, format):
    def exported(detected, **more):
        return (
            render(changed({"step.accumulation": 2}, detected=detected, **more), format, None)
            .text.replace("'", "")
            .replace('"', "")
        )

    key = {"hf": "gradient_accumulation_steps: 8", "lightning": "accumulate_grad_batches: 8"}.get(format, "(loss / 8)")
    key = "gradient_accumulation_steps: 8" if format == "deepspeed" else key
    assert key in exported({"batches_per_step": 4.03})
    assert key.replace("8", "2") in exported({"batches_per_step": 1.2})
    assert key.replace("8", "2") in exported({})
    pinned = {"trial": 0, "value": 100.0, "ci": None, "knobs": {"step.accumulation": 2}}
    assert key in exported({"batches_per_step": 8.14}, baseline=pinned)


def test_yaml_keeps_the_accumulation_and_names_the_programs_own(changed):
    text = render(changed({"step.accumulation": 2}, detected={"batches_per_step": 4.03}), "yaml", None).text
    assert "accumulation: 2" in text
    words = "The program itself accumulates 4 batches per step, and step.accumulation=2 multiplies that: 8 batches per step"
    assert words in text


@pytest.mark.parametrize(("batch", "accumulation"), [(128, 2), (256, 1)])
def test_accumulation_that_the_command_passes_keeps_the_global_batch(changed, batch, accumulation, tmp_path):
    own = {"loader.batch_size": 64, "step.accumulation": 4}
    passed = ["--batch={loader.batch_size=64}", "--accum={step.accumulation=4}"]
    summary = changed({"loader.batch_size": batch}, settings={"train.global_batch": 256}, placeholders=own, command=passed)
    summary["baseline"]["knobs"] = dict(own)
    exported = render(summary, "yaml", None).text
    assert f"arguments of the program: --batch={batch} --accum={accumulation}" in exported.replace("\n#   ", " ")
    (tmp_path / "best.yaml").write_text(exported)
    best = read_best(tmp_path / "best.yaml")
    assert CommandTemplate(parts=passed, placeholders=own).argv(best.knobs) == [f"--batch={batch}", f"--accum={accumulation}"]


def test_deepspeed_export_contains_the_baseline_batch_size_or_a_note(changed):
    summary = changed({"precision.amp": "bf16"})
    exported = render(summary, "deepspeed", None)
    assert json.loads(exported.text)["train_micro_batch_size_per_gpu"] == 64
    assert any("weights in bf16" in note for note in exported.notes)
    assert any("no ZeRO settings" in note for note in exported.notes)
    summary["baseline"]["knobs"] = {}
    assert any("DeepSpeed needs it" in note for note in render(summary, "deepspeed", None).notes)


def test_deepspeed_export_gives_the_batch_size_of_one_gpu_under_data_parallel(changed):
    for overrides in ({"loader.batch_size": 64}, {"precision.amp": "bf16"}):
        for num_replicas, expected in ((4, 16), (None, 64), (3, None)):
            exported = render(changed(overrides, "cuda", detected={"num_replicas": num_replicas}), "deepspeed", None)
            assert json.loads(exported.text).get("train_micro_batch_size_per_gpu") == expected
            assert any("DeepSpeed needs it" in note for note in exported.notes) is (expected is None)


@pytest.mark.parametrize(
    ("trials", "verdict"),
    [
        ([], "none"),
        ([{"number": 1, "value": 90.0, "changed": {"a": 1}}], "same"),
        ([{"number": 1, "kind": "check", "value": 140.0, "changed": {"a": 1}}], "none"),
    ],
)
def test_verdict_is_none_if_only_the_baseline_was_measured(summary, trials, verdict):
    summary["best"] = {**summary["baseline"], "overrides": {}}
    summary |= {"best_by_tier": {}, "trials": [{"number": 0, "value": 98.0, "changed": {}}, *trials]}
    text = render(summary, "yaml", None).text
    assert ("Only the baseline was measured" in text) == (verdict == "none")
    assert loaded(text)["provenance"]["speedup"]["verdict"] == verdict


def test_header_of_a_file_without_comments_is_not_repeated_in_notes(summary):
    exported = render(summary, "deepspeed", None)
    assert exported.header[0].startswith("autotune: the best configuration")
    assert not set(exported.header) & set(exported.notes)


def test_long_comments_are_wrapped_and_not_cut(summary):
    advice = " ".join(f"word{number}" for number in range(60))
    summary |= {"drift": advice}
    comments = [line for line in render(summary, "yaml", None).text.splitlines() if line.startswith("#")]
    assert advice in " ".join(" ".join(line.lstrip("# ") for line in comments).split())
    assert max(map(len, comments)) <= 162


@pytest.mark.parametrize("format", [format for format in FORMATS if format != "yaml"])
def test_export_sets_fork_if_the_trial_had_to_fork_its_workers(forked, format):
    exported = render(forked, format, None)
    said = "\n".join([exported.text, *exported.left_out])
    assert re.search(r"multiprocessing_context['\"]?(=|: )['\"]?fork\b", said)
    del forked["best"]["worker_start"]  # the workers started as the program starts them
    assert "multiprocessing_context" not in render(forked, format, None).text


def test_yaml_does_not_set_how_workers_start(forked):
    assert loaded(render(forked, "yaml", None).text)["loader"] == {"num_workers": 2}


def test_hugging_face_export_names_the_argument_for_the_start_of_workers(forked, changed):
    line = "With transformers 5.15 or later, add the line `dataloader_multiprocessing_context: {}`."
    assert line.format("fork") in render(forked, "hf", None).text
    chosen = changed({"loader.num_workers": 2, "loader.multiprocessing_context": "spawn"})
    assert line.format("spawn") in render(chosen, "hf", None).text
