"""What the live view shows on a simulated terminal, and that no line is wider than the terminal."""

import dataclasses
import io
from types import SimpleNamespace

import pytest
from rich.console import Console
from rich.table import Table

from autotune.cli import run
from autotune.cli.live import LiveView
from autotune.cli.plain import PlainLines, Quiet
from autotune.cli.terminal import THEME, console
from autotune.clock import VirtualClock
from autotune.harness.protocol import PHASES, Progress
from autotune.records import Kind, Outcome
from autotune.trials.events import Outlook
from tests.support.records import a_trial
from tests.support.studies import make_study


@pytest.fixture
def folder(tmp_path):
    return make_study(tmp_path / "runs")


class Screen:
    """A live view on a terminal of a given width, at a given time of the study."""

    def __init__(self, folder, width: int, second: float = 190.0) -> None:
        self.study = folder.read_study()
        self.text = io.StringIO()
        self.console = Console(file=self.text, width=width, height=50, force_terminal=True, color_system=None, theme=THEME)
        self.now_s = 1000.0
        self.view = LiveView(self.console, folder.path, clock=lambda: self.now_s)
        self.now_s += second

    def footer(self, width: int | None = None) -> list[str]:
        page = Console(file=io.StringIO(), width=width or self.console.width, color_system=None, theme=THEME)
        with page.capture() as captured:  # the live console would add its own control codes
            page.print(self.view.footer())
        return captured.get().splitlines()


@pytest.fixture(params=[60, 80, 120])
def screen(request, folder):
    made = Screen(folder, request.param)
    made.view.started(made.study)
    yield made
    made.view.close()


def test_table_header_shows_the_unit_of_the_baseline(folder):
    made = Screen(folder, 120)
    made.view.started(made.study)
    for trial in folder.read_trials()[:2]:
        made.view.trial_ended(dataclasses.replace(trial, unit="tokens"))
    made.view.close()
    said = made.text.getvalue()
    assert said.count("outcome ") == 1
    assert "tokens/s" in next(line for line in said.splitlines() if "what changed" in line)
    assert "samples/s" not in said


def widest(screen):
    """Returns the width of the widest line of the footer below its rule, on a page that is too wide to crop or wrap a line."""
    rule, *lines = screen.footer(width=400)
    assert set(rule) == {"─"}
    return max(len(line.rstrip()) for line in lines)


def test_footer_first_says_that_the_baseline_is_measured(screen):
    assert "measuring the baseline first" in "\n".join(screen.footer())


def test_footer_names_best_running_trial_outcomes_and_time_left(screen, folder):
    for trial in folder.read_trials()[:6]:
        screen.view.trial_started(trial.number, trial.kind, trial.changed, trial.why)
        screen.view.trial_ended(trial)
    screen.view.trial_started(6, Kind.search, {"loader.batch_size": 128}, "sampler")
    screen.view.progress(Progress(time_s=1.0, phase="steady", step=42, rate_per_s=39.12))
    said = "\n".join(screen.footer())
    for words in ("2.42x", "40.7 samples/s against 16.8", "trial 0006 measuring, step 42", "batch 128", "3 ok", "4:50"):
        assert words in said, words


def test_best_so_far_is_never_a_trial_that_loss_parity_ruled_out(screen):
    trials = [a_trial(0, value=10.0), a_trial(1, value=30.0, changed={"precision.amp": "fp16"})]
    trials += [a_trial(2, value=20.0, changed={"loader.batch_size": 64}), a_trial(3, value=15.0)]
    for trial in trials[:3]:
        screen.view.trial_ended(trial)
    assert "3.00x" in "\n".join(screen.footer())
    trials[1].outcome = Outcome.parity
    assert "2.00x" in "\n".join(screen.footer())
    screen.view.trial_ended(trials[3])
    assert "2.00x" in "\n".join(screen.footer())


def test_a_trial_without_a_score_is_never_the_best_so_far(screen):
    """Of trials that may win, it was the best if no other may, at 0.00x."""
    for trial in (a_trial(0, value=10.0, outcome=Outcome.infeasible), a_trial(1, value=None, outcome=Outcome.ok)):
        screen.view.trial_ended(trial)
    assert "no trial that may win yet" in "\n".join(screen.footer())


def test_a_baseline_that_violates_a_constraint_counts_as_measured(screen):
    screen.view.trial_ended(a_trial(0, value=10.0, outcome=Outcome.infeasible))
    said = "\n".join(screen.footer())
    assert "no trial that may win yet" in said
    assert "measuring the baseline first" not in said


def test_time_left_follows_the_clock_by_which_the_budget_counts(folder, monkeypatch):
    monkeypatch.setattr(run, "can_redraw", lambda out: True)
    clock = VirtualClock()  # like the clock of a cluster, it stands still while the study waits for a node
    inputs = SimpleNamespace(clock=clock, began_s=clock.monotonic() - 60)
    view = run._view(inputs, folder, as_json=False, is_quiet=False)
    view.started(folder.read_study())
    page = Console(file=io.StringIO(), width=80, color_system=None, theme=THEME)
    page.print(view.footer())
    view.close()
    assert "7:00" in page.file.getvalue()


def test_no_line_is_wider_than_the_terminal(screen, folder):
    for trial in folder.read_trials():
        screen.view.trial_started(trial.number, trial.kind, trial.changed, trial.why)
        assert widest(screen) <= screen.console.width
        screen.view.trial_ended(trial)


@pytest.mark.parametrize("phase", PHASES)
def test_footer_describes_every_phase_in_words(screen, phase):
    screen.view.trial_started(0, Kind.baseline, {}, "")
    screen.view.progress(Progress(time_s=1.0, phase=phase))
    assert f"trial 0000 {phase}," not in "\n".join(screen.footer())


def test_end_restores_the_cursor_and_prints_the_verdict(folder):
    screen = Screen(folder, 80)
    screen.view.started(screen.study)
    screen.view.finished(folder.read_summary())
    said = screen.text.getvalue()
    assert "faster: 2.41x [2.36, 2.46]" in said
    assert said.rstrip().endswith("╯")
    assert "\x1b[?25h" in said  # the cursor is visible again


def test_a_study_without_a_time_budget_shows_no_clock(folder):
    screen = Screen(folder, 80)
    screen.study.budget_s = None
    screen.view.started(screen.study)
    assert "left" not in "\n".join(screen.footer())
    screen.view.close()


def test_quiet_view_prints_nothing_on_standard_output(folder, capsys):
    view = Quiet()
    view.started(folder.read_study())
    view.notice("interrupted")
    view.finished(folder.read_summary())
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "autotune: interrupted\n"


def test_attribution_is_shown_as_a_separate_phase(folder, screen, capsys):
    screen.view.attribution_started(5, ["precision.amp", "env.A"], 90.0)
    assert "attribution: the effect of each change" in screen.text.getvalue()
    screen.view.attribution_started(5, [], 90.0)
    assert "attribution: measures trial 0005 without the changes" in screen.text.getvalue()
    screen.view.trial_started(9, Kind.attribution, {"precision.amp": "bf16"}, "trial 5 without env.A")
    assert "attribution: " in "\n".join(screen.footer())
    PlainLines(folder.path).attribution_started(5, ["precision.amp", "env.A"], 90.0)
    assert capsys.readouterr().out == "attribution  effects of the changes of 0005: env.A, precision.amp, at most 1 min 30 s\n"


PLANNED = Outlook(left_s=400.0, search_s=232.0, num_trials=24, trial_s=8.0)


def test_plain_lines_show_the_plan_and_the_time_left(folder, capsys):
    lines = PlainLines(folder.path)
    lines.planned(PLANNED)
    lines.time_left(PLANNED)
    lines.trial_started(1, Kind.search, {"precision.amp": "bf16"}, "expert's choice")
    lines.time_left(Outlook(left_s=90.0))
    lines.trial_started(2, Kind.final, {}, "finals, round 1")
    lines.planned(Outlook(num_trials=12, trial_s=8.0))
    lines.time_left(Outlook(num_trials=12, trial_s=8.0))
    lines.trial_started(3, Kind.search, {}, "")
    assert capsys.readouterr().out.splitlines() == [
        "plan  room for 24 trials in 3 min 12 s, about 8.0 s each, fewer if little improvement is expected; "
        "then at most 2 min 48 s for the finals",
        "0001  search starts  bf16 (expert's choice)  6:40 left, 3:52 to search",
        "0002  final starts  unchanged (finals, round 1)  1:30 left",
        "plan  12 trials at most in about 1 min 36 s, about 8.0 s each, then the finals",
        "0003  search starts  unchanged  12 trials left",
    ]


def test_terminal_shows_the_plan_and_the_remaining_search_time(screen):
    screen.view.planned(PLANNED)
    assert "plan: room for 24 trials" in screen.text.getvalue()
    screen.now_s += 32
    assert "3:20 to search" in "\n".join(screen.footer())
    assert widest(screen) <= screen.console.width
    screen.view.time_left(Outlook(left_s=90.0))
    assert "to search" not in "\n".join(screen.footer())


def test_terminal_counts_trials_if_there_is_no_time_budget(folder):
    screen = Screen(folder, 80)
    screen.study.budget_s = None
    screen.view.started(screen.study)
    screen.view.planned(Outlook(num_trials=12, trial_s=8.0))
    assert "12 trials" in "\n".join(screen.footer())
    screen.view.close()


def test_warm_start_is_reported_in_plain_lines_and_on_the_terminal(folder, screen, capsys):
    out = {"study": "s-1", "trial": 9, "knobs": {"loader.batch_size": 256, "precision.amp": "off"}, "outcome": "device_oom"}
    seed = {"study": "s-1", "trial": 5, "knobs": {}, "ratio": 2.0, "is_proven": True}
    study = folder.read_study()
    study.warm_start = {"sources": [{"study": "s-1", "is_same": True, "differs": []}], "seeds": [seed], "out_of_memory": [out]}
    lines = PlainLines(folder.path)
    lines.started(study)
    lines.started(study)
    said = (
        "s-1 (the same program and machine): its best configurations are tried first; left out after running out of "
        "memory there: batch 256 (s-1), and all that need as much memory"
    )
    assert f"warm start  {said}" in capsys.readouterr().out.splitlines()
    screen.view.started(study)
    assert "warm start: s-1" in screen.text.getvalue()


def test_lines_in_a_pipe_have_no_trailing_blanks(capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    table = Table("name", "value")
    table.add_row("a", "1")
    console().print(table)
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) > 2
    assert max(map(len, printed)) < 100
    assert not any(line.endswith(" ") for line in printed)
