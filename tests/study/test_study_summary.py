import json

import pytest

from autotune.compare.decision import Decision, judge, without_finalist
from autotune.export.claims import speedup_of
from autotune.records import Kind, Outcome, StudyRecord, Tier
from autotune.stats import Ratio
from autotune.study.summary import Standing, summarise
from autotune.summaries import checked_summary
from autotune.wording import verdict_text
from tests.support.records import a_trial

ABOUT = StudyRecord(name="s", title="t", command=["python"], cwd="/")
KEYS = {
    "schema", "study", "title", "status", "reason", "objective", "unit", "machine", "baseline", "best", "best_by_tier",
    "speedup", "attribution", "diagnosis", "counts", "seconds", "fingerprint", "versions", "started_at", "budget_s", "trials",
}  # fmt: skip


def trial(number, value=None, outcome=Outcome.ok, tier=Tier.exact, **more):
    changed = {"env.A": str(number)} if number else {}
    phases = {"spawn": 1.0, "import": 2.0, "compile": 3.0, "steady": 4.0}
    fields = {"outcome": outcome, "value": value, "tier": tier, "seconds": 10.0, "phases_s": phases, **more}
    return a_trial(number, knobs=changed, changed=changed, **fields)


def test_summary_has_all_documented_keys_from_the_start():
    summary = summarise(ABOUT, [], Standing(status="running"))
    assert set(summary) >= KEYS
    assert summary["best"] is None
    assert summary["baseline"]["value"] is None


def test_other_trials_do_not_stand_in_for_a_baseline_that_is_measured_again():
    summary = summarise(ABOUT, [trial(1, 100.0), trial(2, 150.0)], Standing(status="interrupted"))
    assert (summary["baseline"]["value"], summary["best"], summary["speedup"]) == (None, None, None)
    assert summary["baseline"]["reason"] == "not measured yet"
    assert summary["num_trials"] == 2


def test_before_the_finals_the_leader_has_a_speedup_without_an_interval():
    summary = summarise(ABOUT, [trial(0, 100.0), trial(1, 150.0)], Standing(status="running"))
    assert summary["best"]["trial"] == 1
    assert summary["speedup"]["ratio"] == 1.5
    assert summary["speedup"]["ci"] is None
    assert summary["speedup"]["verdict"] == "ambiguous"
    assert "overstate" in summary["speedup"]["reason"]


def test_best_of_each_tier_reports_if_workers_had_to_be_forked():
    forked = {"loader.multiprocessing_context": {"status": "applied", "reason": "no guard", "observed": "fork"}}
    records = [trial(0, 100.0), trial(1, 150.0, knob_reports=forked)]
    summary = checked_summary(json.loads(json.dumps(summarise(ABOUT, records, Standing(status="running")))))
    assert {entry["worker_start"] for entry in (summary["best"], *summary["best_by_tier"].values())} == {"fork"}
    records[1].changed["loader.multiprocessing_context"] = "fork"  # requested
    assert "worker_start" not in summarise(ABOUT, records, Standing(status="running"))["best"]


@pytest.mark.parametrize("records", [[trial(0, 100.0)], [trial(0, 100.0), trial(1, 90.0)]])
@pytest.mark.parametrize("status", ["running", "interrupted"])
def test_without_a_finalist_and_without_finals_there_is_no_verdict(records, status):
    summary = summarise(ABOUT, records, Standing(status=status, reason="stopped by the user"))
    assert summary["best"]["trial"] == 0
    assert summary["speedup"] is None


def test_candidates_measured_once_as_slower_give_verdict_same_without_a_ratio():
    decision = without_finalist([trial(0, 100.0), trial(1, 60.0)])
    summary = summarise(ABOUT, [trial(0, 100.0), trial(1, 60.0)], Standing(status="complete", decision=decision))
    speedup = summary["speedup"]
    assert (speedup["ratio"], speedup["ci"], speedup["verdict"]) == (None, None, "same")
    assert "no configuration that trained came close to the baseline" in speedup["reason"]


def test_configurations_that_violate_a_constraint_do_not_make_the_verdict_ambiguous():
    records = [trial(0, 100.0), trial(1, 150.0, Outcome.infeasible), trial(2, 60.0)]
    decision = without_finalist(records)
    assert decision.verdict == "same"
    assert decision.reason == "no configuration that satisfies the constraints came close to the baseline"


@pytest.mark.parametrize(
    ("ends", "own_ends", "verdict"),
    [(None, None, "ambiguous"), ((95.0, 105.0), (80.0, 94.0), "same"), ((80.0, 120.0), (70.0, 90.0), "ambiguous")],
)
def test_verdict_from_single_measurements_depends_on_whether_intervals_overlap(ends, own_ends, verdict):
    baseline, slower = trial(0, 100.0), trial(1, 85.0)
    baseline.ci, slower.ci = ends, own_ends
    assert without_finalist([baseline, slower]).verdict == verdict


def test_kept_baseline_has_speedup_1_and_names_the_rejected_finalist():
    finalist = trial(1, 150.0)
    finalist.changed = {"layout.channels_last": True}
    decision = Decision(finalist=finalist, ratio=Ratio(ratio=0.82, ci=(0.6, 1.1), num_rounds=2), verdict="ambiguous",
                        values={0: [100.0, 101.0], 1: [82.0, 83.0]})  # fmt: skip
    summary = summarise(ABOUT, [trial(0, 90.0), finalist], Standing(status="complete", decision=decision))
    assert verdict_text(summary) == "ambiguous: 0.82x [0.60, 1.10] with channels_last"
    assert {entry["trial"] for entry in summary["best_by_tier"].values()} == {0}
    said = speedup_of(summary, summary["best"])
    assert (said["ratio"], said["verdict"]) == (1.0, "same")
    assert said["kept"] == "0.820 x [0.600, 1.100] with channels_last: ambiguous"


def test_after_the_finals_only_the_rates_of_the_finals_are_reported():
    decision = Decision(finalist=trial(1, 150.0), ratio=Ratio(ratio=1.4, ci=(1.35, 1.45), num_rounds=3), verdict="faster",
                        values={0: [100.0, 101.0, 99.0], 1: [140.0, 141.0, 139.0]})  # fmt: skip
    summary = summarise(ABOUT, [trial(0, 90.0), trial(1, 150.0)], Standing(status="complete", decision=decision))
    assert summary["best"]["value"] == pytest.approx(140.0, rel=1e-4)
    assert summary["baseline"]["value"] == pytest.approx(100.0, rel=1e-4)
    assert summary["best"]["ci"][0] < 140 < summary["best"]["ci"][1]
    assert summary["best_by_tier"]["exact"]["measured_in"] == "finals"


def final(number, repeats, value, ci=None):
    record = trial(repeats, value, ci=ci)
    record.number, record.kind, record.repeats, record.round = number, Kind.final, repeats, 1
    return record


def test_speedup_during_the_finals_does_not_say_that_they_have_not_run():
    records = [trial(0, 100.0), trial(1, 150.0), final(2, 1, 149.0, (148.0, 150.0)), final(3, 0, 101.0, (100.0, 102.0))]
    summary = summarise(ABOUT, records, Standing(status="running"))
    reason = "the finals are not complete: the ratio is from measurements that were not made in pairs"
    assert summary["speedup"]["reason"] == reason


@pytest.mark.parametrize(
    ("again", "measured_in", "num_unpaired"),
    [((149.0, (148.0, 150.0)), "finals", 2), ((149.0, None), "search", None)],
)
def test_rate_from_before_the_first_pair_says_which_measurements_count(again, measured_in, num_unpaired):
    records = [trial(0, 100.0), trial(1, 150.0, ci=(149.0, 151.0)), final(2, 1, *again)]
    best = summarise(ABOUT, records, Standing(status="running"))["best"]
    assert (best["trial"], best["measured_in"], best.get("num_unpaired")) == (1, measured_in, num_unpaired)


@pytest.mark.parametrize(
    ("again", "best", "ratio"),
    [
        ((3950.0, (549.0, 7351.0)), 0, 4188 / 3950),
        ((1000.0, (900.0, 1100.0)), 1, 4.188),
        ((3950.0, None), 0, None),
        ((290.0, None), 1, 4188 / (281 * 290) ** 0.5),
    ],
)
def test_speedup_without_a_pair_uses_the_repeated_baseline_as_far_as_it_is_reliable(again, best, ratio):
    value, ci = again
    records = [trial(0, 281.0), trial(1, 4188.0, ci=(4100.0, 4300.0)), final(2, 0, value, ci)]
    decision = Decision(finalist=records[1], reason="it has not been measured again against the baseline")
    summary = summarise(ABOUT, records, Standing(status="complete", decision=decision))
    assert summary["best"]["trial"] == best
    assert {entry["trial"] for entry in summary["best_by_tier"].values()} == {best}
    assert summary["speedup"]["verdict"] == "ambiguous"
    assert summary["speedup"]["ratio"] == (None if ratio is None else pytest.approx(ratio))
    if ci:
        assert summary["baseline"]["value"] == value
    if best:
        assert speedup_of(summary, summary["best_by_tier"]["exact"])["ratio"] == pytest.approx(ratio)


def test_without_a_pair_the_finals_choice_is_exported_with_its_own_ratio():
    """The search's leader, which the choosing round rejected, was exported with the ratio of the chosen configuration."""
    records = [trial(0, 100.0), trial(1, 140.0, ci=(139.0, 141.0)), trial(2, 150.0)]
    records += [final(3, 1, 139.0, (138.0, 140.0)), final(4, 2, 120.0, (119.0, 121.0))]
    decision = Decision(finalist=records[1], reason="it has not been measured again against the baseline")
    summary = summarise(ABOUT, records, Standing(status="interrupted", decision=decision))
    assert (summary["best"]["trial"], summary["best"]["overrides"]) == (1, {"env.A": "1"})
    assert summary["best_by_tier"]["training"]["trial"] == 1
    said = speedup_of(summary, summary["best"])
    assert (said["trial"], said["ratio"]) == (1, pytest.approx((140.0 * 139.0) ** 0.5 / 100))


def test_finals_choice_that_failed_or_is_no_faster_is_not_exported_without_a_pair():
    def best(finalist, *again):
        records = [trial(0, 100.0), trial(1, 100.5), trial(2, 150.0), trial(3, 160.0), *again]
        decision = Decision(finalist=records[finalist], reason="no time was left to measure it again against the baseline")
        summary = summarise(ABOUT, records, Standing(status="complete", decision=decision))
        return summary["best"]["trial"], summary["speedup"]["trial"], summary["speedup"]["ratio"]

    crash = final(4, 2, None)
    crash.outcome = Outcome.crash
    assert best(1) == (0, 1, pytest.approx(1.005))
    assert best(2) == (2, 2, pytest.approx(1.5))
    assert best(2, crash) == (3, 3, pytest.approx(1.6))


def test_best_of_a_lower_tier_is_reported_as_measured_in_the_search():
    records = [trial(0, 100.0), trial(1, 150.0, tier=Tier.numerics), trial(2, 120.0), trial(3, 200.0, tier=Tier.training)]
    tiers = summarise(ABOUT, records, Standing(status="running"))["best_by_tier"]
    assert [tiers[tier]["trial"] for tier in ("exact", "numerics", "training")] == [2, 1, 3]
    assert tiers["exact"]["measured_in"] == "search"


def test_no_tier_offers_a_baseline_that_violates_a_constraint():
    slower = Ratio(ratio=0.8, ci=(0.78, 0.82), num_rounds=3)
    records = [trial(0, 100.0, Outcome.infeasible), trial(1, 80.0), trial(2, 90.0, tier=Tier.training)]
    decision, lower = (
        Decision(finalist=records[n], ratio=slower, verdict="same", values={0: [100.0], n: [80.0]}) for n in (2, 1)
    )
    summary = summarise(ABOUT, records, Standing(status="complete", decision=decision, tiers={1: lower}))
    tiers = summary["best_by_tier"]
    assert [tiers[tier]["trial"] for tier in ("exact", "numerics", "training")] == [1, 1, 2]
    assert [tiers[tier]["speedup"]["ratio"] for tier in ("exact", "training")] == [0.8, 0.8]


def test_configuration_that_failed_when_repeated_is_not_the_best_of_a_tier():
    def best(*again):
        records = [trial(0, 100.0), trial(1, 150.0), trial(2, 120.0), *again]
        return summarise(ABOUT, records, Standing(status="running"))["best_by_tier"]["exact"]["trial"]

    crashes = [final(number, 1, None) for number in (4, 6)]
    for record in crashes:
        record.outcome = Outcome.crash
    assert best(final(3, 1, 150.0)) == best(final(3, 1, 150.0), crashes[0]) == 1
    assert best(crashes[0]) == best(final(3, 1, 150.0), *crashes) == 2


def test_baseline_wins_if_the_best_trial_is_within_its_noise():
    summary = summarise(ABOUT, [trial(0, 100.0), trial(1, 100.9)], Standing(status="running"))
    assert summary["best"]["trial"] == 0
    assert summary["best"]["overrides"] == {}


def test_verdict_same_exports_the_baseline():
    decision = Decision(finalist=trial(1, 150.0), ratio=Ratio(ratio=1.0, ci=(0.995, 1.005), num_rounds=3), verdict="same",
                        values={0: [100.0], 1: [100.0]})  # fmt: skip
    summary = summarise(ABOUT, [trial(0, 100.0), trial(1, 150.0)], Standing(status="complete", decision=decision))
    assert summary["best"]["overrides"] == {}
    assert summary["best_by_tier"]["training"]["overrides"] == {}


def test_finalist_that_is_slower_in_the_finals_loses_to_the_baseline():
    decision = judge(trial(1, 150.0), [(80.0, 100.0), (81.0, 100.0), (80.5, 100.0)])
    summary = summarise(ABOUT, [trial(0, 100.0), trial(1, 150.0)], Standing(status="complete", decision=decision))
    assert summary["best"]["overrides"] == {}
    assert (summary["speedup"]["ratio"], summary["speedup"]["verdict"]) == (1.0, "same")
    assert "worse when measured again" in summary["speedup"]["reason"]


def test_summary_splits_the_time_into_measuring_starting_compiling_and_lost():
    records = [trial(0, 100.0), trial(1, None, Outcome.crash)]
    seconds = summarise(ABOUT, records, Standing(status="running", seconds=25.0))["seconds"]
    assert seconds == {"total": 25.0, "measuring": 4.0, "starting": 3.0, "compiling": 3.0, "lost": 10.0}
