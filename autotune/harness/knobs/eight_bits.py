"""Makes loaders yield uint8 instead of float32 (loader.uint8_transfer) and verifies it; see delayed.py for how it works."""

from __future__ import annotations

from itertools import islice
from typing import Any, Dict

import torch
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from .. import batches, members
from ..context import TrialContext
from ..patches import patches, replace_of_object
from ..protocol import APPLIED, NOT_APPLICABLE, KnobReport
from .base import KnobHandler

KEY = "loader.uint8_transfer"
MARK = "_autotune_is_of_bytes"
NUM_LEVELS = 256  # values of a byte
MAX_CHANNELS = 16  # a tensor with more is not an image
# How many tensors of the first batch are examined, and how many values of each; this takes milliseconds.
MAX_TENSORS, MAX_VALUES = 8, 2**18
MIN_SHARE = 0.5  # the knob counts as applied if more than this share of the batches is uint8
NO_IMAGES = (
    "the training batches hold no images converted from 8 bits, which would be float32 tensors of at least three dimensions "
    f"with at most {NUM_LEVELS} different values in a channel"
)
NOT_DELAYED = (
    "{} of {} batches left the loader as uint8: its data set does not convert images to float32 with torch, or the loader "
    "processes the images further after conversion and normalisation"
)
ON_THE_HOST = "{} of {} batches were converted on the device: the program uses the others before it moves them to the device"


class EightBitKnobs(KnobHandler):
    """Patches loaders as they begin to fetch, if the knob asks for it."""

    keys = (KEY,)

    def __init__(self, context: TrialContext) -> None:
        super().__init__(context)
        self.is_asked = self.asked.get(KEY) is True
        if self.is_asked:
            self._patch_fetching()

    def mark(self, loader: Any) -> None:
        """Marks a loader as the training loader."""
        if self.is_asked:
            loader.__dict__[MARK] = True

    def is_for(self, loader: Any) -> bool:
        """Returns whether the workers of a loader should send uint8."""
        return self.is_asked and MARK in loader.__dict__

    def _patch_fetching(self) -> None:
        from .. import delayed

        delayed.watch_conversions()

        def around(start: Any) -> Any:
            def __init__(iterator: Any, loader: Any) -> None:
                start(iterator, loader)
                if self.is_for(loader):
                    replace_of_object(iterator._dataset_fetcher, "fetch", delayed.during)

            return __init__

        patches.install(_SingleProcessDataLoaderIter, "__init__", around)

    def applicability(self) -> Dict[str, str]:
        """Returns why the knob cannot be changed, for the training loader of the baseline."""
        training = self._context.loaders.training
        return {KEY: NO_IMAGES} if training is not None and training.is_of_bytes is False else {}

    def verify(self) -> Dict[str, KnobReport]:
        """Returns the knob's report: whether uint8 batches arrived and, on a GPU, were converted there."""
        training = self._context.loaders.training
        if training is None or not self.asked:
            return {}
        if not self.is_asked:
            return {KEY: KnobReport(APPLIED, "", False)}
        from ..delayed import state

        # Batches are counted as they arrive, so a few more are counted than are trained on. If a batch is a list of images,
        # each image is counted.
        num_batches, come, moved = training.total_batches, max(state.num_batches, state.num_on_device), state.num_on_device
        if come <= MIN_SHARE * num_batches:
            return {KEY: KnobReport(NOT_APPLICABLE, NOT_DELAYED.format(come or "none", f"{num_batches:.0f}"), False)}
        if self._context.device != "cpu" and moved <= MIN_SHARE * num_batches:
            return {KEY: KnobReport(NOT_APPLICABLE, ON_THE_HOST.format(moved or "none", f"{num_batches:.0f}"), False)}
        return {KEY: KnobReport(APPLIED, "", True)}


def are_bytes(batch: Any) -> bool:
    """Returns whether a batch seems to hold images that were uint8: their channels have few different values."""
    return any(_is_image_of_bytes(tensor) for tensor in islice(batches._tensors(batch), MAX_TENSORS))


def _is_image_of_bytes(tensor: Any) -> bool:
    image = members.plain(tensor) if isinstance(tensor, torch.Tensor) else None
    if image is None or image.dtype is not torch.float32 or image.device.type != "cpu" or image.dim() < 3 or not image.numel():
        return False
    image = image[0] if image.dim() > 3 else image
    if image.shape[0] > MAX_CHANNELS:
        return False
    channels = image.flatten(1)[:, : MAX_VALUES // image.shape[0]]
    num_values = sum(len(channel.unique()) for channel in channels)
    return num_values <= NUM_LEVELS * len(channels) and num_values * 2 <= channels.numel()
