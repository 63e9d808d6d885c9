"""Lists the causes that `autotune explain` must find in the programs of `planted/`, and their places.

The programs themselves do not name the causes. A place is given by lines of the program, from one piece of source to another. A
place without a line (a stage, a knob, a rank, an operator) is given by words. A finding's place is right if it names such a
line or such a word.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from autotune.harness.protocol import KEEPING

FOLDER = Path(__file__).with_name("planted")

CAUSES = {  # class of a cause -> words, one of which must be in the finding's cause
    "decode": ("decode", "decoding", "jpeg"),
    "augmentation": ("augment", "augmentation", "transform", "transforms"),
    "storage": ("storage", "read", "reading", "disk"),
    "collate": ("collate",),
    "workers": ("worker", "workers"),
    "item": ("item", "synchronisation", "synchronization", "scalar", "scalars", "metrics"),
    "logging": ("logging", "log", "fsync", "write", "writing"),
    "python": ("python",),
    "gc": ("gc", "garbage"),
    "launch": ("launch", "overhead", "small operators", "many small"),
    "recompilation": ("recompilation", "recompilations", "recompile", "recompiles", "recompiled"),
    "precision": ("fp32", "float32", "32 bit", "bf16", "precision", "tensor core", "tensor cores", "channels last", "layout"),
    "optimizer": ("optimizer", "optimiser"),
    "ranks": ("rank", "ranks", "skew", "imbalance", "straggler", "unbalanced"),
}


@dataclass(frozen=True, kw_only=True)
class Cause:
    """A planted cause.

    Attributes:
        kind: its class, a key of CAUSES.
        switch: "A" or "B": the cause is switched off by REVISION_A=2 or REVISION_B=2.
        lines: pieces of source that identify the first and the last line of each part of the place; () without such lines.
        words: other words that name the place.
    """

    kind: str
    switch: str = "A"
    lines: tuple[tuple[str, str], ...] = ()
    words: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Program:
    """A program and its planted causes; a healthy program has none."""

    name: str
    causes: tuple[Cause, ...] = ()
    num_ranks: int = 1

    @property
    def path(self) -> Path:
        """Returns the program's file."""
        return FOLDER / f"{self.name}.py"

    @property
    def variables(self) -> dict[str, str]:
        """Returns the environment variables that the program is started with.

        In healthy programs, the C library keeps freed memory, because four of the six would really gain 10 to 70 % from that.
        """
        return {} if self.causes else dict(KEEPING)

    def command(self, data: Path) -> list[str]:
        """Returns the program's command."""
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={self.num_ranks}"]
        return [sys.executable, *(torchrun if self.num_ranks > 1 else []), str(self.path), "--data", str(data)]

    def line_ranges(self, cause: Cause) -> list[range]:
        """Returns the line numbers of a cause.

        Raises:
            ValueError: a piece of source does not occur exactly once.
        """
        lines = self.path.read_text(encoding="utf-8").splitlines()
        return [range(_only(lines, first), _only(lines, last) + 1) for first, last in cause.lines]


def _only(lines: Sequence[str], piece: str) -> int:
    numbers = [number for number, line in enumerate(lines, 1) if piece in line]
    if len(numbers) != 1:
        raise ValueError(f"{piece!r} is in {len(numbers)} lines, must be in one")
    return numbers[0]


def _only_line(piece: str) -> tuple[str, str]:
    return piece, piece


VIEWS = ("transform", "augment", "augmentation", "GaussianBlur")
LAUNCH_WORDS = ("compile", "batch_size", "step", "forward", "backward")
WORKER_KNOB = ("num_workers",)
OPTIMIZER_WORDS = ("optimizer.fused", "optimizer.step", "optimizer.implementation", "optimizer")
PRECISION_WORDS = ("precision", "layout", "channels_last", "conv", "conv2d", "convolution")
COMPILE_WORDS = ("compile", "forward", "dynamic")
STORAGE_WORDS = ("read", "storage", "fetch", "get")
STEP = _only_line("optimizer.step()")
OPTIMIZER = _only_line("optimizer = torch.optim")
LOADER = (_only_line("loader = DataLoader("), _only_line("in loader:"))
FORWARD_BACKWARD = (_only_line("loss = nn.functional"), _only_line("loss.backward()"))


def _program(name: str, *causes: Cause, num_ranks: int = 1) -> Program:
    return Program(name=name, causes=causes, num_ranks=num_ranks)


SINGLE = (
    _program("photos", Cause(kind="decode", lines=(_only_line("return Image.open(path).convert("),), words=("decode",))),
    _program(
        "textures",
        Cause(
            kind="augmentation",
            lines=(_only_line("steps += [v2.ColorJitter"), _only_line("return self.views(self.images")),
            words=("ColorJitter", *VIEWS),
        ),
    ),
    _program("archive", Cause(kind="storage", lines=(("def get(self", "return body"),), words=STORAGE_WORDS)),
    _program(
        "sentences",
        Cause(kind="collate", lines=(("def batch_of(", "return rows, labels"),), words=("collate", "collate_fn", "batch_of")),
    ),
    _program("spectra", Cause(kind="workers", lines=LOADER, words=WORKER_KNOB)),
    _program("residuals", Cause(kind="item", lines=(("for name, weight in self.model", "sizes[name] = ("),))),
    _program("journal", Cause(kind="logging", lines=(("def write(self", "os.fsync("),))),
    _program("contrast", Cause(kind="python", lines=(("same = torch.zeros(", "same[i, j] = True"),))),
    _program("ledger", Cause(kind="gc", lines=(_only_line("gc.collect()"),))),
    _program(
        "gates",
        Cause(
            kind="launch",
            lines=(("class Norm(", "return self.head(hidden)"), *FORWARD_BACKWARD),
            words=LAUNCH_WORDS,
        ),
    ),
    _program(
        "lengths",
        Cause(
            kind="recompilation",
            lines=(
                ("def forward(", "return self.head("),
                _only_line("compiled = torch.compile("),
                _only_line("loss = nn.functional"),
            ),
            words=COMPILE_WORDS,
        ),
    ),
    _program(
        "tiles",
        Cause(
            kind="precision",
            lines=(("def block(", "return nn.Sequential("), _only_line("model(images)"), _only_line("loss.backward()")),
            words=PRECISION_WORDS,
        ),
    ),
    _program("towers", Cause(kind="optimizer", lines=(STEP, OPTIMIZER), words=OPTIMIZER_WORDS)),
    _program("clouds", Cause(kind="ranks", words=("rank 1",)), num_ranks=2),
)
PAIRS = (
    _program(
        "ridges",
        Cause(kind="item", lines=(("for name, weight in model.named", "found[name] = ["),)),
        Cause(kind="optimizer", switch="B", lines=(STEP, OPTIMIZER), words=OPTIMIZER_WORDS),
    ),
    _program(
        "siblings",
        Cause(kind="gc", lines=(_only_line("gc.collect()"),)),
        Cause(kind="python", switch="B", lines=(("signs = torch.empty", "signs[i, j] = "),)),
    ),
    _program(
        "scenes",
        Cause(
            kind="logging",
            lines=(
                ("def note(", "os.fsync("),
                _only_line("note(folder, step=step"),
            ),
        ),
        Cause(
            kind="precision",
            switch="B",
            lines=(("def block(", "return nn.Sequential("), _only_line("model(images)"), _only_line("loss.backward()")),
            words=PRECISION_WORDS,
        ),
    ),
    _program(
        "weather",
        Cause(
            kind="augmentation",
            lines=(_only_line("random = [v2.RandomAffine"), _only_line("return self.views(self.maps")),
            words=("RandomAffine", *VIEWS),
        ),
        Cause(kind="optimizer", switch="B", lines=(STEP, OPTIMIZER), words=OPTIMIZER_WORDS),
    ),
    _program(
        "vault",
        Cause(kind="storage", lines=(("def fetch(self", "return body"),), words=STORAGE_WORDS),
        Cause(kind="workers", switch="B", lines=LOADER, words=WORKER_KNOB),
    ),
    _program(
        "pulse",
        Cause(
            kind="launch",
            lines=(("class Unit(", "return (1 - keep)"), ("class Network(", "return self.head(state)"), *FORWARD_BACKWARD),
            words=LAUNCH_WORDS,
        ),
        Cause(kind="logging", switch="B", lines=(("def add(self", "os.fsync("),)),
    ),
)
HEALTHY = tuple(Program(name=name) for name in ("leaves", "prices", "letters", "tides", "molecules", "shapes"))
PROGRAMS = {program.name: program for program in (*SINGLE, *PAIRS, *HEALTHY)}
