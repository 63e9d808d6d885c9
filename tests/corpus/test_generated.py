"""Generated input is either used or refused; nothing else may happen."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autotune.cli.main import main
from autotune.config.keys import GROUPS, LEAVES

KEYS = st.sampled_from([*LEAVES, *GROUPS, "env.A", "model", "data", "nosuch", "_target_", "defaults", "hydra.run.dir", "mine"])
LETTERS = st.sampled_from("ab.=,()[]{}'\"$~+@/\\: 019-_*?!&|;\0\n\t\x1b\u00e9\u202e\udce9") | st.characters()
TEXT = st.text(alphabet=LETTERS, max_size=24)
ODD = st.sampled_from(
    ["nan", "-inf", "1e999", "1_0", "0x1", "null", "???", "${", "${x}", "${oc.env:NOPE}", "choice()", "range(1,0)", "[]", "{}"]
)
WORDS = st.one_of(
    TEXT,
    st.builds("{}{}={}".format, st.sampled_from(["", "+", "++", "~"]), KEYS, ODD | TEXT),
    st.builds("{}={}({})".format, KEYS, st.sampled_from(["choice", "range", "interval", "tag", "glob", "sort"]), TEXT),
)
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=12), ODD)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3), max_leaves=6
)
DOCUMENTS = st.recursive(
    st.dictionaries(KEYS | st.sampled_from([key.rpartition(".")[2] for key in LEAVES]), VALUES, max_size=4),
    lambda inner: st.dictionaries(KEYS | TEXT, inner, max_size=3),
    max_leaves=4,
)

often = settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])


def is_accepted(*words: str) -> bool:
    """Returns whether a command line is accepted; otherwise it must be refused in the proper form."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        code = main([*words])
    text = said.getvalue()
    assert code in (0, 2), text
    assert code == 0 or (text.startswith("autotune: ") and "Traceback" not in text), text
    return code == 0


@often
@given(words=st.lists(WORDS.filter(lambda word: word != "--" and not word.startswith("-")), min_size=1, max_size=3))
def test_generated_words_are_used_or_refused(place: Path, words: list[str]) -> None:
    is_accepted("run", "--cfg", "model=resnet18", *words)


@often
@given(document=DOCUMENTS)
@pytest.mark.thorough
def test_generated_documents_are_used_or_refused(place: Path, document: Any) -> None:
    text = yaml.safe_dump(document, allow_unicode=True)
    (place / "mine" / "made.yaml").write_text(f"# @package _global_\n{text}", encoding="utf-8", errors="surrogatepass")
    is_accepted("run", "--cfg", "--config-dir", ".", "+mine=made", "model=resnet18")
    is_accepted("run", "--cfg", "search_space=./mine/made.yaml", "model=resnet18")


@often
@given(
    content=st.binary(max_size=200) | st.text(alphabet=LETTERS, max_size=200).map(lambda text: text.encode("utf-8", "replace"))
)
@pytest.mark.thorough
def test_generated_files_are_used_or_refused(place: Path, content: bytes) -> None:
    (place / "mine" / "made.yaml").write_bytes(content)
    is_accepted("run", "--cfg", "--config-dir", ".", "+mine=made", "model=resnet18")
    is_accepted("run", "--cfg", "search_space=./mine/made.yaml", "model=resnet18")


@often
@given(
    command=st.lists(
        st.sampled_from(["python", "bash", "env", "torchrun", "-m", "-c", "-u", "train.py", "{loader.batch_size=4}"]) | TEXT
    )
)
def test_generated_commands_are_used_or_refused(place: Path, command: list[str]) -> None:
    is_accepted("run", "--cfg", "--", *command)
    assert not (place / "marker").exists()


@pytest.mark.parametrize("word", ["loader.num_workers=1", "env.A='a {b}'", "runs_dir='a, [b]'", "study.seed=7"])
def test_valid_words_are_accepted(place: Path, word: str) -> None:
    assert is_accepted("run", "--cfg", "model=resnet18", word)
