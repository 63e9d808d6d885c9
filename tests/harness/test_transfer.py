"""Transfers of batches to the device. torch's meta device, which has shapes but no streams, stands for a GPU."""

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from autotune.harness import persistent
from autotune.harness.knobs.transfer import AHEAD, NON_BLOCKING, REUSED, TOO_EARLY, TransferKnobs
from autotune.harness.patches import patches
from autotune.harness.protocol import APPLIED, NOT_APPLICABLE
from tests.harness.contexts import context

DEVICE = "meta"


class FakeStreams:
    """Records which tensors are copied ahead and which are passed to the program, by their first elements."""

    def __init__(self) -> None:
        self.began: list[float] = []
        self.handed_over: list[float] = []

    def copy(self, tensor: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, float]:
        self.began.append(float(tensor.flatten()[0]))
        return tensor.to(device), self.began[-1]

    def hand_over(self, copy: torch.Tensor, event: float) -> None:
        self.handed_over.append(event)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The values of `non_blocking` with which copies to the device are made."""
    seen: list[Any] = []
    to = torch.Tensor.to

    def noted(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("device") == torch.device(DEVICE):
            seen.append(kwargs.get("non_blocking"))
        return to(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", noted)
    return seen


@pytest.fixture
def transfer(asked: list[Any]) -> Iterator[Any]:
    def make(**knobs: bool) -> tuple[TransferKnobs, FakeStreams]:
        streams = FakeStreams()
        given = {{"non_blocking": NON_BLOCKING, "ahead": AHEAD}[name]: value for name, value in knobs.items()}
        return TransferKnobs(context(given), streams), streams

    yield make
    patches.uninstall_all()


def loader(workers: int = 0, **given: Any) -> DataLoader[Any]:
    numbers = torch.arange(1.0, 7.0)
    return DataLoader(TensorDataset(numbers, numbers * 10), batch_size=1, num_workers=workers, **given)


@pytest.mark.parametrize(("own", "value"), [(False, True), (True, False)])
def test_only_tensors_of_the_loader_are_copied_as_asked(transfer: Any, asked: list[Any], own: bool, value: bool) -> None:
    found, _ = transfer(non_blocking=value)
    for x, y in loader():
        assert x.to(DEVICE, torch.float64, own).dtype is torch.float64
        assert y.to(device=DEVICE, non_blocking=own).device.type == DEVICE
        assert y.to(torch.int64).device.type == "cpu"
        (y * 2).to(device=torch.device(DEVICE), non_blocking=own)  # the program's own argument wins
    assert asked == [value, value, own] * 6
    assert found.verify()[NON_BLOCKING].status == APPLIED


def test_copy_that_the_program_requests_is_left_alone(transfer: Any, asked: list[Any]) -> None:
    transfer(non_blocking=True)
    for x, _ in loader():
        assert x.to(device=torch.device(DEVICE), copy=True).device.type == DEVICE
        with pytest.raises(TypeError):
            x.to(nowhere=True)
    assert asked == [None] * 6


@pytest.mark.parametrize("workers", [0, 1])
def test_tensors_that_the_program_moves_are_copied_one_batch_ahead(transfer: Any, workers: int) -> None:
    found, streams = transfer(ahead=True)
    seen = []
    for x, y in loader(workers):
        assert x.to(DEVICE).device.type == DEVICE
        seen.append((float(x), float(y)))  # x is not moved in place, and y is never moved
    assert seen == [(float(n), float(n) * 10) for n in range(1, 7)]
    assert streams.began == streams.handed_over == [3.0, 4.0, 5.0, 6.0]  # batch 1 shows what moves; 3 is the first ahead
    assert found.verify()[AHEAD].status == APPLIED


@pytest.mark.parametrize(
    "change",
    [lambda x: x.add_(1), lambda x: x.numpy().fill(1), lambda x: np.asarray(x).fill(1), lambda x: x[:1].numpy().fill(1)],
    ids=["in place", "array", "asarray", "array of a view"],
)
def test_tensor_that_changes_on_the_host_is_copied_again(transfer: Any, change: Callable[[Any], Any]) -> None:
    _, streams = transfer(ahead=True)
    for x, _ in loader():
        change(x)
        x.to(DEVICE)
    assert streams.began
    assert not streams.handed_over


def test_tensor_that_requires_gradients_since_it_was_copied_is_copied_again(transfer: Any) -> None:
    _, streams = transfer(ahead=True)
    for x, _ in loader():
        x.requires_grad_()
        moved = x.to(DEVICE)
        assert moved.requires_grad
        assert moved.grad_fn is not None
    assert streams.began
    assert not streams.handed_over


def test_tensors_of_torchvision_keep_their_class_as_without_the_knob(transfer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = pytest.importorskip("torchvision.tv_tensors")
    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor: "moved by torch's own function")  # there is no GPU
    transfer(non_blocking=True)
    boxes = kinds.BoundingBoxes(torch.ones(1, 4), format="XYXY", canvas_size=(8, 8))
    assert type(boxes.to(DEVICE)) is kinds.BoundingBoxes
    for image in DataLoader([kinds.Image(torch.ones(3, 8, 8))], batch_size=None):  # type: ignore[arg-type]
        assert type(image.to(DEVICE)) is kinds.Image
        assert image.cuda() == "moved by torch's own function"  # torch drops the class there, but keeps it in `to`


def test_batches_collected_in_a_list_are_not_all_copied_ahead(transfer: Any) -> None:
    _, streams = transfer(ahead=True)
    batches = loader()
    for x, _ in batches:
        x.to(DEVICE)
    streams.began.clear()
    kept = list(batches)
    assert len(kept) == 6
    assert streams.began == [2.0, 3.0]


def test_epoch_that_ends_early_leaves_no_batches_for_the_next_one(transfer: Any) -> None:
    transfer(ahead=True)
    batches = loader(1, persistent_workers=True)
    for _ in range(3):
        seen = []
        for x, _ in batches:
            x.to(DEVICE)
            seen.append(float(x))
            if len(seen) == 3:
                break
        assert seen == [1.0, 2.0, 3.0]
    assert [float(x) for x, _ in batches] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


def test_kept_iterator_yields_its_last_batch_even_if_another_one_has_started(transfer: Any) -> None:
    transfer(ahead=True)
    persistent._install.cache_clear()
    batches = loader(1, persistent_workers=True)
    persistent.watch(batches)
    kept = [iter(batches)]
    for _ in range(5):
        next(kept[0])[0].to(DEVICE)
    assert float(next(iter(batches))[0]) == 1.0
    assert [float(x) for x, _ in kept[0]] == [6.0]


@pytest.mark.parametrize("calls", [7, 6], ids=["to the end", "cut short"])
def test_objects_of_an_epoch_are_freed_when_it_ends(transfer: Any, calls: int) -> None:
    transfer(ahead=True)
    freed: list[Any] = []

    def train() -> None:
        class Activations:
            pass

        activations, iterator = Activations(), iter(loader())
        freed.extend([weakref.ref(activations), weakref.ref(iterator)])
        with contextlib.suppress(StopIteration):
            for _ in range(calls):
                next(iterator)[0].to(DEVICE)

    gc.disable()
    try:
        train()
        assert [each() for each in freed] == [None, None]
    finally:
        gc.enable()


def test_error_in_the_data_set_is_raised_when_its_batch_is_due(transfer: Any) -> None:
    class Faulty(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            if index == 4:
                raise ArithmeticError("the data set's own trouble")
            return super().__getitem__(index)

    transfer(ahead=True)
    seen = []

    def train() -> None:
        for (x,) in DataLoader(Faulty(torch.arange(6.0)), batch_size=1):
            x.to(DEVICE)
            seen.append(float(x))

    with pytest.raises(ArithmeticError, match="own trouble"):
        train()
    assert seen == [0.0, 1.0, 2.0, 3.0]


def test_nothing_is_copied_ahead_from_a_loader_that_saves_its_position(transfer: Any) -> None:
    class Iterator(_SingleProcessDataLoaderIter):
        def state_dict(self) -> int:
            return int(self._num_yielded)

    class Saving(DataLoader[Any]):
        def _get_iterator(self) -> Any:
            return Iterator(self)

    _, streams = transfer(ahead=True)
    iterator = iter(Saving(TensorDataset(torch.arange(6.0))))
    for number, (x,) in enumerate(iterator, 1):
        x.to(DEVICE)
        assert iterator.state_dict() == number
    assert not streams.began


def test_iterator_from_before_the_knob_is_set_yields_all_batches(transfer: Any) -> None:
    iterator = iter(loader())
    transfer(ahead=True)
    assert [float(x) for x, _ in iterator] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


@pytest.mark.parametrize(
    ("is_changed", "reuses_tensors", "reasons"),
    [
        (True, False, {AHEAD: TOO_EARLY}),
        (False, True, {AHEAD: REUSED, NON_BLOCKING: REUSED}),
        (False, False, {}),
    ],
)
def test_copying_ahead_is_refused_if_batches_change_later(
    is_changed: bool, reuses_tensors: bool, reasons: dict[str, str]
) -> None:
    training = SimpleNamespace(is_changed_between_batches=is_changed, reuses_tensors=reuses_tensors)
    assert TransferKnobs(context(loaders=SimpleNamespace(training=training))).applicability() == reasons


def test_knobs_are_not_applicable_if_the_program_moves_no_tensors(transfer: Any) -> None:
    found, streams = transfer(ahead=True, non_blocking=True)
    assert [float(x) for x, _ in loader()] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert not streams.began
    reports = found.verify()
    assert {report.status for report in reports.values()} == {NOT_APPLICABLE}
