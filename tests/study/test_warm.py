"""Which trials start warm, as a fork of a server that has imported torch, and how failures of warm trials are handled."""

import pytest

from autotune.harness.protocol import RankResult
from autotune.knobs.catalogue import CATALOGUE, knob
from autotune.records import Kind, Outcome, TrialRecord
from autotune.trials.objective import fixed_s
from autotune.trials.warm import WarmStarts
from tests.study.test_study_trial import once
from tests.support.fake_launcher import Failure, FakeRunning, Surface

ALLOWS = {"is_first": True, "changed": []}
FACTS = {"torch": "2.14.1", "device": "cpu", "isa": ["avx2", "amx_bf16"], "has_compiler": True, "startup": ALLOWS}
BOTH = ("torch", "torchvision")


def warm_starts(*, wanted="auto", world_size=1, **facts):
    found = RankResult(trial=0, nonce="", rank=0, world_size=world_size, pid=1, status="measured")
    found.facts = {"torch": "2.14.1", "torchvision": "0.29.1", "startup": ALLOWS, **facts}
    made = WarmStarts(wanted)
    made.learn(found)
    return made


def modules(starts, kind=Kind.search, *, changed=None, pinned=None):
    return starts.modules(kind, changed=changed or {}, pinned=pinned or {})


def test_server_imports_the_libraries_that_the_program_has():
    assert modules(warm_starts()) == BOTH
    assert modules(warm_starts(torchvision=None)) == ("torch",)


@pytest.mark.parametrize(("changed", "is_imported"), [([], True), (["TORCH_LOGS"], False), (None, False)])
def test_server_imports_the_compiler_if_the_program_does_before_changing_variables(changed, is_imported):
    startup = ALLOWS if changed is None else {**ALLOWS, "changed_before_compiler": changed}
    assert modules(warm_starts(startup=startup)) == (("torch", "torch._dynamo", "torchvision") if is_imported else BOTH)


SLOW = {"pandas": 0.4, "torch": 2.0, "transformers.models.gpt2": 0.0, "torch._dynamo": 1.0}


@pytest.mark.parametrize(
    ("imports", "imported"),
    [
        (SLOW, (*SLOW, "torchvision")),  # in the program's order
        ({"pandas": 0.4}, ("pandas", *BOTH)),
        ({"numpy": 0.1, "torch": 2.0, "torchvision": 1.0, "torch.fx": 1.0}, BOTH),  # not worth it
        ({"-c import os": 9.0}, BOTH),  # a program may write anything to its result
        ({"pandas": "9"}, BOTH),
        (["pandas"], BOTH),
        (None, BOTH),
    ],
)
def test_server_imports_other_libraries_that_take_long(imports, imported):
    assert modules(warm_starts(startup={**ALLOWS, "imports": imports})) == imported


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind is not Kind.search])
def test_all_trials_except_search_trials_start_fresh(kind):
    assert modules(warm_starts(), kind) == ()


@pytest.mark.parametrize(
    ("found", "why"),
    [
        ({"wanted": "off"}, "launch.warm=off"),
        ({"world_size": 2}, "several processes"),
        ({"startup": {}}, "training does not run in the process"),
        ({"startup": {"is_first": False, "changed": []}}, "training does not run in the process"),
        ({"startup": {"is_first": True, "changed": ["OMP_NUM_THREADS"]}}, "sets OMP_NUM_THREADS before"),
    ],
)
def test_program_that_does_not_allow_warm_starts_starts_fresh(found, why):
    starts = warm_starts(**found)
    assert why in starts.why_never
    assert modules(starts) == ()


@pytest.mark.parametrize(("imports", "is_repeatable", "is_warm"), [(SLOW, True, True), (SLOW, False, False), ({}, True, False)])
def test_variables_set_by_imports_that_the_server_repeats_allow_a_warm_start(imports, is_repeatable, is_warm):
    startup = {"is_first": True, "changed": ["KMP_INIT_AT_FORK"], "imports": imports, "is_repeatable": is_repeatable}
    starts = warm_starts(startup=startup)
    assert starts.is_whole is is_warm
    assert bool(modules(starts)) is is_warm


def test_no_trial_starts_warm_before_the_baseline_was_measured():
    assert modules(WarmStarts("auto")) == ()


@pytest.mark.parametrize(
    "changed",
    [{"threads.omp": 1}, {"threads.mkl": 1}, {"threads.affinity": "numa"}, {"loader.own_cores": True}, {"env.ANY": "1"},
     {"memory.allocator": "expandable_segments"}, {"nccl.algo": "Ring"}],
)  # fmt: skip
def test_trials_with_settings_that_libraries_read_while_loading_start_fresh(changed):
    assert modules(warm_starts(), changed=changed) == ()


def test_trials_with_other_knobs_start_warm():
    late = ["loader.batch_size", "loader.num_workers", "precision.amp", "compile.mode", "threads.intra", "threads.interop"]
    assert not any(knob(key).needs_fresh_start(CATALOGUE[key].default) for key in late)
    assert modules(warm_starts(), changed={"threads.intra": 1, "compile.mode": "default"}) == BOTH
    assert modules(warm_starts(), changed={"memory.malloc": "glibc_keep"}) == BOTH


def test_pinned_variables_allow_a_warm_start_and_pinned_cores_do_not():
    assert modules(warm_starts(), pinned={"threads.omp": 1, "env.ANY": "1"}) == BOTH
    assert modules(warm_starts(), pinned={"threads.affinity": "numa"}) == ()


def test_search_trials_start_warm_and_cost_less(bench):
    study = bench(Surface(facts=FACTS, spared_s=3.0), "study.budget.trials=3")
    summary = study.run()
    starts = {(trial.kind, trial.start) for trial in study.trials if not {"threads.omp"} & trial.changed.keys()}
    assert (Kind.search, "warm") in starts
    assert starts - {(Kind.search, "warm")} == {(kind, "fresh") for kind, start in starts if start == "fresh"}
    assert (Kind.search, "fresh") not in starts
    warm = next(trial for trial in study.trials if trial.start == "warm")
    assert warm.spared_s == 3.0
    assert warm.fresh_s == warm.seconds + 3.0
    assert fixed_s(warm) == pytest.approx(fixed_s(study.trials[0]))  # the user's own runs start fresh
    shown = next(trial for trial in summary["trials"] if trial["number"] == warm.number)
    assert (shown["start"], shown["spared_s"]) == ("warm", 3.0)


def test_launch_warm_off_starts_all_trials_fresh(bench):
    study = bench(Surface(facts=FACTS), "study.budget.trials=3", "launch.warm=off")
    study.run()
    assert {trial.start for trial in study.trials} == {"fresh"}


NO_STEP = Failure(signal="SIGSEGV", cause="exit", num_steps=0)
RAISED = Failure(error={"type": "ValueError", "message": "bad shape", "traceback": "..."}, num_steps=0)


@pytest.mark.parametrize("failure", [NO_STEP, RAISED])
def test_warm_trial_that_fails_before_its_first_step_is_repeated_fresh(bench, failure):
    study = bench(Surface(facts=FACTS, failures=once({1}, failure)), "study.budget.trials=3")
    study.run()
    attempts = [launch.warm for launch in study.launcher.launches if launch.spec.trial == 1]
    assert attempts == [("torch",), ()]
    assert study.trials[1].outcome is Outcome.ok
    assert study.trials[1].start == "fresh"
    assert any("From now on every trial starts in a fresh interpreter" in line for line in study.listener.named("notice"))
    assert {launch.warm for launch in study.launcher.launches if launch.spec.trial > 1} == {()}


def test_warm_trial_that_hangs_before_its_first_step_is_repeated_fresh(bench, monkeypatch):
    """The trial uses up its time, and its stack shows the user's code. Each usually means that the configuration hangs."""
    hangs, due_s = Failure(cause="deadline", hang="user code", num_steps=0), FakeRunning._due_s
    monkeypatch.setattr(FakeRunning, "_due_s", lambda self: 1e9 if self._failure is hangs else due_s(self))
    study = bench(Surface(facts=FACTS, failures=once({1}, hangs)), "study.budget.trials=3", minutes=20)
    study.run()
    first, again = (launch for launch in study.launcher.launches if launch.spec.trial == 1)
    assert (first.warm, again.warm) == (("torch",), ())
    assert study.trials[1].evidence["earlier_attempt"]["seconds"] >= first.deadlines.total_s
    assert study.trials[1].outcome is Outcome.ok
    assert any("From now on every trial starts in a fresh interpreter" in line for line in study.listener.named("notice"))


def test_configuration_that_fails_warm_and_fresh_counts_as_failed(bench):
    def failures(trial, knobs):
        return RAISED if trial in (1, 2, 3) else None

    study = bench(Surface(facts=FACTS, failures=failures), "study.budget.trials=5")
    study.run()
    attempts = [[launch.warm for launch in study.launcher.launches if launch.spec.trial == number] for number in (1, 2, 3)]
    assert attempts == [[("torch",), ()], [("torch",), ()], [("torch",)]]  # from then on, failures of warm trials count
    assert any(trial.start == "warm" for trial in study.trials[4:])


def test_failure_after_steps_is_not_attributed_to_the_warm_start():
    starts = warm_starts()
    record = TrialRecord(number=1, kind=Kind.search, knobs={}, changed={}, outcome=Outcome.error, start="warm")
    assert starts.is_doubtful(record)
    record.evidence["num_steps"] = 4
    assert not starts.is_doubtful(record)


def test_records_of_earlier_versions_count_as_fresh_starts():
    document = TrialRecord(number=1, kind=Kind.search, knobs={}, changed={}, outcome=Outcome.ok).as_json()
    del document["start"], document["spared_s"]
    assert TrialRecord.from_json(document).start == "fresh"
