import os
import pty
import signal
import sys

import pytest

from autotune.clock import VirtualClock
from autotune.trials.interrupts import STOP_S, Interrupts


@pytest.fixture
def heard():
    return []


@pytest.fixture
def clock():
    return VirtualClock()


def press(number=signal.SIGINT):
    os.kill(os.getpid(), number)


def test_first_ctrl_c_requests_a_stop_and_the_second_stops_at_once(heard, clock):
    with Interrupts(heard.append, clock.monotonic) as interrupts:
        press()
        assert interrupts.is_requested
        assert "Press Ctrl-C again to stop now" in heard[0]
        with pytest.raises(KeyboardInterrupt):
            press()
        assert interrupts.reason == "stopped by the user"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_sigterm_and_sighup_stop_at_once(heard, clock, number):
    with Interrupts(heard.append, clock.monotonic) as interrupts:
        with pytest.raises(KeyboardInterrupt):
            press(number)
        assert interrupts.is_requested
        assert interrupts.reason == f"stopped by {number.name}"


def test_signals_during_a_stop_are_ignored_for_a_limited_time(heard, clock):
    with Interrupts(heard.append, clock.monotonic):
        with pytest.raises(KeyboardInterrupt):
            press(signal.SIGTERM)
        press()
        press(signal.SIGTERM)
        clock.sleep(STOP_S)
        with pytest.raises(KeyboardInterrupt):
            press()


def test_signals_count_again_once_the_trial_is_recorded(heard, clock):
    with Interrupts(heard.append, clock.monotonic) as interrupts:
        with pytest.raises(KeyboardInterrupt):
            press(signal.SIGTERM)
        interrupts.hear_again()
        with pytest.raises(KeyboardInterrupt):
            press()


def test_first_ctrl_c_interrupts_at_once_when_only_the_copy_in_mlflow_is_left(heard, clock):
    with Interrupts(heard.append, clock.monotonic) as interrupts:
        interrupts.hear_again()
        with pytest.raises(KeyboardInterrupt):
            press()
    assert heard == []


def test_a_signal_that_is_ignored_stays_ignored(heard, clock):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupts(heard.append, clock.monotonic) as interrupts:
            press(signal.SIGHUP)
            assert not interrupts.is_requested
    finally:
        signal.signal(signal.SIGHUP, before)


def test_output_to_a_closed_terminal_is_discarded_after_a_hang_up(heard, clock, monkeypatch):
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "__stdout__", terminal)
        with Interrupts(heard.append, clock.monotonic):
            os.close(ours)
            with pytest.raises(OSError, match="Input/output error"):
                os.write(theirs, b"x")
            with pytest.raises(KeyboardInterrupt):
                press(signal.SIGHUP)
            assert os.write(theirs, b"x") == 1
