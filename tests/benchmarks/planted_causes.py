"""What `autotune explain` has to find in the programs of `planted/`: cause and place, kept apart from the programs.

A place is given by the lines of the program that cost, from one piece of source to another, and by words for what has no line:
a stage, a knob, a rank, an operator. A finding's place is right if it names such a line or such a word.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).with_name("planted")

CAUSES = {  # class: words of which one is in the finding's cause, all of a group's
    "decode": ("decode", "decoding", "jpeg"),
    "augmentation": ("augment", "augmentation", "transform", "transforms"),
    "storage": ("storage", "read", "reading", "disk"),
    "collate": ("collate",),
    "workers": ("worker", "workers"),
    "item": ("item", "synchronisation", "synchronization", "sync", "scalar", "scalars", "metrics"),
    "logging": ("logging", "log", "fsync", "write", "writing"),
    "python": ("python",),
    "gc": ("gc", "garbage"),
    "launch": ("launch", "overhead", "small operators", "many small"),
    "recompilation": ("recompilation", "recompilations", "recompile", "recompiles", "recompiled"),
    "precision": ("fp32", "float32", "bf16", "precision", "tensor core", "tensor cores", "channels last", "layout"),
    "optimizer": ("optimizer", "optimiser"),
    "ranks": ("rank", "ranks", "skew", "imbalance", "straggler", "unbalanced"),
}


@dataclass(frozen=True, kw_only=True)
class Cause:
    """One cause that is planted.

    Attributes:
        kind: its class, a key of CAUSES.
        switch: which revision switches it off, by the last letter of the variable.
        lines: pieces of source, the first and the last line of the place; () where there are no such lines.
        words: what else names the place.
    """

    kind: str
    switch: str = "A"
    lines: tuple[str, str] | tuple[()] = ()
    words: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Program:
    """A program and what is planted in it: nothing in a healthy one."""

    name: str
    causes: tuple[Cause, ...] = ()
    num_ranks: int = 1

    @property
    def path(self) -> Path:
        """Returns its file."""
        return FOLDER / f"{self.name}.py"

    def command(self, data: Path) -> list[str]:
        """Returns how it is started."""
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={self.num_ranks}"]
        return [sys.executable, *(torchrun if self.num_ranks > 1 else []), str(self.path), "--data", str(data)]

    def line_range(self, cause: Cause) -> range:
        """Returns the numbers of a cause's lines; empty where it has none.

        Raises:
            ValueError: a piece of source is not found, or not once.
        """
        if not cause.lines:
            return range(0)
        lines = self.path.read_text(encoding="utf-8").splitlines()
        first, last = (_only(lines, piece) for piece in cause.lines)
        return range(first, last + 1)


def _only(lines: Sequence[str], piece: str) -> int:
    numbers = [number for number, line in enumerate(lines, 1) if piece in line]
    if len(numbers) != 1:
        raise ValueError(f"{piece!r} is in {len(numbers)} lines, must be in one")
    return numbers[0]


WORKER_KNOB = ("num_workers",)
OPTIMIZER_WORDS = ("optimizer.fused", "optimizer.step", "optimizer.implementation")
PRECISION_WORDS = ("precision", "layout", "channels_last", "conv")

SINGLE = (
    Program(
        name="photos",
        causes=(Cause(kind="decode", lines=('return Image.open(path).convert("RGB")',) * 2, words=("decode",)),),
    ),
    Program(
        name="textures",
        causes=(
            Cause(
                kind="augmentation",
                lines=("return self.views(self.images", "return self.views(self.images"),
                words=("ColorJitter", "GaussianBlur", "transform", "augment"),
            ),
        ),
    ),
    Program(
        name="archive",
        causes=(Cause(kind="storage", lines=("def get(self", "return body"), words=("read", "storage")),),
    ),
    Program(
        name="sentences",
        causes=(Cause(kind="collate", lines=("def batch_of(", "return rows, labels"), words=("collate", "batch_of")),),
    ),
    Program(
        name="spectra",
        causes=(Cause(kind="workers", lines=("loader = DataLoader(",) * 2, words=WORKER_KNOB),),
    ),
    Program(
        name="residuals",
        causes=(Cause(kind="item", lines=("for name, weight in self.model", "sizes[name] = (")),),
    ),
    Program(
        name="journal",
        causes=(Cause(kind="logging", lines=("def write(self", "os.fsync(")),),
    ),
    Program(
        name="contrast",
        causes=(Cause(kind="python", lines=("same = torch.zeros(", "same[i, j] = True")),),
    ),
    Program(
        name="ledger",
        causes=(Cause(kind="gc", lines=("gc.collect()",) * 2),),
    ),
    Program(
        name="gates",
        causes=(
            Cause(
                kind="launch",
                lines=("def forward(self, rows: Tensor) -> Tensor:", "loss.backward()"),
                words=("compile", "batch_size", "step"),
            ),
        ),
    ),
    Program(
        name="lengths",
        causes=(Cause(kind="recompilation", lines=("compiled = torch.compile(", "loss = nn.functional"), words=("forward",)),),
    ),
    Program(
        name="tiles",
        causes=(Cause(kind="precision", lines=("model(images)",) * 2, words=PRECISION_WORDS),),
    ),
    Program(
        name="towers",
        causes=(Cause(kind="optimizer", lines=("optimizer.step()",) * 2, words=OPTIMIZER_WORDS),),
    ),
    Program(
        name="clouds",
        num_ranks=2,
        causes=(Cause(kind="ranks", words=("rank 1", "rank1")),),
    ),
)
PAIRS: tuple[Program, ...] = ()
HEALTHY: tuple[Program, ...] = ()
PROGRAMS = {program.name: program for program in (*SINGLE, *PAIRS, *HEALTHY)}
