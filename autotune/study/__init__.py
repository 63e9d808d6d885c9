"""A study from its first trial to its verdict: baseline, search, finals, summary."""

from autotune.study.loop import resume_study, run_study
from autotune.study.plan import Clock, Listener, Plan, Tracking

__all__ = ["Clock", "Listener", "Plan", "Tracking", "resume_study", "run_study"]
