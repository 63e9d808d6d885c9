"""Defines the common interface of all knobs in the training process: setting, observing and verifying them."""

from __future__ import annotations

import contextlib
from typing import Any, Dict, Iterator, Tuple

from ..context import TrialContext
from ..protocol import APPLIED, OVERRIDDEN, KnobReport

APPLYING = "autotune_knob"  # attribute of an exception: the knob that was being set
ON_THE_CPU = "the program trains on the CPU"


class KnobHandler:
    """Handles one knob, or a family of knobs that are set in the same place. A subclass overrides what it needs.

    Handlers are made once torch is imported, in the order of `registry.Handlers`. Some families do other work as well: they
    change the arguments of a DataLoader, or a module before its first call. Their handlers have further methods for this, such
    as `on_loader`. LoaderWatch and ModuleWatch call them.

    Attributes:
        keys: keys of the knobs, the same as on the tuner's side.
    """

    keys: Tuple[str, ...] = ()

    def __init__(self, context: TrialContext) -> None:
        self._context = context

    @property
    def asked(self) -> Dict[str, Any]:
        """Knob key -> value, for the trial's knobs that this handler sets."""
        knobs = self._context.spec.knobs
        return {key: knobs[key] for key in self.keys if key in knobs}

    def on_torch(self) -> None:
        """Called once torch has been imported, before the program continues."""

    def on_activate(self) -> None:
        """Called before the first step is counted, when the device is known and the program has set its own values."""

    def observe(self) -> Dict[str, Any]:
        """Returns knob key -> value in force in the program. Knobs that cannot be read back are absent."""
        return {}

    def applicability(self) -> Dict[str, str]:
        """Returns knob key -> why it cannot be changed in this program; used in the baseline."""
        return {}

    def verify(self) -> Dict[str, KnobReport]:
        """Returns a report for each requested knob."""
        return {key: self._verify(key, value) for key, value in self.asked.items()}

    def _verify(self, key: str, asked: Any) -> KnobReport:
        return compared(self.observe().get(key), asked)


def compared(found: Any, asked: Any) -> KnobReport:
    """Returns the report of a knob whose value `found` was read back: applied if it equals `asked`, otherwise overridden."""
    if str(found) == str(asked):
        return KnobReport(APPLIED, "", found)
    return KnobReport(OVERRIDDEN, f"{asked!r} was requested, but the process has {found!r}", found)


@contextlib.contextmanager
def applying(key: str) -> Iterator[None]:
    """Adds `key` to any exception raised while this knob is set, so that the search knows which knob caused the failure."""
    try:
        yield
    except Exception as error:
        with contextlib.suppress(Exception):
            setattr(error, APPLYING, key)
        raise
