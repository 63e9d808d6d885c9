"""Finds which DataLoader trains, and measures how long the program waits for it.

Knobs must be set when a loader is constructed, but it is not known at that time which loader trains. The baseline finds out:
the training loader is the one whose batches come with the optimizer's steps. It is identified by the site that constructs it,
"file:line", and its ordinal among the loaders made there. If a library has made the training loader around the batch sampler
of another loader, the other loader is identified in the same way. Later trials set knobs at these sites.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import time
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, dataloader
from torch.utils.data.dataloader import _BaseDataLoaderIter, _MultiProcessingDataLoaderIter

from . import adapters, added_workers, batches, members, persistent, sites, worker
from .context import TrialContext
from .idle_steps import IdleSteps
from .knobs import loader as loader_knobs
from .knobs import process as process_knobs
from .loader import Loader
from .patches import patches
from .worker_starts import WorkerStarts

STEPS = ("steps", "optimizer steps: no batch dimension was found")  # `unit` and `unit_source` if no samples are known
LEAST_STEPS = 3  # from this step on, a loader that fed only one step counts as not training if its iterator is gone
SHORT_EPOCH = 8  # in an epoch of at most this many steps, the first step is a large share, so it is not left out
COMPANION_FRAC = 0.1  # a loader that feeds at least this share of the steps in addition to the training loader trains as well


class LoaderWatch:
    """Watches every DataLoader of this process."""

    def __init__(self, context: TrialContext) -> None:
        self._context = context
        self._spec = context.spec
        self.loaders: List[Loader] = []
        self._ordinals: Dict[str, int] = {}
        self.touched: List[Loader] = []  # loaders that have yielded a batch since the last step
        self.training: Optional[Loader] = None
        self.unit, self.unit_source = STEPS
        self._units_per_sample = float(self._spec.tokens_per_sample or 1)  # 1, or the tokens of a sample
        self._is_measuring = self._spec.mode != "apply"
        self._is_examining = self._is_measuring and self._spec.target is None  # only the baseline examines data sets
        self._sites = sites.TargetSites(self._spec.target)
        self.is_uninstalled = False
        self._idle = IdleSteps(context)
        self._num_in_turn = 0  # steps that were fed by another loader, because the loaders take turns
        self._current: Optional[Loader] = None
        self.is_on_gpu = False
        self.starts = WorkerStarts(context, self._may_train)
        self._patch_iteration()
        self._patch_kinds(DataLoader, _MultiProcessingDataLoaderIter)
        for name, kinds in adapters.LOADERS.items():
            patches.on_import(name, functools.partial(self._patch_library, kinds))
        if self._is_measuring:
            self._patch_worker_info()

    def _patch_library(self, names: Tuple[str, str], module: Any) -> None:
        if all(hasattr(module, name) for name in names):
            self._patch_kinds(*(getattr(module, name) for name in names))

    def _patch_kinds(self, loader: Any, iterator: Any) -> None:
        """Watches a class of loaders and that of its iterators with workers."""
        self._patch_construction(loader)
        self.starts.watch(iterator)
        self._iteration.append(patches.install(iterator, "_reset", self._around_reset))

    def _around_reset(self, reset: Any) -> Any:
        # Only iterators with workers are used for several epochs. SpeechBrain replaces `_reset` of their base class.
        def _reset(iterator: Any, *args: Any, **kwargs: Any) -> None:  # (loader, first_iter=False)
            is_first = args[1] if len(args) > 1 else kwargs.get("first_iter")
            info, probe = getattr(iterator, "_autotune", None), getattr(iterator, "_autotune_probe", None)
            if info is not None and not is_first:  # persistent workers: the iterator stays
                self._begins_epoch(info)
            if probe is not None:
                probe.begin()
            reset(iterator, *args, **kwargs)

        return _reset

    def _patch_construction(self, kind: Any) -> None:
        signature = inspect.signature(kind.__init__)

        def around(construct: Any) -> Any:
            def __init__(loader: Any, *args: Any, **kwargs: Any) -> None:
                bound = signature.bind(loader, *args, **kwargs)
                info = self._constructing(bound.arguments, has_own_iterators=kind is not DataLoader)
                bound.arguments.pop("self")
                extra = bound.arguments.pop("kwargs", {})
                construct(loader, **bound.arguments, **extra)
                if info is not None:
                    self._constructed(loader, info)

            return __init__

        patches.install(kind, "__init__", around)

    def _patch_iteration(self) -> None:
        # All that each batch needs is in local variables, because attributes are mostly no longer in the CPU's caches here.
        watch, monotonic, get_ident, tensor, knobs = self, time.monotonic, threading.get_ident, Tensor, self._spec.knobs
        is_grad_enabled = torch.is_grad_enabled
        units_per_sample = self._units_per_sample

        def around_start(start: Any) -> Any:
            def __init__(self: Any, loader: Any) -> None:
                process_knobs.share(knobs)  # again: the program may have changed the sharing strategy since
                self._autotune = watch._current = info = loader.__dict__.get("_autotune")
                if info is not None:
                    info.begins(self)
                    watch._begins_epoch(info)
                    if watch._is_examining:
                        watch._guarded(functools.partial(info.examine, loader))
                start(self, loader)
                self._autotune_probe = None if info is None or info.sizes.is_known else batches.probe_batch_size(self)
                if info is not None and info.needs_indices_of(self._autotune_probe):
                    watch._indices.install()

            return __init__

        def around_index(advance: Any) -> Any:
            def _next_index(self: Any) -> Any:
                indices, probe = advance(self), getattr(self, "_autotune_probe", None)
                if probe is not None:
                    probe.note(indices)
                info = getattr(self, "_autotune", None)
                if info is not None and info.is_watched:
                    watch._guarded(info.begin_fetch)
                return indices

            return _next_index

        def around_advance(advance: Any) -> Any:
            def __next__(self: Any) -> Any:
                info = getattr(self, "_autotune", None)  # an iterator from before `autotune.apply` has none
                if info is None:
                    return advance(self)
                watch._current = info
                if info.last_facts is not None:
                    watch._guarded(info.compare)
                info.thread = get_ident()
                if watch.is_on_gpu and watch._context.clock.begin is not None:
                    watch._asked()
                began_s = monotonic()
                batch = advance(self)
                if not is_grad_enabled():
                    info.is_read = True
                first = batch[0] if batch.__class__ in (list, tuple) and batch else batch
                if info.num_yields or first.__class__ is not tensor or first.dim() == 0 or first.size(0) != info.usual_batch:
                    watch._yielded(info, batch, monotonic() - began_s, self._autotune_probe)
                    return batch
                # The common case, one batch of the usual size, is inlined: a call of cold code costs a microsecond.
                info.samples = info.usual_batch * units_per_sample
                info.wait_s = monotonic() - began_s
                info.num_yields = 1
                watch.touched.append(info)
                return batch

            return __next__

        self._indices = patches.install(_BaseDataLoaderIter, "_next_index", around_index)
        self._iteration = [
            patches.install(_BaseDataLoaderIter, "__init__", around_start),
            patches.install(_BaseDataLoaderIter, "__next__", around_advance),
            self._indices,
        ]

    def settle(self) -> None:
        """Stops watching the indices of batches once nothing is left to find out from them. Called by `Session._look`."""
        if self._indices.is_active and not any(info.needs_indices for info in self.loaders):
            self._indices.uninstall()

    def _begins_epoch(self, info: Loader) -> None:
        """Called when an iteration over a loader begins: in short epochs, leaves out the time of an evaluation before it.

        In long epochs, the first step after an evaluation is left out as a whole, and the evaluation with it.
        """
        try:
            context, num_steps = self._context, self._context.num_steps
            if info.leaves_unused() and info in self.touched:
                info.take()
                self.touched.remove(info)
            if info is self.training and info.was_only_read(num_steps):
                context.modules.evaluated()
            info.begins_epoch(num_steps)
            is_evaluated = context.modules.is_evaluated
            over = [
                each for each in self.touched if is_evaluated or (each is not info and each.num_steps_ranked * 2 < num_steps)
            ]
            if info is not self.training or info.steps_per_epoch > SHORT_EPOCH or not (over or is_evaluated):
                return
            for each in over:
                each.take()
                self.touched.remove(each)
            context.modules.is_evaluated = False
            context.clock.leave_out()
            if context.explained is not None:
                context.explained.leave_out(0.0, 0.0)
        except Exception:
            self._context.broke("beginning an epoch")

    def uninstall(self) -> None:
        """Stops reading batches and forgets the loaders; loaders made later still get their knobs (mode "apply")."""
        if self.is_uninstalled:
            return
        self.is_uninstalled = True
        self._sites.begin_training(self.loaders)
        self.touched.clear()
        self.loaders, self.training, self._current = [], None, None
        for patch in self._iteration:
            patch.uninstall()

    def _patch_worker_info(self) -> None:
        # An IterableDataset that never asks which worker it is in yields its data once per worker.
        def around(ask: Any) -> Any:
            def get_worker_info() -> Any:
                is_torch = sys._getframe(1).f_globals.get("__name__", "").startswith("torch.")  # default_collate also asks
                if self._current is not None and not is_torch:
                    self._current.has_asked_worker_info = True
                if not is_torch:
                    worker.note_asking()
                return ask()

            return get_worker_info

        patches.install_in((torch.utils.data, torch.utils.data._utils.worker, dataloader), "get_worker_info", around)

    # --- construction ---

    def _constructing(self, arguments: Dict[str, Any], *, has_own_iterators: bool) -> Optional[Loader]:
        try:
            new = Loader(len(self.loaders), arguments)
            new.has_own_iterators = has_own_iterators
            if self.is_uninstalled:
                self._sites.change(new, arguments, self._context.handlers.loader)
                return new
            num_steps = self._context.num_steps
            same = [known for known in self.loaders if known.is_rebuilt_as(new)]
            info = next(iter(same or [known for known in self.loaders if known.is_followed_by(new, num_steps)]), new)
            info.made_step = num_steps
            if info is not new:
                info.renew(arguments)
            else:
                info.ordinal = self._ordinals.get(info.site, 0)
                info.nth = self._sites.nth(info.code)
                self._ordinals[info.site] = info.ordinal + 1
                info.is_target = self._is_target(info, arguments)
            if info.is_target:
                is_chained, is_unshared = self._is_chained(info, arguments), self._is_unshared(info)
                self._context.handlers.loader.on_loader(arguments, info, is_chained=is_chained, is_unshared=is_unshared)
        except Exception:
            self._context.broke("reading or changing a DataLoader's arguments")
            return None
        return info

    def _constructed(self, loader: Any, info: Loader) -> None:
        try:
            if info.is_made_persistent or persistent.is_remade(loader):
                persistent.watch(loader)
            if info.has_added_workers or added_workers.is_remade(loader):
                added_workers.watch(loader)
            if self.is_uninstalled:
                self._sites.made(members.attribute(loader, "batch_sampler"), info)
                return
            info.made(loader)
            info.batch_sampler = members.attribute(loader, "batch_sampler")
            size = members.attribute(loader, "batch_size")
            info.batch_size = size if size is not None else sites.batch_size_of(info.batch_sampler)
            info.num_shares = sites.num_shares_of(info.batch_sampler)
            info.num_workers = members.attribute(loader, "num_workers", 0)
            info.settings = loader_knobs.settings(loader, info.rows or info.batch_size)
            loader.__dict__["_autotune"] = info
            if info.number == len(self.loaders):
                self.loaders.append(info)
        except Exception:
            self._context.broke("reading a DataLoader")

    def _is_target(self, info: Loader, arguments: Dict[str, Any]) -> bool:
        if not any(key.startswith(loader_knobs.PREFIX) for key in self._spec.knobs):
            return False
        if not self._is_measuring:
            return self._sites.is_target(info, arguments, is_chained=self._is_chained(info, arguments))
        if self._spec.target is None:
            return True  # the training loader is not known yet: pinned knobs apply to all loaders
        return self._chosen(info) is not None

    def _chosen(self, info: Loader) -> Optional[Dict[str, Any]]:
        chosen = self._spec.target or []
        return next((each for each in chosen if each["site"] == info.site and each["ordinal"] == info.ordinal), None)

    def _may_train(self, info: Loader) -> bool:
        """Whether a loader trains; also True while it is not known which loaders train."""
        return not self._spec.target or self._chosen(info) is not None

    def is_training_now(self) -> bool:
        """Whether the loader that makes a batch in this process trains; also True while this is not known."""
        return self._current is None or self._may_train(self._current)

    def _is_unshared(self, info: Loader) -> bool:
        """Whether each worker of a loader would yield all of its data, as the baseline found (`target`)."""
        own = self._chosen(info) or {}
        return bool(own.get("is_unshared")) if self._is_measuring else self._sites.is_unshared

    def _is_chained(self, info: Loader, arguments: Dict[str, Any]) -> bool:
        """Whether this loader is made around the batch sampler of an earlier target, which then carries the batch size."""
        given = arguments.get("batch_sampler")
        return any(
            other is not info and other.is_target and sites.is_around(given, other.batch_sampler) for other in self.loaders
        )

    # --- batches and steps ---

    def _asked(self) -> None:
        try:
            self._context.clock.batch_is_asked()
        except Exception:
            self._context.broke("timing the wait for a batch")

    def _yielded(self, info: Loader, batch: Any, wait_s: float, probe: Optional[batches.BatchSizeProbe]) -> None:
        try:
            info.num_yields += 1
            info.wait_s += wait_s
            shape, sizes = batches.first_shape(batch), info.sizes
            asked = probe.last() if probe is not None else 0
            if info.batch_size == 1 and self._context.num_steps <= LEAST_STEPS:
                info.last_shape = batches.last_shape(batch)
            samples = 0.0 if batch is None else sizes.count(batch, shape, asked, info.batch_size)  # None: the program skips it
            if sizes.is_known and probe is not None:
                probe.is_active = False
            info.largest_batch = max(info.largest_batch, samples)
            info.samples += samples * self._units_per_sample
            is_plain = sizes.dimension == 0 or (not sizes.is_known and not asked)
            info.usual_batch = samples if is_plain and shape and samples == shape[0] else None
            if self._is_examining and info.needs_facts:
                info.note_facts(batches.first_tensor(batch))
                info.usual_batch = None  # the next batches must come here as well
            if info not in self.touched:  # last: if another thread ends a step before this line, the batch is of the next step
                self.touched.append(info)
            if self._context.phases.now == "init":
                self._context.phases.enter("first_batch")
        except Exception:
            self._context.broke("reading a batch")

    def _guarded(self, examine: Callable[[], None]) -> None:
        try:
            examine()
        except Exception:
            self._context.broke("examining a data set")

    def evaluated(self) -> None:
        """Notes that the model was called in evaluation mode."""
        for info in self.touched:
            info.evaluated()

    def begin_first_step(self) -> None:
        """Forgets the batches of steps that were not counted. Keeps the last batch, which belongs to the step that now begins.

        The samples and the wait of the last batch were not recorded separately, so it gets the mean over these batches.
        """
        for info in self.touched:
            info.samples, info.wait_s, info.num_yields = info.samples / info.num_yields, info.wait_s / info.num_yields, 1

    def take_step(self, forward_samples: float, forward_unit: str) -> Tuple[float, float, bool]:
        """Returns (samples, seconds waited for input, whether a loader ran that does not feed steps) of the step just ended.

        Samples are those that the training loader delivered, in all batches of the step if gradients are accumulated. A batch
        counts once, even if a GAN or the closure of LBFGS calls the model with it several times. A program that fetches one
        batch ahead has one step without samples. Without a loader, samples are read from the inputs of the forward calls. If
        both are missing, steps are counted.
        """
        num_steps = self._context.num_steps
        self._choose_training()
        training = self.training
        if training is not None and training.batch_size is None:
            self._compare_with_call(training)
        if training is not None and num_steps <= LEAST_STEPS:
            training.note_inputs([root.sizes.called for root in self._context.modules.roots])
        samples = wait_s = 0.0
        is_foreign, has_own = False, training in self.touched
        self._idle.note(training, is_fed=bool(self.touched))
        for info in self.touched:
            is_read = info.is_read or self._context.modules.is_evaluated
            taken, waited_s, num_batches = info.take()
            info.total_samples += taken
            info.total_wait_s += waited_s
            info.total_batches += num_batches
            waited_s = 0.0 if info.note_reader() else waited_s
            if info is training:
                samples = taken
                wait_s += waited_s
            elif has_own and is_read and info.num_steps_ranked == 1 and num_steps == 2:
                is_foreign = True  # an evaluation right after the first step
            elif info.num_steps_ranked * 2 < num_steps and (num_batches > 1 or (has_own and is_read)):
                is_foreign = True
            else:  # a second loader that also feeds the steps
                wait_s += waited_s
                if has_own:
                    self._note_companion(training, info)
                else:  # the loaders take turns: this step is on a batch of the second one
                    samples += taken
                    self._num_in_turn += 1
        self.touched.clear()
        if training is not None and forward_samples:
            samples += self._idle.samples(training, is_counted=self.unit_source == "loader")
        if training is not None and self._is_fed_by_loader(num_steps):
            self.unit, self.unit_source = self._unit(training.sizes.unit), "loader"
            return samples, wait_s, is_foreign
        if forward_samples:
            self.unit, self.unit_source = self._unit(forward_unit), "forward calls"
            return forward_samples * (self._units_per_sample if forward_unit == "samples" else 1.0), wait_s, is_foreign
        if self.unit_source == "loader" or not self._context.modules.living:
            self.unit, self.unit_source = STEPS
        is_counted = self.unit_source == "forward calls"  # if so, a step without a forward call has no samples
        return 0.0 if is_counted else 1.0, wait_s, is_foreign

    def _note_companion(self, training: Any, info: Loader) -> None:
        """Notes that a step took a batch of another loader as well, if such steps are frequent."""
        num_steps = self._context.num_steps
        if num_steps >= LEAST_STEPS and info.num_steps_fed >= COMPANION_FRAC * num_steps:
            training.companion = info.site

    @property
    def is_idle(self) -> bool:
        """Whether no loader was asked for a batch for some steps, so that forward calls should be counted."""
        return self._idle.is_long(self.training)

    def is_read_elsewhere(self) -> bool:
        """Whether the training loader's batches are fetched outside this thread, which makes the steps."""
        return self.training is not None and self.training.note_reader()

    def _compare_with_call(self, training: Loader) -> None:
        """Counts each item that a loader yields as one sample, if the loader does not batch but the program does."""
        root = next(iter(self._context.modules.roots), None)
        if root is not None and root.sizes.unit == "samples" and training.sizes.are_single(root.sizes.shape):
            training.samples, training.usual_batch = training.num_yields * self._units_per_sample, None

    def _unit(self, seen: str) -> str:
        return "tokens" if self._spec.tokens_per_sample else seen

    def _is_fed_by_loader(self, num_steps: int) -> bool:
        training = self.training
        if training is None or not training.total_samples:
            return False
        num_fed = training.num_steps_ranked + self._num_in_turn + self._idle.num_kept
        if training.num_steps_ranked >= LEAST_STEPS:
            num_fed += self._idle.num_open(training)
        return num_steps <= 2 or num_fed * 2 >= num_steps

    def _choose_training(self) -> None:
        # At first, the training loader is the last one touched before the first step (not that of an earlier validation). Later
        # it is the loader that fed the most steps. Another loader, for example a rebuilt one, takes over if it feeds
        # consecutive steps while the old one is idle.
        training, num_steps = self.training, self._context.num_steps
        for info in reversed(self.touched):
            info.num_steps_fed += 1
            info.num_steps_running = info.num_steps_running + 1 if info.fed_step == num_steps - 1 else 1
            info.fed_step = num_steps
            is_taking_over = info.num_steps_running > 1 and training is not None and training.fed_step < num_steps - 1
            if training is None or is_taking_over or info.num_steps_ranked > training.num_steps_ranked:
                training = info
        if training is not self.training and training is not None and self.training is not None:
            missing = self.training.num_steps_ranked - training.num_steps_ranked
            training.num_steps_before += max(0, missing)
        is_over = training is not None and num_steps >= LEAST_STEPS and training.is_given_up
        self.training = None if is_over else training

    @property
    def num_shares(self) -> Optional[int]:
        """Into how many shares, for different ranks, the training loader's sampler divides the data; None if unknown."""
        training = self.training or next(reversed(self.touched), None)
        return training.num_shares if training is not None else None

    def num_workers(self) -> int:
        """Returns the number of workers of the training loader; 0 without one."""
        return self.training.num_workers if self.training else 0

    def target(self) -> Optional[List[Dict[str, Any]]]:
        """Returns `RankResult.target`: the loaders that the training loader was made from, then itself; None without one."""
        if self.training is None:
            return None
        chain = [self.training]
        for other in reversed(self.loaders[: self.training.number]):
            if sites.is_around(chain[0].given_batch_sampler, other.batch_sampler):
                chain.insert(0, other)
        named: List[Dict[str, Any]] = [
            {"site": info.site, "ordinal": info.ordinal, "code": info.code, "nth": info.nth} for info in chain
        ]
        if not self.training.is_shared_out:
            named[-1]["is_unshared"] = True  # more workers would yield more data, not the same data sooner
        return named
