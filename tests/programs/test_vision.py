"""The vision program, run as the recipe runs it: by file path, in a separate process."""

import importlib.util
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.thorough

SCRIPT = Path(__file__).parents[2] / "autotune" / "programs" / "vision.py"
TINY = ("--image-size", "32", "--batch-size", "8", "--samples-per-epoch", "32", "--print-every", "1", "--device", "cpu")


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=120)


def losses(stdout: str) -> list[float]:
    return [float(value) for value in re.findall(r"loss (\S+)", stdout)]


@pytest.fixture(scope="module")
def vision() -> ModuleType:
    spec = importlib.util.spec_from_file_location("vision_program", SCRIPT)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def photos(vision: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "photos"
    vision.ensure_photos(folder, per_photo=8)
    return folder


def test_training_on_photos_reduces_the_loss(photos: Path) -> None:
    done = run(*TINY, "--data-root", str(photos), "--samples-per-epoch", "96", "--num-classes", "2", "--num-workers", "1")
    assert done.returncode == 0, done.stderr
    seen = losses(done.stdout)
    assert len(seen) == 12
    assert sum(seen[-3:]) < sum(seen[:3])


@pytest.mark.parametrize("data", ["fake_cifar", "folder", "synthetic"])
def test_every_kind_of_data_trains_an_epoch(data: str, photos: Path) -> None:
    root = ("--data-root", str(photos)) if data == "folder" else ()
    done = run(*TINY, "--data", data, "--optimizer", "adamw", "--lr", "0.0001", *root)
    assert done.returncode == 0, done.stderr
    assert len(losses(done.stdout)) == 4


def test_two_processes_create_the_photos_once_and_split_them(tmp_path: Path) -> None:
    cache, once = tmp_path / "cache", ("--samples-per-epoch", "64", "--epochs", "2")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(SCRIPT), *TINY, *once]
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("making 1024 photos") == 1
    assert [entry.name for entry in cache.iterdir()] == ["vision-photos-v1"]
    assert len(losses(done.stdout)) == 2 * 64 // (2 * 8)  # only one process prints, for its half


def test_a_folder_is_used_completely_unless_samples_per_epoch_is_given(vision: ModuleType, photos: Path) -> None:
    options = ["--data", "folder", "--data-root", str(photos)]
    assert len(vision.build_dataset(vision.build_parser().parse_args(options))) == 16
    assert len(vision.build_dataset(vision.build_parser().parse_args([*options, "--samples-per-epoch", "5"]))) == 5


def test_photo_data_set_has_100_000_samples_per_epoch(vision: ModuleType, photos: Path) -> None:
    options = vision.build_parser().parse_args(["--data-root", str(photos)])
    data = vision.build_dataset(options)
    assert len(data) == 100_000
    image, label = data[99_999]
    assert image.shape == (3, 224, 224)
    assert {data[index][1] for index in range(16)} == {0, 1}
    assert label in {0, 1}


def test_concurrent_callers_create_the_photos_once(vision: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "photos"
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda _: vision.ensure_photos(folder, per_photo=3), range(3)))
    assert sorted(entry.name for entry in folder.parent.iterdir()) == ["photos"]
    assert len(list(folder.glob("*/*.jpg"))) == 6
    made = folder.stat().st_mtime_ns
    vision.ensure_photos(folder, per_photo=3)
    assert folder.stat().st_mtime_ns == made


def test_interrupted_creation_of_photos_leaves_no_files(
    vision: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(folder: Path, per_photo: int) -> None:
        (folder / "china").mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(vision, "write_photos", stop)
    with pytest.raises(KeyboardInterrupt):
        vision.ensure_photos(tmp_path / "photos")
    assert list(tmp_path.iterdir()) == []


def test_default_photo_folder_is_in_the_cache_of_the_user(vision: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert vision.default_photo_folder() == Path("/somewhere/vision-photos-v1")


def test_photos_have_the_size_of_imagenet_files(photos: Path, vision: ModuleType) -> None:
    files = list(photos.glob("*/*.jpg"))
    assert files
    for file in files:
        with vision.Image.open(file) as image:
            assert image.size == (500, 375)


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "vit_b_16", "convnext_tiny", "efficientnet_b0", "googlenet"])
def test_named_models_have_the_requested_classes_and_image_size(vision: ModuleType, name: str) -> None:
    with vision.torch.device("meta"):
        model = vision.build_model(name, num_classes=7, image_size=64)
        output = model(vision.torch.empty(2, 3, 64, 64))
    assert output.shape == (2, 7)


def test_synthetic_batches_differ_and_are_not_zeros(vision: ModuleType) -> None:
    words = ["--data", "synthetic", "--image-size", "4", "--batch-size", "2", "--samples-per-epoch", "12"]
    batches = vision.build_batches(vision.build_parser().parse_args(words), vision.torch.device("cpu"))
    images = [image for image, _ in batches]
    assert len(images) == 6
    assert not vision.torch.equal(images[0], images[1])
    assert images[0].count_nonzero() > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "resnet19"], "--model: torchvision has no classifier 'resnet19'. Nearest: resnet"),
        (["--batch-size", "0"], "--batch-size: must be 1 or more, got 0"),
        (["--data", "folder"], "--data-root: --data folder needs a folder with one subfolder a class, got None"),
        (["--data", "folder", "--data-root", "/no/such"], "got /no/such"),
    ],
)
def test_bad_arguments_are_named(
    vision: ModuleType, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["vision.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        vision.main()
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_folder_without_photos_is_refused(
    vision: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    monkeypatch.setattr(sys, "argv", ["vision.py", "--data-root", str(tmp_path)])
    with pytest.raises(SystemExit):
        vision.main()
    assert "exists, but contains no photos" in capsys.readouterr().err
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.txt"]


def test_file_that_exists_during_the_training_is_not_blamed_on_the_data(
    vision: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(*_: object, **__: object) -> None:
        raise FileExistsError("the socket of a loader's worker")

    monkeypatch.setattr(vision, "train", train)
    monkeypatch.setattr(sys, "argv", ["vision.py", "--data", "synthetic", "--device", "cpu"])
    with pytest.raises(FileExistsError, match="socket"):
        vision.main()
