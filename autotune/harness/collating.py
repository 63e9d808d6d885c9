"""Tells from the code of a collate function whether it uses only the first sample of a batch.

Programs whose batches hold one sample often unpack it in this way: `collate_fn=lambda batch: batch[0]`. In a larger batch, all
other samples would be lost.
"""

from __future__ import annotations

import dis
import functools
import inspect
import operator
import types
from typing import Any


def takes_only_first(collate: Any) -> bool:
    """Whether a collate function uses its batch, and every use of it is `batch[0]`; False if this is not certain."""
    if type(collate) is operator.itemgetter:
        return repr(collate) == repr(operator.itemgetter(0))
    function, position = collate, 0
    if type(collate) is types.MethodType:
        function, position = collate.__func__, 1
    elif type(collate) is not types.FunctionType:
        function, position = inspect.getattr_static(type(collate), "__call__", None), 1
    return type(function) is types.FunctionType and _is_used_as_first(function.__code__, position)


@functools.lru_cache(maxsize=None)
def _is_used_as_first(code: types.CodeType, position: int) -> bool:
    """Whether all uses of the argument at a position are `argument[0]`; False if there are none."""
    name = code.co_varnames[position] if position < code.co_argcount else ""
    if not name or name in code.co_cellvars:  # an inner function may use it
        return False
    instructions, num = list(dis.get_instructions(code)), 0
    for number, each in enumerate(instructions):
        named = each.argval if isinstance(each.argval, tuple) else (each.argval,)  # an instruction may use two variables
        if "FAST" not in each.opname or name not in named:
            continue
        is_loaded_last = "LOAD" in each.opname and named.index(name) == len(named) - 1
        if not is_loaded_last or not _is_subscript_0(instructions[number + 1 : number + 3]):
            return False
        num += 1
    return num > 0


def _is_subscript_0(instructions: "list[dis.Instruction]") -> bool:
    if len(instructions) < 2:
        return False
    index, subscript = instructions
    is_0 = index.opname in ("LOAD_CONST", "LOAD_SMALL_INT") and type(index.argval) is int and index.argval == 0
    is_subscript = subscript.opname == "BINARY_SUBSCR" or (subscript.opname == "BINARY_OP" and subscript.argrepr == "[]")
    return is_0 and is_subscript
