"""Describes the rest of a study: the plan after the baseline, and the time left before each trial."""

from __future__ import annotations

from autotune.quantities import clock_text, seconds_text
from autotune.trials.events import Outlook


def plan_text(outlook: Outlook) -> str:
    """Returns how many search trials fit and how long they take: "room for 24 trials in 3 min, ..."."""
    each = f"about {seconds_text(outlook.trial_s)} each"
    more = " more" if outlook.num_searched else ""
    if outlook.num_trials is None:
        return f"no limit was given:{more} trials until no improvement is expected, {each}"
    if not outlook.num_trials:
        return f"no room for {'one more' if more else 'a whole'} trial besides the finals, at {each}"
    trials = f"{outlook.num_trials}{more} trial{'' if outlook.num_trials == 1 else 's'}"
    needed_s = outlook.num_trials * outlook.trial_s
    if outlook.search_s is None or outlook.left_s is None:
        return f"{trials} at most in about {seconds_text(needed_s)}, {each}, then the finals"
    rest_s = outlook.left_s - outlook.explain_s - outlook.search_s
    time = f"{seconds_text(min(needed_s, outlook.search_s))}, {each}"
    finals = f"then at most {seconds_text(rest_s)} for the finals"
    finals += f" and {seconds_text(outlook.explain_s)} to explain the result" if outlook.explain_s else ""
    return f"room for {trials} in {time}, fewer if little improvement is expected; {finals}"


def left_text(outlook: Outlook) -> str:
    """Returns what is left: "6:40 left, 3:52 to search"; without a time limit "12 trials left"; "" without any limit."""
    if outlook.left_s is None:
        num = outlook.num_trials
        return "" if num is None else f"{num} trial{'' if num == 1 else 's'} left"
    search = "" if outlook.search_s is None else f", {clock_text(outlook.search_s)} to search"
    return f"{clock_text(outlook.left_s)} left{search}"
