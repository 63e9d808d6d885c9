"""Determines from the program's source whether a line of a training step is in an inner loop, and whether it calls torch."""

from __future__ import annotations

import ast
import functools
import os
import re
from collections.abc import Iterator

from autotune.harness.explain.documents import INPUT, MAIN, Line, Lines

MAX_SOURCE_BYTES = 1_000_000
WHOLE_STEP_FRAC = 0.5  # a line that takes at least this share of a step is in the training loop itself, not in an inner loop
STEPPING = {"backward", "step", "zero_grad"}  # methods that a training loop calls
LOOPS = (ast.For, ast.AsyncFor, ast.While)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
TENSOR_WORK = re.compile(
    r"\btorch\.|\bF\.|\bnn\.|\bself\.\w+\(|\.backward\(|\.step\(|zero_grad|criterion|loss_fn|\bmodel\(|\bnet\("
    r"|\.to\(|\.cuda\(| @ "
)
Range = tuple[int, int]


def is_torch(line: Line, lines: Lines) -> bool:
    """Returns whether a line of the program spends most of its time in a function of torch."""
    return bool(line.callee) and "/torch/" in file_of(line.callee, lines)


def file_of(callee: str, lines: Lines) -> str:
    """Returns the path of the file of a library function such as "functional.py:linear"; "" if `lines` has no line of it."""
    name, _, function = callee.partition(":")
    found = (line for line in lines.lines if not line.is_own and line.function == function)
    return next((line.file for line in found if os.path.basename(line.file) == name), "")


def is_tensor_work(line: Line, lines: Lines) -> bool:
    """Returns whether a line calls torch, so that its time is computation rather than Python."""
    return is_torch(line, lines) or bool(TENSOR_WORK.search(line.text))


def is_in_inner_loop(line: Line, lines: Lines) -> bool:
    """Returns whether a line repeats within a step: it is in a loop or comprehension other than the training loop."""
    training = [each.line for each in _training_lines(lines) if each.file == line.file]
    return any(
        first <= line.line <= last and not is_stepping and not any(first <= number <= last for number in training)
        for (first, last), is_stepping in _loops(line.file)
    )


def _training_lines(lines: Lines) -> list[Line]:
    """Returns lines that can only be in the training loop: those that take most of a step, and those that fetch input."""
    step_s = lines.seconds / max(1, lines.steps)
    own = [line for line in lines.lines if line.is_own and line.where == MAIN]
    return [line for line in own if line.total_s >= WHOLE_STEP_FRAC * step_s or line.phase == INPUT]


def line_with(pattern: re.Pattern[str], file: str) -> tuple[str, int] | None:
    """Returns (file, line) of the first line of a source file that a pattern matches; None if there is none."""
    numbers = (number for number, line in enumerate(_source(file).splitlines(), 1) if pattern.search(line))
    first = next(numbers, None)
    return None if first is None else (file, first)


def _source(file: str) -> str:
    """Returns the text of a source file; "" if it cannot be read."""
    try:
        if not os.path.isfile(file) or os.path.getsize(file) > MAX_SOURCE_BYTES:
            return ""
        with open(file, encoding="utf-8", errors="replace") as source:
            return source.read()
    except (OSError, ValueError):
        return ""


@functools.lru_cache(maxsize=64)
def _loops(file: str) -> tuple[tuple[Range, bool], ...]:
    """Returns (first and last line, whether it calls backward or step) of every loop in a file; () if it cannot be read."""
    try:
        tree = ast.parse(_source(file))
    except (ValueError, SyntaxError, RecursionError):
        return ()
    return tuple(_ranges(tree))


def _ranges(tree: ast.AST) -> Iterator[tuple[Range, bool]]:
    for node in ast.walk(tree):
        if isinstance(node, LOOPS):
            yield (node.body[0].lineno, node.end_lineno or node.lineno), _is_stepping(node)
            yield (node.lineno, node.lineno), _is_stepping(node)
        elif isinstance(node, COMPREHENSIONS):
            yield (node.lineno, node.end_lineno or node.lineno), False


def _is_stepping(loop: ast.AST) -> bool:
    calls = (node.func for node in ast.walk(loop) if isinstance(node, ast.Call))
    return any(isinstance(call, ast.Attribute) and call.attr in STEPPING for call in calls)
