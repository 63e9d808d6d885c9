"""Images that stay bytes until they are on the device have the same values, whatever a program does with them.

Transfers are tested on torch's meta device, which has shapes but no values. Another test compares the values on a GPU.
"""

import copy
import functools
import io
import json
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from torch.utils.data import DataLoader, Dataset, default_collate
from torchvision import transforms, tv_tensors
from torchvision.transforms import v2

from autotune.harness import delayed
from autotune.harness.knobs import eight_bits, transfer
from autotune.harness.patches import patches
from autotune.harness.protocol import APPLIED, NOT_APPLICABLE
from tests.harness.conftest import Run, Trial
from tests.harness.contexts import context

KEY = eight_bits.KEY
ON: dict[str, Any] = {KEY: True}
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
FLOAT = v2.ToDtype(torch.float32, scale=True)
ARRAY = np.random.default_rng(0).integers(0, 256, (40, 36, 3), np.uint8)
ARRAY.reshape(-1)[:256] = np.arange(256)

HAS_WRAP = hasattr(tv_tensors.Image, "wrap")  # before torchvision 0.28, its image classes cannot be replaced


def steps_of(*rest: Any) -> Any:
    return transforms.Compose([transforms.ToTensor(), transforms.Normalize(MEAN, STD), *rest])


IMAGES_OF_V2 = {
    "v2": v2.Compose([v2.ToImage(), FLOAT, v2.Normalize(MEAN, STD)]),
    "v2 in place": v2.Compose([v2.ToImage(), FLOAT, v2.Normalize(MEAN, STD, inplace=True), v2.ToPureTensor()]),
}
STAYING = {
    "ToTensor": transforms.ToTensor(),
    "v1": steps_of(),
    "in place": transforms.Compose([transforms.ToTensor(), transforms.Normalize(MEAN, STD, inplace=True)]),
    "ConvertImageDtype": transforms.Compose(
        [transforms.PILToTensor(), transforms.ConvertImageDtype(torch.float32), transforms.Normalize(MEAN, STD)]
    ),
    "v2 tensors": v2.Compose([v2.PILToTensor(), FLOAT, v2.Normalize(MEAN, STD)]),
    "weights": torchvision.models.ResNet18_Weights.DEFAULT.transforms(),
    "by hand": lambda image: 2 * 3.5 * torch.from_numpy(np.array(image)).permute(2, 0, 1).float().div(255).sub(0.5),
    "one channel": transforms.Compose([transforms.Grayscale(), transforms.ToTensor(), transforms.Normalize(0.5, 0.25)]),
    **(IMAGES_OF_V2 if HAS_WRAP else {}),
}
CONVERTED = {
    **({} if HAS_WRAP else IMAGES_OF_V2),
    "erased": steps_of(transforms.RandomErasing(p=1.0)),
    "resized as floats": v2.Compose([v2.ToImage(), FLOAT, v2.Resize(20), v2.Normalize(MEAN, STD)]),
    "to half": transforms.Compose([steps_of(), transforms.ConvertImageDtype(torch.float16)]),
}


@pytest.fixture
def fetching(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Returns a function that calls another as if a worker of the training loader fetched a batch."""
    for name in ("to", "float"):
        monkeypatch.setattr(torch.Tensor, name, getattr(torch.Tensor, name))
    state = delayed.State()
    monkeypatch.setattr(delayed, "state", state)
    delayed.watch_conversions.cache_clear()
    delayed.watch_conversions()

    def run(work: Callable[..., Any], *args: Any) -> Any:
        state.is_on = state.is_worker = True
        try:
            return work(*args)
        finally:
            state.is_on = state.is_worker = False

    yield run
    delayed.watch_conversions.cache_clear()


def same(one: Any, other: Any) -> bool:
    """Whether two tensors are bit-for-bit equal and have the same class, dtype and strides."""
    is_same = type(one) is type(other) and one.dtype is other.dtype and one.stride() == other.stride()
    return is_same and torch.equal(torch.Tensor(one), torch.Tensor(other))


def image() -> Any:
    return Image.fromarray(ARRAY)


@pytest.mark.parametrize("name", [*STAYING, *CONVERTED])
def test_images_that_stay_bytes_have_bit_for_bit_the_same_values(fetching: Callable[..., Any], name: str) -> None:
    pipeline = STAYING.get(name) or CONVERTED[name]
    torch.manual_seed(1)
    expected = pipeline(image())
    torch.manual_seed(1)
    found = fetching(pipeline, image())
    batch = fetching(default_collate, [(found, 3)] * 2)[0]
    assert (type(batch) is delayed.Delayed) == (name in STAYING)
    assert isinstance(found, type(expected))
    assert found.shape == expected.shape
    assert (found.dtype, found.device, found.dim(), len(found)) == (expected.dtype, expected.device, 3, len(expected))
    assert same(delayed.plain(found), expected)
    assert same(delayed.plain(batch), default_collate([expected] * 2))


OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "arithmetic": lambda x: x * 2 + 1,
    "reversed": lambda x: 1 - x,
    "per pixel": lambda x: x * torch.ones_like(x),
    "by a tensor": lambda x: torch.full((1, 2, 1), 0.5).expand(3, 2, 1)[:, :1] * x,
    "in place": lambda x: (x.mul_(2), x.clamp_(max=1), x.clone())[-1],
    "set": lambda x: (x.__setitem__((0, slice(4)), 7.0), x.clone())[-1],
    "indexed": lambda x: x[:, 3:5].contiguous(),
    "double": lambda x: x.double(),
    "to the host": lambda x: x.to("cpu", torch.float64),
    "iterated": lambda x: torch.cat(list(x)),
    "reduced": lambda x: torch.stack([x.mean(), x.sum(), x.max()]),
    "stacked elsewhere": lambda x: torch.stack([x, x], dim=1),
    "convolved": lambda x: torch.nn.functional.conv2d(x[None], torch.ones(1, 3, 2, 2)),
    "a gradient": lambda x: torch.autograd.grad((x.requires_grad_() ** 2).sum(), x)[0],
    "copied": lambda x: copy.deepcopy(x),
    "of NumPy": lambda x: torch.from_numpy(np.asarray(x) + x.numpy()),
    "out": lambda x: torch.mul(x, 2, out=torch.empty(0)),
}


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("is_fetching", [True, False])
def test_operations_of_the_program_are_computed_on_the_floats(
    fetching: Callable[..., Any], name: str, is_fetching: bool
) -> None:
    operation, found = OPERATIONS[name], fetching(steps_of(), image())
    result = fetching(operation, found) if is_fetching else operation(found)
    assert same(delayed.plain(result), operation(steps_of()(image())))


def test_saved_files_hold_floats_and_workers_send_bytes(fetching: Callable[..., Any]) -> None:
    found, expected = fetching(steps_of(), image()), steps_of()(image())
    file = io.BytesIO()
    torch.save({"image": found}, file)
    file.seek(0)
    assert same(torch.load(file, weights_only=True)["image"], expected)
    found = fetching(steps_of(), image())
    sent = delayed._reduce(found)
    assert sent[1][0].dtype is torch.uint8
    assert same(sent[0](*sent[1]), expected)
    assert ForkingPickler._extra_reducers[type(found)] is delayed._reduce
    found.add_(1)
    sent = delayed._reduce(found)
    assert same(sent[0](*sent[1]), expected + 1)


def test_aliases_of_an_image_share_in_place_changes(fetching: Callable[..., Any]) -> None:
    expected, found = (run(v2.Compose([v2.ToImage(), FLOAT]), image()) for run in (lambda work, *args: work(*args), fetching))
    assert isinstance(found, tv_tensors.Image)
    for each in (expected, found):
        alias = each.as_subclass(torch.Tensor)
        fetching(alias.mul_, 2.0)
        alias[0, 0, 0] = 9.0
    assert same(delayed.plain(found), expected)


def test_samples_do_not_change_if_the_program_overwrites_the_bytes_later(fetching: Callable[..., Any]) -> None:
    buffer = torch.full((3, 20, 20), 7, dtype=torch.uint8)

    def sample() -> Any:
        made = buffer.float().div(255)
        buffer.zero_()
        return made

    assert float(delayed.plain(fetching(sample))[0, 0, 0]) == float(torch.tensor(7.0) / 255)


def test_samples_with_different_conversions_are_collated_as_floats(fetching: Callable[..., Any]) -> None:
    one, other = fetching(steps_of(), image()), fetching(transforms.ToTensor(), image())
    batch = fetching(default_collate, [one, other, one + 0])
    assert type(batch) is torch.Tensor
    assert same(batch, torch.stack([steps_of()(image()), transforms.ToTensor()(image()), steps_of()(image())]))


def test_small_tensors_and_other_dtypes_are_converted_as_usual(fetching: Callable[..., Any]) -> None:
    for tensor in (torch.ones(4, 4, dtype=torch.uint8), torch.ones(999, dtype=torch.uint8), torch.ones(30, 30)):
        assert type(fetching(tensor.float)) is torch.Tensor
    assert fetching(torch.ones(30, 30, dtype=torch.uint8).to, torch.float64).dtype is torch.float64


class Images(Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return steps_of()(Image.fromarray(ARRAY + index)), index


@pytest.mark.parametrize("ahead", [False, True])
def test_images_are_copied_to_the_device_as_bytes(
    fetching: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    copied: list[Any] = []
    to = torch.Tensor.to

    @functools.wraps(to)
    def noted(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if type(self) is torch.Tensor and self.device.type == "cpu" and "meta" in str((args, kwargs)):
            copied.append((self.dtype, kwargs.get("non_blocking")))
        return to(self, *args, **kwargs)

    class FakeStreams:
        def copy(self, tensor: Any, device: Any) -> tuple[Any, None]:
            return tensor.to(device, non_blocking=True), None

        def hand_over(self, copy: Any, event: None) -> None:
            pass

    monkeypatch.setattr(torch.Tensor, "to", noted)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    asked = {transfer.NON_BLOCKING: True, transfer.AHEAD: ahead}
    moves = transfer.TransferKnobs(context(asked), FakeStreams())
    try:
        iterator: Any = iter(DataLoader(Images(), batch_size=2))
        iterator._dataset_fetcher.fetch = delayed.during(iterator._dataset_fetcher.fetch)
        for images, _ in iterator:
            moved = images.to("meta", dtype=torch.float16, memory_format=torch.channels_last)
            assert (type(moved), moved.dtype, moved.device.type) == (torch.Tensor, torch.float16, "meta")
            assert moved.is_contiguous(memory_format=torch.channels_last)
            assert images.cuda(torch.device("meta")).dtype is torch.float32
    finally:
        patches.uninstall_all()
    assert copied == [(torch.uint8, True)] * len(copied)
    assert delayed.state.num_on_device == 8
    reports = moves.verify()
    assert reports[transfer.NON_BLOCKING].status == APPLIED
    assert (reports[transfer.AHEAD].status == APPLIED) or not ahead


@pytest.mark.gpu
def test_gpu_computes_the_same_values_as_the_cpu(fetching: Callable[..., Any]) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device: whether it computes the same bits is not known")
    for pipeline in STAYING.values():
        found = fetching(pipeline, image())
        batch = fetching(default_collate, [found] * 2).pin_memory()
        assert batch.is_pinned()
        assert torch.equal(batch.to("cuda", non_blocking=True).cpu(), default_collate([pipeline(image())] * 2))


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (torch.rand(4, 3, 32, 32), False),
        ((torch.rand(4, 3, 32, 32) * 255).round() / 255, True),
        ({"pixel_values": [(torch.rand(1, 28, 28) * 255).round()], "labels": torch.ones(1)}, True),
        ((torch.rand(4, 3, 32, 32) * 255).to(torch.uint8), False),
        (torch.ones(4, 200), False),
        (torch.ones(0, 3, 8, 8), False),
        ("text", False),
    ],
)
def test_images_that_came_from_bytes_are_recognised_by_their_values(batch: Any, expected: bool) -> None:
    assert eight_bits.are_bytes(batch) == expected


def losses(run: Run) -> str:
    return (run.folder / "losses.txt").read_text()


@pytest.mark.thorough
def test_losses_are_unchanged_and_the_evaluation_loader_has_plain_tensors(trial: Trial, plain: Trial) -> None:
    words = (f"pipeline={'v2' if HAS_WRAP else 'v1'}", "workers=1", "persistent=1", "evaluate=1", "steps=14")
    alone = losses(plain("images.py", *words))
    baseline = trial("images.py", *words, mode="inspect").result()
    assert KEY not in baseline.applicability
    run = trial("images.py", *words, knobs=ON, target=baseline.target, mode="parity", max_steps=99)
    report = run.result().knobs[KEY]
    assert (report.status, report.observed) == (APPLIED, True)
    assert losses(run) == alone
    assert json.loads((run.folder / "seen.json").read_text()) == [[True, "torch.float32", True]]
    assert json.loads((run.folder / "held_out.json").read_text()) == ["Tensor"]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("pipeline=erased",), "none of 11 batches left the loader as uint8"),
        *(
            pytest.param(words, reason, marks=pytest.mark.thorough)
            for words, reason in (
                (("pipeline=v1",), ""),
                (("pipeline=v1", "workers=1", "collate=listed"), ""),
                (("pipeline=v1", "workers=1", "method=spawn"), ""),
                (("pipeline=alone", "workers=1", "method=forkserver"), ""),
                (("pipeline=v2", "nested=1"), "" if HAS_WRAP else "none of 11 batches left the loader as uint8"),
                (("pipeline=by_hand", "workers=2"), ""),
                (("pipeline=sometimes_erased", "workers=1"), ""),
                (("pipeline=erased", "workers=1"), "none of 11 batches left the loader as uint8"),
                (("pipeline=v1", "workers=1", "collate=mixed"), "none of 11 batches left the loader as uint8"),
                (("pipeline=numpy",), "none of 11 batches left the loader as uint8"),
            )
        ),
    ],
)
def test_losses_are_unchanged_and_pipelines_that_need_floats_are_reported(
    trial: Trial, plain: Trial, words: tuple[str, ...], reason: str
) -> None:
    run = trial("images.py", *words, "steps=10", knobs=ON, mode="parity", max_steps=99)
    report = run.result().knobs[KEY]
    assert (report.status, report.reason.partition(":")[0]) == (NOT_APPLICABLE if reason else APPLIED, reason)
    assert losses(run) == losses(plain("images.py", *words, "steps=10"))


def test_baseline_reports_a_program_without_images_of_bytes(trial: Trial) -> None:
    assert trial("basic.py", mode="inspect").result().applicability[KEY] == eight_bits.NO_IMAGES


def test_uint8_transfer_false_is_reported_as_applied() -> None:
    trained = context({KEY: False}, "cpu", loaders=SimpleNamespace(training=SimpleNamespace(total_batches=10)))
    report = eight_bits.EightBitKnobs(trained).verify()[KEY]
    assert (report.status, report.observed) == (APPLIED, False)


def test_without_workers_the_program_gets_floats(fetching: Callable[..., Any]) -> None:
    iterator: Any = iter(DataLoader(Images(), batch_size=2))
    iterator._dataset_fetcher.fetch = delayed.during(iterator._dataset_fetcher.fetch)
    expected = iter(DataLoader(Images(), batch_size=2))
    assert all(same(images, next(expected)[0]) for images, _ in iterator)
    assert delayed.state.num_batches == 4


@pytest.mark.thorough
def test_run_with_a_best_yaml_transfers_bytes_in_every_epoch(trial: Trial) -> None:
    run = trial("images.py", "pipeline=v1", "workers=1", "steps=30", knobs=ON, mode="apply", origin="best.yaml")
    assert "the setting of best.yaml is in effect" in run.stderr
    assert json.loads((run.folder / "seen.json").read_text()) == [[True, "torch.float32", True]]
