"""Which DataLoader trains, how long the program waits for it, and what its workers can sustain.

The training loader is not known at construction, where its knobs must be set. The baseline finds it: the loader whose
batches come with the optimizer's steps, named by construction site and ordinal, together with the loader it was made from
(Accelerate constructs a second one around the first's batch sampler). Later trials turn knobs at those sites.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import time
from typing import Any, Dict, List, Optional, Tuple

from . import worker
from .apply import loader as apply_loader

_HARNESS = os.path.dirname(os.path.abspath(__file__)) + os.sep


class Loader:
    """What is known of one DataLoader of the program."""

    def __init__(self, ordinal_number: int, site: str, ordinal: int, arguments: Dict[str, Any]) -> None:
        self.number = ordinal_number
        self.site, self.ordinal = site, ordinal
        self.dataset = arguments.get("dataset")
        self.given_batch_sampler = arguments.get("batch_sampler")
        self.batch_sampler: Any = None
        self.batch_size: Optional[int] = None
        self.num_workers = 0
        self.counters_file = ""
        self.asked_worker_info = False
        self.is_target = False
        # since the last step
        self.samples = 0.0
        self.wait_s = 0.0
        self.num_yields = 0
        # over the trial
        self.num_steps_fed = 0
        self.counted_from: List[Tuple[float, float]] = []
        self.total_samples = self.total_wait_s = self.total_batches = 0.0


class LoaderWatch:
    """Watches every DataLoader of this process."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self._spec = session.spec
        self.loaders: List[Loader] = []
        self._ordinals: Dict[str, int] = {}
        self._touched: List[Loader] = []
        self.training: Optional[Loader] = None
        self.reports: Dict[str, Any] = {}
        self._patch()

    # --- entry ---

    def _patch(self) -> None:
        from torch.utils.data import DataLoader
        from torch.utils.data import dataloader as module

        construct, signature = DataLoader.__init__, inspect.signature(DataLoader.__init__)
        watch = self

        @functools.wraps(construct)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            if "_autotune" in self.__dict__ or os.getpid() != watch._session.pid:
                construct(self, *args, **kwargs)
                return
            bound = signature.bind(self, *args, **kwargs)
            info = watch._constructing(bound.arguments)
            bound.arguments.pop("self")
            extra = bound.arguments.pop("kwargs", {})
            construct(self, **bound.arguments, **extra)
            watch._constructed(self, info)

        DataLoader.__init__ = __init__  # type: ignore[method-assign]
        base = module._BaseDataLoaderIter
        start, advance = base.__init__, base.__next__
        ask = module.get_worker_info if hasattr(module, "get_worker_info") else None

        @functools.wraps(start)
        def iterator_init(self: Any, loader: Any) -> None:
            self._autotune = loader.__dict__.get("_autotune")
            start(self, loader)

        @functools.wraps(advance)
        def __next__(self: Any) -> Any:
            info = self._autotune
            if info is None:
                return advance(self)
            began_s = time.monotonic()
            batch = advance(self)
            watch._yielded(info, batch, time.monotonic() - began_s)
            return batch

        base.__init__, base.__next__ = iterator_init, __next__
        if ask is not None:
            self._patch_worker_info(ask)

    def _patch_worker_info(self, ask: Any) -> None:
        # An IterableDataset that never asks which worker it is in yields its data once per worker.
        import torch.utils.data

        self.num_worker_info_asked = 0

        @functools.wraps(ask)
        def get_worker_info() -> Any:
            self.num_worker_info_asked += 1
            return ask()

        torch.utils.data.get_worker_info = get_worker_info  # type: ignore[assignment]
        torch.utils.data._utils.worker.get_worker_info = get_worker_info  # type: ignore[assignment]

    num_worker_info_asked = 0

    # --- construction ---

    def _constructing(self, arguments: Dict[str, Any]) -> Loader:
        site = _construction_site()
        ordinal = self._ordinals.get(site, 0)
        self._ordinals[site] = ordinal + 1
        info = Loader(len(self.loaders), site, ordinal, arguments)
        info.is_target = self._is_target(info)
        if info.is_target:
            apply_loader.apply(self._spec.knobs, arguments, self.reports, self._chained(info))
        num_workers = arguments.get("num_workers", 0)
        if isinstance(num_workers, int) and num_workers > 0 and self._spec.mode == "measure":
            info.counters_file = os.path.join(self._spec.folder, f"loader{info.number}.{os.getpid()}.bin")
            worker.create(info.counters_file, num_workers)
            arguments["worker_init_fn"] = worker.WorkerInit(info.counters_file, arguments.get("worker_init_fn"))
        return info

    def _constructed(self, loader: Any, info: Loader) -> None:
        info.batch_sampler = getattr(loader, "batch_sampler", None)
        size = getattr(loader, "batch_size", None)
        info.batch_size = size if size is not None else getattr(info.batch_sampler, "batch_size", None)
        info.num_workers = loader.num_workers
        info.settings = apply_loader.settings(loader, info.batch_size)  # type: ignore[attr-defined]
        loader.__dict__["_autotune"] = info
        self.loaders.append(info)

    def _is_target(self, info: Loader) -> bool:
        targets = self._spec.target or []
        if any(t["site"] == info.site and t["ordinal"] == info.ordinal for t in targets):
            return True
        # A program that builds its loader anew each epoch: the same site over the same data.
        known = [other for other in self.loaders if other.is_target and other.site == info.site]
        return any(other.dataset is info.dataset for other in known)

    def _chained(self, info: Loader) -> bool:
        """Whether this loader was made around the batch sampler of an earlier target, which carries the batch size."""
        return any(other.is_target and _is_around(info.given_batch_sampler, other.batch_sampler) for other in self.loaders)

    # --- batches and steps ---

    def _yielded(self, info: Loader, batch: Any, wait_s: float) -> None:
        if not info.num_yields:
            self._touched.append(info)
        info.num_yields += 1
        info.wait_s += wait_s
        info.samples += num_samples(batch, info.batch_size)
        if not self._session.num_steps and self._session.phase == "init":
            self._session.enter("first_batch")

    def take_step(self, forward_samples: float) -> Tuple[float, float, bool]:
        """Returns (samples, seconds waited for input, whether a foreign loader ran) of the step that just ended.

        Samples are what the training loader delivered: that counts accumulation by itself, a GAN's several forwards once
        and an LBFGS closure's repetitions once. Without a loader they are the leading dimension of the forward calls; without
        either, the step itself.
        """
        samples = wait_s = 0.0
        is_foreign = False
        for info in self._touched:
            info.num_steps_fed += 1
            if self.training is None or info.num_steps_fed > self.training.num_steps_fed:
                self.training = info
        for info in self._touched:
            if info is self.training:
                samples, wait_s = info.samples, info.wait_s
                info.total_samples += samples
                info.total_wait_s += wait_s
                info.total_batches += info.num_yields
            else:
                is_foreign = True
            info.samples = info.wait_s = 0.0
            info.num_yields = 0
        self._touched.clear()
        if self.training is not None and self._session.num_steps > 2 and self.training.num_steps_fed * 2 < self._session.num_steps:
            return forward_samples or 1.0, wait_s, False  # that loader does not feed the steps
        if samples:
            self.unit, self.unit_source = "samples", "loader"
            return samples, wait_s, is_foreign
        if forward_samples:
            self.unit, self.unit_source = "samples", "forward calls"
            return forward_samples, wait_s, is_foreign
        return 1.0, wait_s, is_foreign

    unit, unit_source = "steps", "optimizer steps: no batch dimension was found"

    def num_workers(self) -> int:
        """Workers of the training loader; 0 without one."""
        return self.training.num_workers if self.training else 0

    def open_window(self) -> None:
        """Notes where the producers stand as the window opens."""
        if self.training is not None:
            self.training.counted_from = worker.read(self.training.counters_file)

    def capacity_per_s(self) -> Optional[float]:
        """Returns L: the samples per second that the training loader can sustain; None without a loader or counts.

        With workers, the sum over workers of batches per busy second; without, the samples per second spent in __next__.
        """
        loader = self.training
        if loader is None or not loader.total_batches:
            return None
        per_batch = loader.total_samples / loader.total_batches
        if not loader.counters_file:
            return loader.total_samples / loader.total_wait_s if loader.total_wait_s > 0 else None
        now = worker.read(loader.counters_file)
        rates = []
        for index, (batches, busy_s) in enumerate(now):
            before = loader.counted_from[index] if index < len(loader.counted_from) else (0.0, 0.0)
            recent, recent_s = batches - before[0], busy_s - before[1]
            if recent >= 3:  # the window alone, free of the first batch's cold start
                batches, busy_s = recent, recent_s
            if busy_s > 0:
                rates.append(batches / busy_s)
        return sum(rates) * per_batch if rates else None

    def target(self) -> Optional[List[Dict[str, Any]]]:
        """Returns the construction sites of the training loader and of those it was made from, in construction order."""
        if self.training is None:
            return None
        chain = [self.training]
        for other in reversed(self.loaders[: self.training.number]):
            if _is_around(chain[0].given_batch_sampler, other.batch_sampler) and other.batch_sampler is not None:
                chain.insert(0, other)
        return [{"site": info.site, "ordinal": info.ordinal} for info in chain]


def num_samples(batch: Any, batch_size: Optional[int]) -> float:
    """Returns how many samples a batch holds: its leading dimension, or the loader's batch size where they disagree.

    A last, smaller batch counts as what it is; a list of images of one sample each, whose first tensor's leading dimension
    is a channel count, counts as the loader's batch size.
    """
    leading = leading_dimension(batch)
    if batch_size is None:
        return leading
    if isinstance(batch, (list, tuple)) and leading != len(batch) and len(batch) == batch_size:
        return batch_size
    return leading if 0 < leading <= batch_size else batch_size


def leading_dimension(batch: Any, depth: int = 0) -> float:
    """Returns the leading dimension of the first tensor found in a (nested) batch; 0 when there is none."""
    shape = getattr(batch, "shape", None)
    if shape is not None:
        return shape[0] if len(shape) else 0
    if depth > 3:
        return 0
    if isinstance(batch, dict) or hasattr(batch, "keys"):
        items: Any = (batch[key] for key in batch)
    elif isinstance(batch, (list, tuple)):
        items = batch
    elif hasattr(batch, "__dict__"):
        items = vars(batch).values()
    else:
        return 0
    for item in items:
        found = leading_dimension(item, depth + 1)
        if found:
            return found
    return 0


def _is_around(outer: Any, inner: Any) -> bool:
    """Whether a batch sampler is another one or was made around it."""
    for _ in range(4):
        if outer is None or inner is None:
            return False
        if outer is inner:
            return True
        outer = getattr(outer, "batch_sampler", None)
    return False


def _construction_site() -> str:
    """Returns "file:line" of the nearest caller outside torch and the harness."""
    import torch

    library = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((library, _HARNESS)) and not name.startswith("<frozen"):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "?"
