"""Fakes for tests and replays: a launcher over a synthetic response surface, a clock that does not wait, a recording listener."""

from autotune.testing.clock import VirtualClock
from autotune.testing.launcher import FakeLauncher, Surface
from autotune.testing.listener import RecordingListener

__all__ = ["FakeLauncher", "RecordingListener", "Surface", "VirtualClock"]
