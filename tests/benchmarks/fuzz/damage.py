"""Damages valid input: values of documents, bytes of files, letters of words."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from hypothesis import strategies as st

Draw = Callable[[st.SearchStrategy[Any]], Any]
# Each of these makes the file `canary-sang`, starts a process, unpickles or shows a secret if something evaluates it.
CANARIES = (
    "!!python/object/apply:os.system ['touch canary-sang']", "!!python/name:marker.touch", "$(touch canary-sang)",
    "${oc.env:FUZZ_SECRET}", "`touch canary-sang`; touch canary-sang", "__import__('os').system('touch canary-sang')",
    "cos\nsystem\n(S'touch canary-sang'\ntR.", "{_target_: marker.touch}", "${eval:1}", "marker:touch", "../../canary/file",
)  # fmt: skip
ODD = (
    "", " ", "nan", "-inf", "1e999", "1_0", "0x1f", "null", "~", "???", "true", "off", "-1", "0", "9" * 30, "9" * 5000,
    "\u00b2", "${", "${x}", "choice()", "choice(1,,2)", "range(1,0)", "range(0,1e12)", "interval(1,nan)", "[]", "{}", "[" * 200,
    "{a:" * 60, "a,b", "x" * 9000, "2001-13-45", "12:30:45", "\ud800", "a\nb", "\x1b[31mred", "&a [*a]",
    "<<", "=", "--", "-", "..", "/", "\0",
)  # fmt: skip
LETTERS = "ab.=,()[]{}'\"$~+@/\\: 019-_*?!&|;%#<>\0\n\r\t\x1b\x7f\u0085\u00b2\u0663\u00e9\u202e\u2028\ufeff\udce9\U0001f600"
NO_TEXTS = (
    None, True, False, 0, -1, 1, 2**63, -(2**64), 10**400, 1e308, -0.0, float("nan"), float("inf"), [], {}, [[]], {"": None},
    [1, "a", None], {"a": {"b": [1]}},
)  # fmt: skip
TEXTS = st.sampled_from(ODD + CANARIES) | st.text(alphabet=LETTERS, max_size=12)
VALUES = TEXTS | st.sampled_from(NO_TEXTS)
FEW, SELDOM = st.integers(1, 3), st.sampled_from((False, False, False, True))


@dataclass(frozen=True, kw_only=True)
class Case:
    """One input: words of the command line, files, and environment variables."""

    words: list[str] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        """Returns a literal that `--case` takes."""
        return repr({name: value for name, value in asdict(self).items() if value})


# Damage --------------------------------------------------------------------------------------------------------------------


def _places(value: Any, holder: Any, key: Any) -> Iterator[tuple[Any, Any]]:
    yield holder, key
    for name, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from _places(item, value, name)


DAMAGE = st.sampled_from(("replace", "replace", "replace", "delete", "nest", "copy", "rename", "repeat"))


def damaged(draw: Draw, document: Any) -> Any:
    """Returns a copy of a document with one to three values replaced, deleted, nested, copied, renamed or repeated."""
    root = {"": copy.deepcopy(document)}
    for _ in range(draw(FEW)):
        places = list(_places(root[""], root, ""))
        (holder, key), how = draw(st.sampled_from(places[1:] or places)), draw(DAMAGE)
        if how == "replace" or holder is root:
            holder[key] = copy.deepcopy(draw(VALUES))
        elif how == "delete":
            del holder[key]
        elif how == "nest":
            holder[key] = {"": holder[key]} if draw(SELDOM) else [holder[key]]
        elif how == "copy":
            other, name = draw(st.sampled_from(places))
            holder[key] = copy.deepcopy(other[name])
        elif how == "rename" and isinstance(holder, dict):
            holder[draw(TEXTS)] = holder.pop(key)
        elif isinstance(holder, list):
            holder += [copy.deepcopy(holder[key])] * draw(st.sampled_from((1, 50)))
    return root[""]


def damaged_list(draw: Draw, items: list[Any]) -> list[Any]:
    """Returns a damaged copy of a list, still as a list."""
    made = damaged(draw, items)
    return made if isinstance(made, list) else [made]


SPOILS = st.sampled_from((0,) * 6 + (1, 2))
SPOIL = st.sampled_from(("cut", "insert", "insert", "remove", "repeat", "overwrite"))
PIECES = TEXTS.map(lambda text: text.encode("utf-8", "surrogatepass")) | st.binary(min_size=1, max_size=4)


def spoiled(draw: Draw, content: bytes) -> bytes:
    """Returns the bytes, most often unchanged, otherwise cut or with pieces inserted, removed, repeated or overwritten."""
    for _ in range(draw(SPOILS)):
        at, how = draw(st.integers(0, len(content))), draw(SPOIL)
        head, tail = content[:at], content[at:]
        if how == "cut":
            content = head
        elif how == "remove":
            content = head + tail[draw(st.integers(1, 20)) :]
        elif how == "repeat":
            content = head + tail[:40] + tail
        else:
            piece = draw(PIECES)
            content = head + piece + (tail if how == "insert" else tail[len(piece) :])
    return content


def word(text: str) -> str:
    """Returns a text as Python decodes it from the command line or the environment."""
    return text.encode("utf-8", "surrogatepass").decode("utf-8", "surrogateescape")


def spoiled_text(draw: Draw, text: str) -> str:
    """Returns a text, damaged in the same way as `spoiled` damages bytes."""
    return spoiled(draw, text.encode("utf-8", "surrogatepass")).decode("utf-8", "surrogateescape")


def json_lines(items: list[Any]) -> bytes:
    """Returns JSON, a line for each item."""
    return b"\n".join(json.dumps(item).encode() for item in items)
