"""The results of a study's own trials take precedence over a rule's prediction."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from autotune.explain import checks
from autotune.explain.evidence import Evidence, Operations
from autotune.explain.findings import found
from autotune.explain.gains import Gain
from autotune.explain.trials import Tried, noise_or_usual
from autotune.harness.explain.documents import FORWARD
from autotune.records import AGAIN, Kind, Outcome, TrialRecord
from autotune.space import ResolvedSpace
from autotune.stats import Noise
from tests.explain import made
from tests.support.records import a_trial

BASELINE = {
    "loader.batch_size": 8, "loader.num_workers": 0, "precision.amp": "off", "optimizer.implementation": "default",
    "compile.mode": "off",
}  # fmt: skip
SPACE = ResolvedSpace(domains={}, pinned={}, baseline=BASELINE, dropped={}, reference=BASELINE)
DOMAINS = {
    "loader.batch_size": [8, 16, 32, 64], "loader.num_workers": [0, 1, 2], "precision.amp": ["off", "bf16"],
    "optimizer.implementation": ["default", "foreach", "fused"], "compile.mode": ["off"],
}  # fmt: skip
BATCH, WORKERS, AMP, OPTIMIZER = list(BASELINE)[:4]


def trial(number: int, rate: float | None, changed: dict[str, Any], outcome: Outcome = Outcome.ok) -> TrialRecord:
    return a_trial(number, knobs={**BASELINE, **changed}, changed=changed, outcome=outcome, value=rate)


@pytest.mark.parametrize(("spread", "least"), [(0.02, 0.97), (0.04, 0.93), (0.06, 0.88)])
def test_intervals_of_two_pairs_contain_the_truth_if_the_noise_is_unknown(spread, least):
    rng, held = np.random.default_rng(0), 0
    for _ in range(400):
        pairs = [tuple(np.exp(spread * rng.normal(size=2) + [math.log(1.3), 0.0])) for _ in range(2)]
        held += checks.measured_gain(pairs, noise_or_usual([], None)).holds(0.3)
    assert held >= least * 400


BEST = trial(9, 28131.0, {BATCH: 16, OPTIMIZER: "fused"})
STUDY = [
    trial(0, 12960.0, {}),
    trial(1, 9557.0, {AMP: "bf16", OPTIMIZER: "fused"}, Outcome.raced),
    trial(2, 4576.0, {BATCH: 64, WORKERS: 2}, Outcome.raced),
    trial(7, 2910.0, {WORKERS: 1, OPTIMIZER: "foreach"}, Outcome.raced),
    trial(8, 23224.0, {BATCH: 16}),
    BEST,
    trial(10, None, {WORKERS: 1}, Outcome.timeout),
]


def tried(*records: TrialRecord, of: TrialRecord = BEST) -> Tried:
    return Tried(record=of, records=records, space=SPACE, noise=Noise(spread=0.02, freedom=3.0))


def evidence(*records: TrialRecord, of: TrialRecord = BEST, **more: Any) -> Evidence:
    """Returns the evidence of a program with many small operators, whose input takes a quarter of the step."""
    document = made.lines(
        made.line("return self.head(x)", 0.04, function="Net.forward", line=70, phase=FORWARD),
        stages=(made.stage("decode", 0.0008, where="main"),), wait_s=0.025, phases_s=made.phases(input=0.025), batch_size=16,
    )  # fmt: skip
    operations = [Operations(count=12_000, by_operator=[])]
    return made.evidence(document, record=of, domains=DOMAINS, operations=operations, tried=tried(*records, of=of), **more)


@pytest.mark.parametrize(
    ("key", "value", "is_refuted"),
    [
        (BATCH, 64, True),  # a sixth of the rate of the same configuration with a batch of 16
        (BATCH, 32, False),  # no trial has it
        (WORKERS, 1, True),  # one trial was slow and one timed out
        (WORKERS, 2, True),
        (AMP, "bf16", True),
        (BATCH, 8, False),  # the baseline has this value
    ],
)
def test_a_value_is_refuted_if_all_its_trials_failed_or_were_not_faster(key: str, value: Any, is_refuted: bool) -> None:
    assert tried(*STUDY, trial(11, 14000.0, {OPTIMIZER: "fused"})).is_refuted(key, value) is is_refuted


def test_a_value_that_helped_another_configuration_is_not_refuted() -> None:
    helped = [*STUDY, trial(11, 14500.0, {AMP: "bf16"})]  # slower than the best, and 12 % faster than the baseline
    assert not tried(*helped).is_refuted(AMP, "bf16")


def test_a_trial_with_other_changes_refutes_a_value_only_if_it_is_far_slower() -> None:
    """A trial with both fused and bf16 is slower than the baseline; the cause may be bf16."""
    for rate, is_refuted in ((11_000.0, False), (5000.0, True), (None, False)):
        both = trial(1, rate, {AMP: "bf16", OPTIMIZER: "fused"}, Outcome.ok if rate else Outcome.timeout)
        assert tried(STUDY[0], both, of=STUDY[0]).is_refuted(OPTIMIZER, "fused") is is_refuted, rate


def test_a_rate_in_doubt_does_not_count_once_it_was_measured_again() -> None:
    doubted = trial(9, 40_000.0, {AMP: "bf16"})
    again = replace(trial(10, 13_000.0, {AMP: "bf16"}), origin=AGAIN)
    gain = tried(STUDY[0], doubted, again, of=STUDY[0]).gain(AMP, "bf16")
    assert gain is not None
    assert gain.mid == pytest.approx(13_000 / 12_960 - 1, abs=0.001)


def test_a_rate_in_doubt_refutes_nothing_once_it_was_measured_again() -> None:
    doubted = trial(9, 5_000.0, {AMP: "bf16", WORKERS: 1})
    again = replace(trial(10, 12_500.0, {AMP: "bf16", WORKERS: 1}), origin=AGAIN)
    assert tried(STUDY[0], doubted, of=STUDY[0]).is_refuted(AMP, "bf16")
    assert not tried(STUDY[0], doubted, again, of=STUDY[0]).is_refuted(AMP, "bf16")


def test_a_disturbed_trial_refutes_nothing() -> None:
    assert not tried(STUDY[0], BEST, trial(3, None, {AMP: "bf16"}, Outcome.disturbed)).is_refuted(AMP, "bf16")


@pytest.mark.parametrize(("key", "value"), [("skipped", ["item"]), ("fixed", True)])
def test_a_trial_of_a_modified_program_refutes_nothing(key: str, value: Any) -> None:
    failed = trial(3, None, {AMP: "bf16"}, Outcome.error)
    assert tried(STUDY[0], failed, of=STUDY[0]).is_refuted(AMP, "bf16")
    failed.evidence[key] = value
    assert not tried(STUDY[0], failed, of=STUDY[0]).is_refuted(AMP, "bf16")


def test_a_check_is_compared_with_the_other_side_of_its_round() -> None:
    """The machine is half as fast as it was during the search."""

    def check(number: int, rate: float, changed: dict[str, Any]) -> TrialRecord:
        return replace(trial(number, rate, changed), kind=Kind.check, round=1)

    with_value, without = check(11, 7200.0, {OPTIMIZER: "fused"}), check(12, 6000.0, {})
    assert not tried(STUDY[0], with_value, without, of=STUDY[0]).is_refuted(OPTIMIZER, "fused")
    assert tried(STUDY[0], replace(with_value, value=6000.0), without, of=STUDY[0]).is_refuted(OPTIMIZER, "fused")
    assert not tried(STUDY[0], with_value, of=STUDY[0]).is_refuted(OPTIMIZER, "fused")  # the round was broken off


def test_a_measured_gain_takes_precedence_over_refutation() -> None:
    both = tried(*STUDY, trial(11, 40000.0, {BATCH: 64, OPTIMIZER: "fused"}))
    gain = both.gain(BATCH, 64)
    assert gain is not None
    assert (gain.kind, round(gain.mid, 2)) == ("measured", 0.42)
    assert not both.is_refuted(BATCH, 64)


def test_an_estimate_is_relative_to_the_explained_value_not_to_the_baseline() -> None:
    """Batch 64 is 1.1 times as fast as the explained batch of 16, and 2.2 times as fast as the baseline's batch of 8."""
    records = [
        trial(number, rate * (1.0 + 0.001 * number), {**batch, **other})
        for number, (rate, batch, other) in enumerate(
            (100.0 * by_batch * by_other, batch, other)
            for by_batch, batch in ((1.0, {}), (2.0, {BATCH: 16}), (2.2, {BATCH: 64}))
            for by_other, other in ((1.0, {}), (1.2, {OPTIMIZER: "fused"}), (0.9, {AMP: "bf16"}))
        )
    ]
    best = next(one for one in records if one.changed == {BATCH: 16, OPTIMIZER: "fused"})
    others = [one for one in records if one.changed != {BATCH: 64, OPTIMIZER: "fused"}]
    gain = tried(*others, of=best).gain(BATCH, 64)
    assert gain is not None
    assert gain.kind == "predicted"
    assert gain.mid == pytest.approx(0.1, abs=0.04)
    assert gain.low < 0.1 < gain.high


def test_findings_do_not_advise_values_that_trials_have_refuted() -> None:
    remedies = {one.cause: (one.knob, one.value) for one in found(evidence(*STUDY))}
    assert remedies["launch-bound"] == (BATCH, 32)
    assert "too few workers" not in remedies
    untried = {one.cause: (one.knob, one.value) for one in found(evidence(STUDY[0], BEST))}
    assert untried["launch-bound"] == (BATCH, 64)
    assert untried["too few workers"] == (WORKERS, 1)


def test_a_measured_gain_replaces_a_prediction_even_if_it_is_less_certain() -> None:
    """A trial with a batch of 32 gained 20 %, so the larger prediction of the rule is not shown."""
    given = evidence(*STUDY, trial(11, 33757.0, {BATCH: 32, OPTIMIZER: "fused"}))
    (kept,) = [one for one in checks.by_trials(found(given), given)[0] if one.cause == "launch-bound"]
    assert (kept.value, kept.gain.kind, round(kept.gain.mid, 2)) == (32, "measured", 0.2)
    assert kept.check is not None
    assert kept.check["predicted"]["kind"] == "predicted"


def test_an_estimate_less_certain_than_the_prediction_does_not_replace_it() -> None:
    """A single trial changed two knobs at once, so an estimate for one of them says little."""
    both = trial(1, 11_000.0, {AMP: "bf16", OPTIMIZER: "fused"})
    document = made.lines(made.line("return self.head(x)", 0.04, phase=FORWARD), phases_s=made.phases(optimizer=0.04))
    given = made.evidence(document, record=STUDY[0], domains=DOMAINS, tried=tried(STUDY[0], both, of=STUDY[0]))
    kept = {one.cause: one for one in checks.by_trials(found(given), given)[0]}
    assert kept["unfused optimizer"].value == "fused"
    assert kept["unfused optimizer"].basis.startswith("fused updates are usually")


def test_finding_stays_without_its_useless_setting_if_a_code_change_may_help() -> None:
    given = evidence(*STUDY)
    (finding,) = [one for one in found(given) if one.cause == "launch-bound"]
    measured = Gain(low=-0.03, mid=-0.01, high=0.01, kind="measured")
    tried_in_vain = checks.check_of(finding, measured, trial=9, how=checks.PAIRS, num_pairs=2)
    kept = checks.with_check(finding, tried_in_vain)
    assert kept.as_json()["remedy"]["code"].startswith("call fewer and larger operators")
    assert (kept.gain.low, kept.gain.high, kept.gain.kind) == (0.0, finding.gain.high, "bound")
    assert kept.basis.endswith("loader.batch_size=32 was tried and did not help")
    only_a_setting = checks.with_check(replace(finding, code=""), tried_in_vain)
    assert only_a_setting.gain == measured
