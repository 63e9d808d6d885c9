"""Prepares modules for DistributedDataParallel: sets their knobs before the wrapper is constructed.

Layout and compilation must be set before: setting channels_last later raises a stride error in the wrapper's reducer.
"""

from __future__ import annotations

import weakref
from typing import Any, Dict, List, Optional, Tuple

from torch.nn.parallel import DistributedDataParallel

from .context import TrialContext
from .knobs import module as module_knobs
from .patches import patches


class Wrapping:
    """Watches the construction of all wrappers of this process.

    Attributes:
        names: class names of the wrappers, in the order of their construction.
    """

    def __init__(self, context: TrialContext) -> None:
        self._context = context
        self._knobs, self._parallel = context.handlers.module, context.handlers.parallel
        # Prepared modules, and what was observed just before. Weak references; in a dict, they would call the modules' __eq__.
        self._prepared: List[Tuple[Any, Dict[str, Any]]] = []
        self.names: List[str] = []
        self._watch()

    def _watch(self) -> None:
        def around(construct: Any) -> Any:
            def __init__(wrapper: Any, module: Any, *args: Any, **kwargs: Any) -> None:
                try:
                    self._prepare(wrapper, module)
                    args, kwargs = self._parallel.arguments(construct, wrapper, (module, *args), kwargs)
                except Exception:
                    self._context.broke("preparing a module for its wrapper")
                    args = (module, *args)
                construct(wrapper, *args, **kwargs)
                self._parallel.add(wrapper)

            return __init__

        patches.install(DistributedDataParallel, "__init__", around)

    def _prepare(self, wrapper: Any, module: Any) -> None:
        if self.observed_before(module) is None:
            observed = module_knobs.observe(module)
            alive = [each for each in self._prepared if each[0]() is not None]
            self._prepared = [*alive, (weakref.ref(module), observed)]
            self._knobs.on_module(module, observed)
        self.names.append(type(wrapper).__name__)

    def observed_before(self, module: Any) -> Optional[Dict[str, Any]]:
        """Returns what `observe` found of a module before it was prepared; None if it was not prepared."""
        return next((observed for known, observed in self._prepared if module is not None and known() is module), None)
