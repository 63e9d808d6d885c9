"""The recipes' programs other than vision, run by file path in separate processes at tiny sizes."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from autotune.config.recipe import SCRIPTS, Script

PROGRAMS = Path(__file__).parents[2] / "autotune" / "programs"
TINY_TEXT = (
    "--num-layers", "1", "--hidden-size", "32", "--vocab-size", "200", "--sequence-length", "16",
    "--samples-per-epoch", "32", "--batch-size", "8", "--print-every", "1", "--device", "cpu",
)  # fmt: skip
TINY_TABLE = ("--num-layers", "1", "--hidden-size", "16", "--samples-per-epoch", "640", "--print-every", "1", "--device", "cpu")
MINE = """
import torch
from torch.utils.data import DataLoader, TensorDataset

def model(): return torch.nn.Linear(4, 3)
def text_of_a_model(): return "linear"
def data(): return TensorDataset(torch.randn(64, 4), torch.randint(0, 3, (64,)))
def loader(): return DataLoader(data(), 16)
def step(model, batch):
    print("my step")
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
number = 3
"""


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{name}_program", PROGRAMS / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def text() -> ModuleType:
    return load("text")


@pytest.fixture(scope="module")
def tabular() -> ModuleType:
    return load("tabular")


@pytest.fixture(scope="module")
def custom() -> ModuleType:
    return load("custom")


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Yields a working directory with recipe parts of a user."""
    package = tmp_path / "mine"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "parts.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(PROGRAMS), *sys.path])
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "mine"]:
        del sys.modules[name]


def main(module: ModuleType, *arguments: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [module.__name__, *arguments])
    random = torch.get_rng_state()
    module.main()
    torch.set_rng_state(random)


def losses(stdout: str) -> list[float]:
    return [float(value) for value in re.findall(r"loss (\S+)", stdout)]


@pytest.fixture(scope="module")
def books(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("books")
    (folder / "deep").mkdir()
    (folder / "deep" / "a.txt").write_text("the cat sat on the mat. " * 200)
    (folder / "b.py").write_text("def mat(cat):\n    return cat + 1\n" * 200)
    (folder / "c.bin").write_bytes(bytes(range(256)))
    return folder


@pytest.mark.parametrize("model", ["gpt2_small", "bert_base", "llama_small"])
def test_language_models_have_the_requested_size(text: ModuleType, model: str) -> None:
    options = text.build_parser().parse_args(["--model", model, *TINY_TEXT])
    built = text.build_model(options)
    assert built.config.vocab_size == 200
    assert built.config.hidden_size == 32
    assert built.config.num_hidden_layers == 1
    tokens = torch.randint(2, 200, (2, 16))
    loss = built(input_ids=tokens, labels=tokens).loss
    assert loss.item() == pytest.approx(torch.tensor(200.0).log().item(), rel=0.2)  # untrained


@pytest.mark.parametrize(("model", "millions"), [("gpt2_small", 124.4), ("bert_base", 109.5), ("llama_small", 134.1)])
def test_default_model_sizes_match_the_literature(text: ModuleType, model: str, millions: float) -> None:
    with torch.device("meta"):
        built = text.build_model(text.build_parser().parse_args(["--model", model, "--sequence-length", "1024"]))
    assert sum(parameter.numel() for parameter in built.parameters()) / 1e6 == pytest.approx(millions, abs=0.6)


def test_training_on_text_reduces_the_loss(text: ModuleType, books: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    more = ("--data-root", str(books), "--samples-per-epoch", "160", "--lr", "0.01")
    main(text, *TINY_TEXT, *more, monkeypatch=monkeypatch)
    seen = losses(capsys.readouterr().out)
    assert len(seen) == 20
    assert sum(seen[-5:]) < 0.8 * sum(seen[:5])


@pytest.mark.parametrize("arguments", [("--model", "bert_base"), ("--data", "synthetic", "--optimizer", "sgd")])
def test_other_models_and_data_train_an_epoch(
    text: ModuleType, books: Path, capsys, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    root = () if "synthetic" in arguments else ("--data-root", str(books))
    main(text, *TINY_TEXT, *arguments, *root, monkeypatch=monkeypatch)
    assert len(losses(capsys.readouterr().out)) == 4


def windows(text: ModuleType, source: str, **changed: object) -> object:
    given = {"length": 16, "vocab_size": 200, "num_samples": 100_000, "is_masked": False, **changed}
    return text.TextWindows(source, **given)


@pytest.mark.parametrize("source", ["a", "x" * 5000, " \n" * 3000, "one, two; three " * 400])
def test_samples_of_any_text_have_the_requested_length(text: ModuleType, source: str) -> None:
    data = windows(text, source)
    for index in (0, 1, 99_999):
        tokens = data[index]["input_ids"]
        assert tokens.shape == (16,)
        assert int(tokens.min()) >= 2
        assert int(tokens.max()) < 200


def test_text_samples_are_reproducible_and_differ_from_each_other(text: ModuleType, books: Path) -> None:
    source = text.read_text(books)
    first, again = windows(text, source), windows(text, source)
    assert torch.equal(first[7]["input_ids"], again[7]["input_ids"])
    assert len({tuple(first[index]["input_ids"].tolist()) for index in range(50)}) > 40


def test_a_word_is_always_the_same_token(text: ModuleType) -> None:
    tokens = windows(text, "cat " * 300)[3]["input_ids"].tolist()
    assert len(set(tokens[2:])) == 2  # the word and the space; a window may begin inside a word


def test_read_text_skips_binary_files_and_respects_its_limit(text: ModuleType, books: Path) -> None:
    assert text.read_text(books).startswith("def mat")
    assert "\x00" not in text.read_text(books)
    assert len(text.read_text(books, at_most=100)) == 100
    with pytest.raises(FileNotFoundError, match=r"no text in .*books.*/none"):
        text.read_text(books / "none")


def test_read_text_reads_no_more_of_a_file_than_it_needs(text: ModuleType, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "a.txt").write_text("word " * 100)
    monkeypatch.setattr(Path, "read_bytes", lambda _: pytest.fail("a file may be larger than the memory"))
    assert text.read_text(tmp_path, at_most=10) == "word word "


def test_masked_words_are_hidden_and_become_labels(text: ModuleType) -> None:
    tokens = torch.full((4000,), 7)
    batch = text.masked(tokens, 1000)
    chosen = batch["labels"] != text.IGNORED
    assert 0.10 < chosen.float().mean() < 0.20
    assert (batch["input_ids"][~chosen] == 7).all()
    assert 0.70 < (batch["input_ids"][chosen] == text.MASK).float().mean() < 0.90
    assert 0.02 < (batch["input_ids"][chosen] == 7).float().mean() < 0.20
    assert all((text.masked(torch.full((3,), 7), 9)["labels"] != text.IGNORED).any() for _ in range(50))


def test_training_on_a_table_reduces_the_loss_and_the_table_is_reproducible(
    tabular: ModuleType, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    main(tabular, *TINY_TABLE, "--samples-per-epoch", "1600", "--num-features", "8", "--lr", "0.02", monkeypatch=monkeypatch)
    seen = losses(capsys.readouterr().out)
    assert len(seen) == 50
    assert sum(seen[-5:]) < 0.9 * sum(seen[:5])
    first, again = tabular.Table(50, 8, 5), tabular.Table(50, 8, 5)
    assert torch.equal(first.features, again.features)
    assert torch.equal(first.classes, again.classes)
    assert len(set(first.classes.tolist())) > 2


def test_tabular_program_trains_on_synthetic_data(tabular: ModuleType, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    main(tabular, *TINY_TABLE, "--data", "synthetic", "--optimizer", "sgd", monkeypatch=monkeypatch)
    assert len(losses(capsys.readouterr().out)) == 20


@pytest.mark.parametrize(
    ("program", "arguments", "message"),
    [
        ("text", ("--model", "gpt5"), "--model: invalid choice: 'gpt5'"),
        (
            "text",
            ("--hidden-size", "65"),
            "--hidden-size: must be a multiple of 2, twice the number of attention heads, got 65",
        ),
        ("text", ("--vocab-size", "2"), "--vocab-size: must be more than 2, got 2"),
        ("text", ("--data-root", "/no/such"), "--data-root: no text in /no/such"),
        ("tabular", ("--num-layers", "0"), "--num-layers: must be 1 or more, got 0"),
        ("custom", ("--base", "mine.py"), "--base: invalid choice: 'mine.py'"),
        ("custom", ("--step", "time:step"), "time:step: no 'step' in time"),  # a module without a file
    ],
)
def test_bad_arguments_are_named(
    program: str, arguments: tuple[str, ...], message: str, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(load(program), *arguments, monkeypatch=monkeypatch)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_file_that_is_missing_during_the_training_is_not_blamed_on_the_data(
    text: ModuleType, books: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(*_: object, **__: object) -> None:
        raise FileNotFoundError("the socket of a loader's worker")

    monkeypatch.setattr(text, "train", train)
    with pytest.raises(FileNotFoundError, match="socket"):
        main(text, *TINY_TEXT, "--data-root", str(books), monkeypatch=monkeypatch)


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=lambda script: script.name)
def test_print_interval_of_a_recipe_equals_the_default_of_its_script(script: Script) -> None:
    assert load(script.name.removesuffix(".py")).build_parser().get_default("print_every") == script.print_every


def test_blocks_are_the_linear_layers_inside_containers() -> None:
    layers = torch.nn.ModuleList(torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.ReLU()]) for _ in range(2))
    model = torch.nn.ModuleDict({"layers": layers, "head": torch.nn.Sequential(torch.nn.Linear(2, 1))})
    assert [type(block) for block in load("recipe_parts").blocks(model)] == [torch.nn.Linear] * 3


OWN_MODEL, OWN_DATA = ("--model-factory", "mine.parts:model"), ("--data-factory", "mine.parts:data")
SHORT = ("--print-every", "1", "--device", "cpu", "--batch-size", "16")


def test_custom_program_trains_user_defined_model_data_and_step(
    custom: ModuleType, mine: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    main(custom, *OWN_MODEL, *OWN_DATA, "--step", "mine.parts:step", *SHORT, monkeypatch=monkeypatch)
    said = capsys.readouterr().out
    assert len(losses(said)) == said.count("my step") == 4


def test_custom_program_uses_a_user_defined_loader(
    custom: ModuleType, mine: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    main(custom, *OWN_MODEL, "--data-factory", "mine.parts:loader", *SHORT, monkeypatch=monkeypatch)
    assert len(losses(capsys.readouterr().out)) == 4


def test_parts_that_the_user_does_not_define_come_from_the_base_script(
    custom: ModuleType, mine: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = ("--num-features", "4", "--num-classes", "3", "--samples-per-epoch", "64")
    main(custom, "--base", "tabular.py", *OWN_MODEL, "--data", "tabular", *sizes, *SHORT, monkeypatch=monkeypatch)
    main(custom, "--base", "tabular.py", *OWN_DATA, *sizes, "--num-layers", "1", *SHORT, monkeypatch=monkeypatch)
    main(custom, "--base", "text.py", *TINY_TEXT, "--data", "synthetic", monkeypatch=monkeypatch)
    assert len(losses(capsys.readouterr().out)) == 12


def test_model_factory_that_returns_no_module_is_refused(
    custom: ModuleType, mine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(TypeError, match=r"mine\.parts:text_of_a_model returns a str, not a torch\.nn\.Module"):
        main(custom, "--model-factory", "mine.parts:text_of_a_model", *OWN_DATA, *SHORT, monkeypatch=monkeypatch)


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("nosuch.parts:model", "no module 'nosuch' in "),
        ("mine.nosuch:model", "no module 'mine.nosuch' in "),
        ("mine.parts:modle", "; nearest: model"),
        ("mine.parts:number", "not a function but a int"),
        ("mine.broken:model", "its module cannot be imported: ZeroDivisionError: division by zero"),
        ("mine.needy:model", "its module needs another module, which is missing: No module named 'sklaern'"),
    ],
)
def test_error_for_an_unusable_reference_gives_the_reason(
    custom: ModuleType, mine: Path, capsys, monkeypatch: pytest.MonkeyPatch, reference: str, message: str
) -> None:
    (mine / "mine" / "broken.py").write_text("1 / 0\n")
    (mine / "mine" / "needy.py").write_text("import sklaern\n")
    with pytest.raises(SystemExit) as ended:
        main(custom, "--check", "mine.parts:model", reference, monkeypatch=monkeypatch)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{reference}: ")
    assert message in line


def test_check_of_existing_references_prints_nothing(
    custom: ModuleType, mine: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    main(custom, "--check", "mine.parts:model", "mine.parts:step", monkeypatch=monkeypatch)
    assert capsys.readouterr() == ("", "")


@pytest.mark.thorough
def test_spawned_workers_load_the_data_of_a_script(mine: Path) -> None:
    (mine / "mine" / "parts.py").write_text(MINE + "torch.multiprocessing.set_start_method('spawn')\n")
    sizes = ("--num-features", "4", "--num-classes", "3", "--samples-per-epoch", "64", "--num-workers", "1")
    command = [sys.executable, str(PROGRAMS / "custom.py"), "--base", "tabular.py", *OWN_MODEL, *sizes, *SHORT]
    done = subprocess.run(command, cwd=mine, capture_output=True, text=True, timeout=120, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    assert len(losses(done.stdout)) == 4


def test_timm_models_are_created_without_pretrained_weights(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "timm.py").write_text(
        "import torch\n"
        "def list_models(): return ['flat']\n"
        "def get_pretrained_cfg(name): return None\n"
        "def create_model(name, pretrained, num_classes):\n"
        "    print('timm makes', name, pretrained, num_classes)\n"
        "    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 8 * 8, num_classes))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    size = ("--image-size", "8", "--num-classes", "5", "--data", "synthetic", "--samples-per-epoch", "32")
    main(load("vision"), "--source", "timm", "--model", "flat", *size, *SHORT, monkeypatch=monkeypatch)
    said = capsys.readouterr().out
    assert "timm makes flat False 5" in said
    assert len(losses(said)) == 2


@pytest.mark.parametrize(("image_size", "is_fixed", "given"), [(8, True, {"img_size": 8}), (224, True, {}), (8, False, {})])
def test_timm_models_of_a_fixed_size_get_the_size_of_the_images(
    monkeypatch: pytest.MonkeyPatch, image_size: int, is_fixed: bool, given: dict[str, int]
) -> None:
    usual = SimpleNamespace(fixed_input_size=is_fixed, input_size=(3, 224, 224))
    timm = ModuleType("timm")
    timm.get_pretrained_cfg = lambda name: usual  # type: ignore[attr-defined]
    timm.create_model = lambda name, pretrained, num_classes, **more: more  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "timm", timm)
    assert load("vision").build_model("vit", 5, image_size, "timm") == given


def test_recipe_programs_do_not_mention_autotune() -> None:
    programs = list(PROGRAMS.glob("[a-z]*.py"))
    assert {path.stem for path in programs} >= {"text", "vision"}
    for path in programs:
        assert "autotune" not in path.read_text(), path
