import shlex
from dataclasses import asdict

import pytest

from autotune.config.claim import Verify, check_bounds, read_claim, typed_command
from autotune.config.compose import compose
from autotune.errors import BadInput
from autotune.export.formats import render
from autotune.knobs.base import HostContext
from autotune.stats import quotient

HERE = HostContext(num_cores=4)
KNOBS = {"precision.amp": "off", "compile.mode": "default", "loader.num_workers": 2}


@pytest.fixture
def summary():
    return {
        "study": "s", "title": "python train.py", "status": "complete", "objective": "throughput", "unit": "samples",
        "machine": {"cpu_model": "Fake CPU", "num_cores": 4, "gpus": []},
        "baseline": {"trial": 0, "value": 100.0, "ci": [99.0, 101.0], "knobs": {}},
        "best": {"trial": 7, "value": 180.0, "ci": None, "overrides": KNOBS, "knobs": KNOBS}, "best_by_tier": {},
        "speedup": {"ratio": 1.8, "ci": [1.75, 1.85], "verdict": "faster", "reason": "", "num_rounds": 5},
        "fingerprint": "abc", "versions": {"torch": "2.14.1"}, "started_at": 1_750_000_000.0,
        "identity": {"machine.num_cores": 4, "program.torch": "2.14.1", "space.precision.amp": {"choice": ["off"]}},
        "pinned": {"loader.batch_size": 64, "env.MODE": "a${b}"}, "settings": {"device.kind": "cpu", "study.seed": 3},
        "command": ["python", "train.py", "--out", "${HOME}"], "cwd": "/home/me", "is_recipe": False, "trials": [],
    }  # fmt: skip


@pytest.fixture
def read(tmp_path):
    """Returns a function that writes a file and returns the claim in it."""

    def _read(text):
        (tmp_path / "best.yaml").write_text(text, encoding="utf-8")
        return read_claim(tmp_path / "best.yaml")

    return _read


def test_claim_contains_changes_pins_and_the_claimed_speedup(read, summary):
    claim = read(render(summary, "yaml", None).text)
    assert claim.changed == KNOBS
    assert claim.pinned == {"loader.batch_size": 64, "env.MODE": "a${b}"}
    assert (claim.speedup.ratio, claim.speedup.ci, claim.speedup.num_rounds) == (1.8, (1.75, 1.85), 5)
    assert (claim.baseline.value, claim.best.value, claim.best.ci) == (100.0, 180.0, None)
    assert claim.identity == {"machine.num_cores": 4, "program.torch": "2.14.1"}
    assert (claim.command, claim.cwd) == (["python", "train.py", "--out", "${HOME}"], "/home/me")


def test_values_that_only_another_machine_can_serve_are_read_but_not_verified_here(read, summary):
    summary["best"] |= {"overrides": {**KNOBS, "loader.num_workers": 4096}}
    claim = read(render(summary, "yaml", None).text)
    assert claim.changed["loader.num_workers"] == 4096
    check_bounds(claim, HostContext(num_cores=2048))
    with pytest.raises(BadInput, match=r"best\.yaml: loader\.num_workers: more than 4 effective cores can serve"):
        check_bounds(claim, HERE)


def test_document_of_a_claim_contains_settings_and_pins_but_no_changes(read, summary):
    claim = read(render(summary, "yaml", None).text)
    composed = compose(["device.index=0"], command=["python", "-c", "pass"], document=claim.document(without=()))
    assert (composed.config.device.kind, composed.config.study.seed) == ("cpu", 3)
    assert composed.space.pinned == {"loader.batch_size": 64, "env.MODE": "a${b}"}
    assert composed.config.env == {"MODE": "a${b}"}


def test_recipe_is_composed_from_its_file_alone(read, summary):
    summary |= {"is_recipe": True, "settings": {"model.name": "resnet18", "data.name": "synthetic", "model.image_size": 64}}
    claim = read(render(summary, "yaml", None).text)
    assert claim.is_recipe
    assert claim.command == []
    composed = compose([], command=None, document=claim.document(without=()))
    assert composed.title == "resnet18 on synthetic"
    assert composed.config.model.image_size == 64


def test_code_named_in_a_file_must_be_given_on_the_command_line(read, summary):
    recipe = {"model.factory": "my:model", "train.step": "my:step", "data.name": "synthetic"}
    claim = read(render(summary | {"is_recipe": True, "settings": recipe}, "yaml", None).text)
    assert claim.is_recipe
    assert not {"model", "train"} & claim.document(without=()).keys()
    with pytest.raises(BadInput) as caught:
        claim.check_parts(["train.step=my:step", "study.seed=4"])
    (problem,) = caught.value.problems
    assert problem.startswith("model.factory: ")
    assert problem.endswith(
        "made with your own code, which is not run just because a file names it. "
        "If it is the right code, add model.factory=my:model."
    )
    claim.check_parts(["train.step=my:other", "model.factory=my:model"])
    claim.check_parts(["+train.step=my:other", "++model.factory=my:model"])


def test_words_of_the_user_take_precedence_over_the_file(read, summary):
    summary |= {"is_recipe": True, "settings": {"model.name": "resnet18", "data.name": "synthetic", "study.seed": 3}}
    claim = read(render(summary, "yaml", None).text)
    words = ["model=resnet50", "study.seed=4"]
    composed = compose(words, command=None, document=claim.document(without=["model"]))
    assert (composed.config.model.name, composed.config.study.seed) == ("resnet50", 4)
    assert composed.config.data.name == "synthetic"


def test_program_of_a_file_becomes_a_command_line_to_type(read, summary):
    claim = read(render(summary, "yaml", None).text)
    words = shlex.split(typed_command(claim))
    assert words[:4] == ["cd", "/home/me", "&&", "autotune"]
    assert words[-5:] == ["--", "python", "train.py", "--out", "${HOME}"]


def test_command_from_an_untrusted_file_is_one_printable_line(read):
    said = 'provenance: {speedup: {ratio: 1.5}, secret: [nodot, 3], program: {command: ["a\\e[2J", "b\\nrm"], cwd: "/x\\r"}}'
    line = typed_command(read(f"{TOP}{said}\n"))
    assert line.isprintable()
    assert "b rm" in line


def test_a_file_that_changes_nothing_needs_no_ratio(read, summary):
    summary["best"] |= {"overrides": {}}
    summary["speedup"] = None
    assert read(render(summary, "yaml", None).text).changed == {}


def test_pinned_secrets_are_taken_from_the_environment_and_changed_ones_refused(read, summary, monkeypatch):
    summary["pinned"] = {"env.HF_TOKEN": "***"}
    with pytest.raises(
        BadInput, match=r"env\.HF_TOKEN: a secret, which the file does not contain\. Set the variable HF_TOKEN\."
    ):
        read(render(summary, "yaml", None).text)
    monkeypatch.setenv("HF_TOKEN", "abc")
    assert "env.HF_TOKEN" not in read(render(summary, "yaml", None).text).pinned
    summary["pinned"] = {}
    summary["best"] |= {"overrides": {**KNOBS, "env.HF_TOKEN": "***1"}}
    with pytest.raises(BadInput, match=r"env\.HF_TOKEN: changed by the study, but its value is secret and not in .*"):
        read(render(summary, "yaml", None).text)


@pytest.mark.parametrize("edited", ["", "  batch_size: null\n"])
def test_a_pin_that_was_deleted_from_a_file_is_no_secret(read, summary, edited):
    summary["pinned"] = {"loader.batch_size": 64}
    text = render(summary, "yaml", None).text
    line = "  batch_size: 64  # pinned by you, in the baseline too\n"
    assert line in text
    with pytest.raises(BadInput, match=r"^loader\.batch_size: pinned in the study, but without a value in '"):
        read(text.replace(line, edited))


def test_a_secret_that_was_added_to_a_file_is_refused(read):
    with pytest.raises(BadInput, match=r"env\.HF_TOKEN: a secret, which cannot be a setting\. Leave it out, and set the"):
        read(f"{TOP}env: {{HF_TOKEN: s3cret-of-theirs}}\n{GOOD}}}\n")


TOP = "# @package _global_\nprecision: {amp: bf16}\n"
GOOD = "provenance: {speedup: {ratio: 1.5, ci: [1.4, 1.6]}"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (TOP, "provenance: no claim to verify in "),
        (f"{TOP}provenance: 3\n", "provenance: wrong type, got 3"),
        (f"{TOP}provenance: {{}}\n", "provenance.speedup.ratio: no speed-up to compare with, got None"),
        (f"{TOP}provenance: {{speedup: {{ratio: fast}}}}\n", "got 'fast'"),
        (f"{TOP}provenance: {{speedup: {{ratio: .nan}}}}\n", "got nan"),
        (f"{TOP}provenance: {{speedup: {{ratio: -1}}}}\n", "got -1"),
        (
            f"{TOP}{GOOD}, settings: {{runs_dir: /tmp}}}}\n",
            "runs_dir: cannot be part of a claim, got '/tmp'",
        ),
        (f"{TOP}{GOOD}, settings: {{program.python: ./evil}}}}\n", "program.python: cannot be part of a claim"),
        (f"{TOP}{GOOD}, settings: {{env.X: y}}}}\n", "env.X: cannot be part of a claim"),
        (f"{TOP}{GOOD}, settings: {{study.seed: many}}}}\n", "study.seed: wrong type, got 'many'"),
        (f"{TOP}{GOOD}, settings: {{data.root: '***'}}}}\n", "data.root: a secret"),
        (TOP.replace("bf16", "'${oc.env:HOME}'") + GOOD + "}\n", "precision.amp: a reference"),
    ],
)
def test_files_without_a_usable_claim_are_refused_with_the_reason(read, text, words):
    with pytest.raises(BadInput) as refused:
        read(text)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    "said", ["{ratio: 1.5}", "{ratio: 1.5, ci: 3}", "{ratio: 1.5, ci: [2, 1]}", "{ratio: 1.5, ci: [-1, x]}"]
)
def test_invalid_interval_is_ignored(read, said):
    assert (
        read(f"{TOP}provenance: {{speedup: {said}, baseline: 7, program: x, identity: [], pinned: {{}}}}\n").speedup.ci is None
    )


@pytest.mark.parametrize(("said", "freedom"), [(7.5, 7.5), (0, None), (-1, None), (".nan", None), ("many", None)])
def test_impossible_degrees_of_freedom_are_ignored(read, said, freedom):
    """With -1, every interval was not a number: any claim held, and the summary could not be read afterwards."""
    assert read(f"{TOP}provenance: {{speedup: {{ratio: 1.5, ci: [1.4, 1.6], freedom: {said}}}}}\n").speedup.freedom == freedom


@pytest.mark.parametrize(
    ("said", "error"), [(0.01, 0.01), (0, 0.0), (10, 10.0), (60, None), (-1, None), ("1.0e+300", None), (".nan", None)]
)
def test_standard_error_of_a_claim_is_read_if_it_is_possible(read, said, error):
    claim = read(f"{TOP}provenance: {{speedup: {{ratio: 1.5, ci: [1.4, 1.6], num_rounds: 2, error: {said}}}}}\n")
    assert claim.speedup.error == error
    assert quotient(claim.speedup, claim.speedup).ratio == 1.0


def test_claim_with_a_huge_number_of_rounds_can_be_stored(read):
    """The verification ended with an internal error, because its study.json could not be read back."""
    claim = read(f"{TOP}provenance: {{speedup: {{ratio: 1.5, num_rounds: 1.0e+20}}}}\n")
    assert Verify.from_json(asdict(Verify(claim=claim, rounds=4, minutes=5.0))).claim == claim
