"""Runs a study from its first trial to its verdict: baseline, search, finals, summary."""

from autotune.clock import Clock
from autotune.study.explaining import Wanted
from autotune.study.loop import explain_study, resume_study, run_study
from autotune.trials.events import Listener, Tracking
from autotune.trials.inputs import StudyInputs

__all__ = ["Clock", "Listener", "StudyInputs", "Tracking", "Wanted", "explain_study", "resume_study", "run_study"]
