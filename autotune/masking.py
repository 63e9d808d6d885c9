"""Recognises secrets and masks them in texts, documents and command lines.

A secret is recognised by its key (`HF_TOKEN=...`, `--password ...`), by its place in a URL (`https://user:password@host`) or by
its format (`hf_...`). If the environment or the command line contains a secret, its value is masked wherever it appears: in
logs, tracebacks and results. All code that writes uses this module.
"""

from __future__ import annotations

import bisect
import enum
import json
import os
import re
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

MASK = "***"
# Values shorter than these limits are not masked: a secret-sounding variable may hold "0" or "true", which occur in every log.
MIN_CHARS = 8  # a value with at least this many characters is masked even inside a word
# A value with at least this many characters that is neither all letters nor all digits ("hunter2") is masked as a whole word.
MIN_WORD_CHARS = 4
MIN_TYPED_CHARS = 3  # a value of at least this many characters is masked as a whole word if the user typed it as a secret

_SECRET_WORDS = {
    "token", "secret", "secrets", "password", "passwd", "passphrase", "pwd", "credential", "credentials", "apikey",
    "accesskey", "secretkey", "privatekey", "authorization", "cookie",
}  # fmt: skip
_SECRET_ENDS = ("password", "passwd", "passphrase", "apikey", "secret")  # PGPASSWORD, mysecret
# Words that show that a name is not secret. A name with "token" is not secret if it also has a word of the first set
# (--eos_token_id). A name that ends in "key" is not secret if all words before it are in the second set (--csv-img-key).
_OF_VOCABULARY = {
    "bos", "eos", "pad", "sep", "cls", "unk", "mask", "special", "placeholder", "initializer", "max", "min", "num", "length",
    "budget", "count", "per", "dropout", "pruning", "merging", "mixer", "mixing", "pooling", "reduction", "ratio", "rate",
    "loss", "weight", "embedding", "dim",
}  # fmt: skip
_OF_SAMPLES = {
    "image", "img", "text", "label", "target", "caption", "prompt", "question", "answer", "input", "output", "sort", "metric",
    "monitor", "loss", "score", "feature", "group", "batch", "column", "field", "sample", "index", "seed", "prng", "rng",
    "random", "csv", "tsv", "json", "jsonl", "audio", "video", "energy", "forces", "stress", "virials", "dipole", "charges",
    "dataset", "split", "class", "date", "name",
}  # fmt: skip
# A name with "token" and one of these words is secret even if it also has a word of _OF_VOCABULARY (--embedding_api_token).
_OF_ACCESS = {"api", "auth", "access", "hub", "hf", "login", "bot", "bearer", "refresh", "session", "agent", "download", "box"}
_FOLDERS = ("PWD", "OLDPWD")  # the shell's working directories, not passwords
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
# The look-behinds keep the searches linear: a name is matched from its first character only.
_KEY = re.compile(r"(?<![\w.-])([A-Za-z_-][\w.-]*)(\\?[\"']?\s*[=:]\s*\\?[\"']?)")
_VALUE = re.compile(r"(?:Bearer |Basic )?[^\s\"',;&)}\]\\]+")
_FLAG = re.compile(r"(?<![\w.-])(--?[A-Za-z][\w-]*)(?:\s+|[\"'],\s*[\"'])([^\s\"'-][^\s\"']*)")
# A string of JSON or YAML, or a value that needs no quotes there: a number, null, true or false.
_SCALAR = re.compile(
    r'"(?:[^"\\\n]|\\.)*"|(?:^|[\s\[:,])(?P<bare>-?\d[\d.eE+-]*|null|true|false)(?=\s*(?:[,\]}\n]|\Z))', re.MULTILINE
)
_BARE = re.compile(r"[\d.eE+-]+|null|true|false")  # a value that needs no quotes, or a part of such a number
_URL = re.compile(r"(?<![A-Za-z0-9+.-])[A-Za-z][A-Za-z0-9+.-]{0,30}://([^/\s@]{1,1000})@")
_FORMAT = re.compile(r"\b(?:hf_|gh[pousr]_|github_pat_|glpat-|sk-|xox[abpr]-|AKIA|Bearer )[A-Za-z0-9._~+/=-]{12,}")
_ASSIGNMENT = re.compile(r"([-+]{0,2}[A-Za-z_][\w.-]*)=(.+)", re.DOTALL)
# A value that is no secret, whatever its key: hub_token=null, --token-dropout 0.1.
_SWITCH = re.compile(r"true|false|null|none|\d{1,2}|-?\d{0,2}\.\d{1,5}|-?\d(?:\.\d+)?e[+-]?\d{1,3}", re.IGNORECASE)
# Keys of a trial's evidence that hold dictionaries from path to value. A path such as out_token/model is not a secret's name.
_BY_PATH = frozenset({"files_left", "files_new", "files_aside", "files_unguarded"})
# Values with a meaning in stored records. A record without them could not be read, so they are never masked, even if a secret
# is the same word.
OWN_VALUES = frozenset((
    "ok", "raced", "unsteady", "device_oom", "host_oom", "timeout", "crash", "error", "nonfinite", "parity", "invalid",
    "disturbed", "interrupted", "infeasible", "exact", "numerics", "training", "baseline", "search", "attribution", "final",
    "explain", "check", "running", "complete", "failed", "faster", "same", "ambiguous", "holds", "no longer holds", "applied",
    "not applicable", "overridden by the program", "throughput", "time_for_samples", "energy_per_sample", "cost_per_epoch",
    "rates", "tpe", "gp", "random", "grid", "local", "slurm", "ray", "auto", "off", "cuda", "cpu", "torchvision", "timm",
    "transformers", "builtin", "photos", "fake_cifar", "folder", "text", "tabular", "synthetic", "sgd", "adamw", "default",
    "none", "true", "false", "samples", "tokens", "steps",
))  # fmt: skip
OWN_GROUPS = frozenset((  # first parts of the knobs' keys
    "loader", "precision", "layout", "compile", "optimizer", "backend", "step", "memory", "threads", "parallel", "nccl",
))  # fmt: skip
_VALUES, _KNOB = "|".join(sorted(OWN_VALUES)), rf"(?:{'|'.join(sorted(OWN_GROUPS))})\.[a-z0-9_]+"
_OWN = re.compile(rf"{_VALUES}|{_KNOB}")
# A part of a document with autotune's own meaning: one of OWN_VALUES or a knob's key, in quotes; a key of JSON; a key of YAML,
# alone or with one of OWN_VALUES.
_OWN_PART = re.compile(
    rf'"(?:{_VALUES}|{_KNOB})"|"[a-z][a-z0-9_.]*"(?=:)|^[ -]*[a-z][a-z0-9_.]*:(?: (?:{_VALUES})$|(?= |$))', re.MULTILINE
)
# A secret of these letters may be a part of autotune's own values and keys, where it is not masked. Any other secret is masked
# in longer keys, too, such as hunter2 in "run_hunter2".
_OWN_SECRET = re.compile(r"[a-z_]+")
_REFERENCE = "${"  # beginning of a reference in a configuration; references are resolved only when used

_Span = tuple[int, int]


def sounds_secret(name: str, separator: str = "=") -> bool:
    """Whether a key's value is likely a secret.

    "key" alone counts only before "=": torch prints `key: conv1.weight` for a state dict.
    """
    if name in _FOLDERS:
        return False
    words = [word.lower() for word in _WORD.findall(name)]
    if not words or _is_of_data(name, words):
        return False
    if _SECRET_WORDS & set(words) or any(word.endswith(_SECRET_ENDS) for word in words):
        return True
    if name.isupper() and words[-1].endswith(("token", "pass")):  # HFTOKEN, DB_PASS; but not "forward_pass"
        return True
    return words[-1] == "key" and (len(words) > 1 or "=" in separator)


def _is_of_data(name: str, words: list[str]) -> bool:
    """Whether a name is about a token of a vocabulary, or about a field of the samples."""
    if name.isupper():  # an environment variable
        return False
    if "token" in words:
        return bool(_OF_VOCABULARY & set(words)) and not (_SECRET_WORDS | _OF_ACCESS) & (set(words) - {"token"})
    return words[-1] == "key" and len(words) > 1 and _OF_SAMPLES.issuperset(words[:-1])


def is_secret(name: str, value: str) -> bool:
    """Whether a variable's value must not be written, because of its name or because it holds credentials."""
    return bool(value) and ((sounds_secret(name) and not _SWITCH.fullmatch(value)) or bool(_places(value)))


def without_credentials(text: str) -> str:
    """Returns the text with user names and passwords in URLs replaced by MASK."""
    return _cut(text, _addresses(text))


def is_masked(document: Any) -> bool:
    """Whether something in a document was masked when it was written."""
    if isinstance(document, Mapping):
        return any(is_masked(value) for value in document.values())
    if isinstance(document, list | tuple):
        return any(is_masked(item) for item in document)
    return isinstance(document, str) and MASK in document


class Secrets:
    """The known secret values. Masks these, and everything else that looks like a secret, in all that autotune writes.

    Args:
        values: values of secret environment variables. Values of at least MIN_CHARS characters are masked even inside words,
            shorter ones (at least MIN_WORD_CHARS, neither all letters nor all digits) only as whole words.
        typed: values that the user gave as secrets. They are masked as whole words if they have at least MIN_TYPED_CHARS
            characters, even if they are ordinary words.

    Attributes:
        typed: the values given as `typed`, to pass on to another process.
    """

    def __init__(self, values: Iterable[str] = (), typed: Iterable[str] = ()) -> None:
        values, typed = set(values), set(typed)
        self.typed = sorted(typed)
        everything = {form for value in values | typed for form in _forms(value)}
        self._parts = {value for value in everything if len(value) >= MIN_CHARS}
        mixed = {v for v in values if len(v) >= MIN_WORD_CHARS and not v.isalpha() and not v.isdigit()}
        self._words = mixed | {v for v in typed if len(v) >= MIN_TYPED_CHARS}
        self._words -= self._parts

    @classmethod
    def known(
        cls, environment: Mapping[str, str] = os.environ, words: Sequence[str] = (), typed: Iterable[str] = ()
    ) -> Secrets:
        """Returns the secrets of an environment and a command line.

        Args:
            environment: name -> value.
            words: arguments and KEY=VALUE overrides, as typed.
            typed: further values that the user gave as secrets.
        """
        found = [secret for name, value in environment.items() for secret in _held(name, value)]
        return cls(found, [*_typed(words), *typed])

    def text(self, text: str) -> str:
        """Returns a text without secrets, found by key, URL, format and value."""
        return _cut(text, [*_places(text), *self._values(text)])

    def message(self, text: str) -> str:
        """Returns a message of autotune with credentials in URLs and known secret values masked.

        The method `text` also masks by key. In the message "env.HF_TOKEN: is not set", it would mask the word "is".
        """
        return _cut(text, [*_addresses(text), *self._values(text)])

    def stored(self, text: str) -> str:
        """Returns a JSON or YAML document masked as by `message`, except whole keys of JSON, numbers, null, true and false.

        OWN_VALUES and autotune's own keys are also kept. Programs could not read the document without all of these:
        `--password 123` must not turn 123.4 into ***.4, and `--token baseline` must not turn the kind of trial 0 into ***.
        """
        values = [span for span in self._values(text) if not _is_key(text, span)]
        if any(_OWN_SECRET.fullmatch(text, *span) for span in values):
            own = [found.span() for found in _OWN_PART.finditer(text)]
            values = [span for span in values if not (_OWN_SECRET.fullmatch(text, *span) and _is_within(own, span))]
        if any(_BARE.fullmatch(text, *span) for span in values):
            bare = [found.span("bare") for found in _SCALAR.finditer(text) if found["bare"]]
            values = [span for span in values if not _is_within(bare, span)]
        return _cut(text, [*_addresses(text), *values])

    def words(self, words: Sequence[str]) -> list[str]:
        """Returns an argument list without secrets. Masks a word that looks like a secret or that follows a secret's flag."""
        found = []
        for before, word in zip(["", *words], words, strict=False):
            found.append(MASK if _is_value_of(before, word) else self._word(word))
        return found

    def document(self, document: Any, key: str = "") -> Any:
        """Returns a JSON or YAML document without secrets: masks values under secret-sounding keys, and all strings.

        References (`${oc.env:NAME}`) are kept: they name a secret but do not contain it.
        """
        if isinstance(document, Mapping):
            if key in _BY_PATH:
                return {self.message(str(path)): self.document(value) for path, value in document.items()}
            return {name: self.document(value, str(name)) for name, value in document.items()}
        if isinstance(document, list | tuple):
            is_series = all(isinstance(item, float) for item in document)  # holds no secrets, and may be very long
            return list(document) if is_series else [self.document(item, key) for item in document]
        if isinstance(document, enum.Enum | bool) or document is None:
            return document
        if key and document != "" and sounds_secret(key.rpartition(".")[2]) and not _is_plain(document):
            return document if isinstance(document, str) and document.startswith(MASK) else MASK
        return self.text(document) if isinstance(document, str) and not _OWN.fullmatch(document) else document

    def _word(self, word: str) -> str:
        pair = _ASSIGNMENT.fullmatch(word)
        if pair and sounds_secret(pair[1]) and not _is_plain(pair[2]):
            return f"{pair[1]}={MASK}"
        return self.text(word)

    def _values(self, text: str) -> Iterator[_Span]:
        for part in self._parts:
            yield from _occurrences(text, part)
        for word in self._words:
            yield from (span for span in _occurrences(text, word) if _is_alone(text, span))


def is_reference(value: Any) -> bool:
    """Whether a configuration's value is a reference, `${oc.env:NAME}`."""
    return isinstance(value, str) and value.startswith(_REFERENCE) and value.endswith("}")


def _is_plain(value: Any) -> bool:
    """Whether a value is no secret even if its key sounds like one."""
    return is_reference(value) or bool(_SWITCH.fullmatch(str(value)))


# Places of secrets in a text -----------------------------------------------------------------------------------------------


def _places(text: str) -> list[_Span]:
    return [*_addresses(text), *(match.span() for match in _FORMAT.finditer(text)), *_keyed(text)]


def _addresses(text: str) -> list[_Span]:
    return [match.span(1) for match in _URL.finditer(text) if _REFERENCE not in match[1] and match[1] != MASK]


def _keyed(text: str) -> Iterator[_Span]:
    end = 0
    for key in _KEY.finditer(text):  # the value of a harmless key may contain another key
        if key.start() >= end and sounds_secret(key[1], key[2]) and (value := _VALUE.match(text, key.end())):
            if not value[0].startswith(_REFERENCE) and not _SWITCH.fullmatch(value[0]):
                yield value.span()
            end = value.end()
    for flag in _FLAG.finditer(text):
        if sounds_secret(flag[1]) and not _SWITCH.fullmatch(flag[2]):
            yield flag.span(2)


def _occurrences(text: str, part: str) -> Iterator[_Span]:
    at = text.find(part)
    while at >= 0:
        yield at, at + len(part)
        at = text.find(part, at + len(part))


def _is_alone(text: str, span: _Span) -> bool:
    before, after = text[span[0] - 1 : span[0]], text[span[1] : span[1] + 1]
    return not (before.isalnum() or after.isalnum() or "_" in (before, after))


def _is_key(text: str, span: _Span) -> bool:
    """Whether a part of a document is a whole key of JSON."""
    start, stop = span
    return text[start - 1 : start] == '"' and text[start - 2 : start - 1] != "\\" and text.startswith('":', stop)


def _is_within(sorted_spans: Sequence[_Span], span: _Span) -> bool:
    at = bisect.bisect_right(sorted_spans, span[0], key=lambda each: each[0]) - 1
    return at >= 0 and span[1] <= sorted_spans[at][1]


def _cut(text: str, spans: Iterable[_Span]) -> str:
    parts, end = [], 0
    for start, stop in sorted(spans):
        if start >= end:
            parts += [text[end:start], MASK]
        end = max(end, stop)
    return "".join([*parts, text[end:]]) if end else text


# Which values are secret ---------------------------------------------------------------------------------------------------


def _held(name: str, value: str) -> list[str]:
    """Returns the secrets in a variable: its whole value, or the credentials in it. A path to a key file is not a secret."""
    if sounds_secret(name):
        return [] if _SWITCH.fullmatch(value) or (value.startswith("/") and os.path.exists(value)) else [value]
    return _credentials(value)


def _credentials(text: str) -> list[str]:
    found = [text[start:stop] for start, stop in (*(m.span() for m in _FORMAT.finditer(text)), *_keyed(text))]
    for start, stop in _addresses(text):
        user, _, password = text[start:stop].partition(":")
        found.append(password or user)
    return found


def _typed(words: Sequence[str]) -> Iterator[str]:
    for before, word in zip(["", *words], words, strict=False):
        pair = _ASSIGNMENT.fullmatch(word)
        if _is_plain(pair[2] if pair else word):
            continue
        if _is_value_of(before, word):
            yield word
        elif pair and sounds_secret(pair[1]):
            yield pair[2]
        else:
            yield from _credentials(word)


def _is_value_of(before: str, word: str) -> bool:
    is_flag = before.startswith("-") and "=" not in before and not word.startswith("-")
    return is_flag and sounds_secret(before) and not _is_plain(word)


def _forms(value: str) -> set[str]:
    """Returns the forms a secret may be written in: verbatim, in a URL, in JSON, in a Python literal, line by line."""
    lines = [line.strip() for line in value.splitlines() if len(line.strip()) >= 2 * MIN_CHARS and "-----" not in line]
    plain = value.encode("utf-8", "surrogateescape")
    quoted = {urllib.parse.quote(plain, safe=""), urllib.parse.quote_plus(plain), urllib.parse.unquote(value)}
    return {value, *quoted, json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1], repr(value)[1:-1], *lines}
