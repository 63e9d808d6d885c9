"""Reads the contents of a program's objects directly from where torch stores them.

The harness must not call anything that a program's class may have overridden (`parameters`, `children`, `to`, `__getattr__`,
`shape`, ...): an override may raise, count its calls, move things, or mean something else. For example, a program's `to` may
move an empty tensor to learn the device; such a `to` fails if it is called with a memory format.
"""

from __future__ import annotations

import functools
import weakref
from types import MappingProxyType
from typing import Any, Callable, Dict, Iterator, List, Optional, Set, Tuple

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

TABLES = ("_parameters", "_buffers", "_modules")  # attributes of a module
_SHAPE: Any = Tensor.shape


def named_modules(module: Any, prefix: str = "", known: Optional[Set[int]] = None) -> Iterator[Tuple[str, Any]]:
    """Yields (name, module) for a module and all modules within it, outer ones first, each once."""
    known = set() if known is None else known
    if id(module) in known:
        return
    known.add(id(module))
    yield prefix, module
    for name, child in _table(module, "_modules").items():
        if child is not None:
            yield from named_modules(child, f"{prefix}.{name}" if prefix else name, known)


def modules(module: Any) -> Iterator[Any]:
    """Yields a module and all modules within it, outer ones first, each once."""
    return (each for _, each in named_modules(module))


def children(module: Any) -> Iterator[Any]:
    """Yields the direct children of a module, each once."""
    return iter({id(child): child for child in _table(module, "_modules").values() if child is not None}.values())


def named_parameters(module: Any) -> Iterator[Tuple[str, Any]]:
    """Yields (name, parameter) for all parameters within a module, each once."""
    known: Set[int] = set()
    for prefix, each in named_modules(module):
        for name, parameter in _table(each, "_parameters").items():
            if parameter is not None and id(parameter) not in known:
                known.add(id(parameter))
                yield (f"{prefix}.{name}" if prefix else name), parameter


def parameters(module: Any) -> Iterator[Any]:
    """Yields all parameters within a module, each once."""
    return (parameter for _, parameter in named_parameters(module))


def first_parameter(module: Any) -> Callable[[], Any]:
    """Returns a function that returns the first parameter within a module, or None once it no longer exists.

    The function keeps only a weak reference: to the parameter or, if torch may swap its content, to the module that holds it.
    """
    for each in modules(module):
        for name, parameter in _table(each, "_parameters").items():
            if parameter is None:
                continue
            if is_swapped(parameter):
                return functools.partial(_held_by, weakref.ref(each), name)
            return weakref.ref(parameter)
    return nothing


def _held_by(owner: Any, name: str) -> Any:
    return _table(owner(), "_parameters").get(name)


def is_swapped(parameter: Any) -> bool:
    """Whether `Module.to` swaps the contents of this parameter and a new one, as it does for FSDP2's shards.

    Torch refuses to swap a tensor to which a weak reference exists.
    """
    return is_traceable_wrapper_subclass(parameter) or torch.__future__.get_swap_module_params_on_conversion()


def convert(module: Any, change: Any) -> None:
    """Replaces each parameter and buffer of one module, but not of its children, with what `change` returns for it."""
    Module._apply(module, change, recurse=False)  # type: ignore[no-untyped-call]


def attribute(thing: Any, name: str, default: Any = None) -> Any:
    """Returns an attribute of the object or of its class; the default if there is no such attribute, or if reading it fails.

    `__getattr__` is not called, so attributes that a wrapper forwards to another object are not found.
    """
    own = held(thing)
    if name in own:
        return own[name]
    if isinstance(thing, Module):
        for table in TABLES:
            if name in _table(thing, table):
                return _table(thing, table)[name]
    for kind in type(thing).__mro__:
        if name in kind.__dict__:
            found = kind.__dict__[name]
            try:
                return found.__get__(thing, type(thing)) if hasattr(type(found), "__get__") else found
            except Exception:  # raised by the program's own property
                return default
    return default


def shape_of(value: Any) -> Optional[Tuple[int, ...]]:
    """Returns the shape of a tensor or of any library's array; None for anything else. A dimension of varying size is 0."""
    if isinstance(value, Tensor):
        try:
            shape: Tuple[int, ...] = _SHAPE.__get__(value)
            return shape if type(value) is Tensor else tuple(each if isinstance(each, int) else 0 for each in shape)
        except RuntimeError:  # a nested tensor has no shape
            return ()
    shape = attribute(value, "shape")
    return shape if isinstance(shape, tuple) else None


def nothing() -> Any:
    """Returns None; stands for a weak reference to an object that does not exist."""
    return None


def device_of(parameter: Any) -> Any:
    """Returns the device on which a parameter is used. For a DTensor in host memory, that is the device of its mesh."""
    kind = attribute(attribute(parameter, "device_mesh"), "device_type", "cpu")
    return torch.device(kind) if parameter.device.type == "cpu" != kind else parameter.device


def nodes_of(grad_fn: Any) -> Iterator[Any]:
    """Yields the nodes of an autograd graph, each once, beginning with a tensor's `grad_fn`."""
    waiting: List[Any] = [grad_fn]
    known: Set[Any] = {None}
    while waiting:
        node = waiting.pop()
        if node not in known:
            known.add(node)
            yield node
            waiting += [before for before, _ in node.next_functions]


def local(tensor: Any) -> Any:
    """Returns this rank's part of a distributed tensor; any other tensor itself."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def plain(value: Tensor) -> Tensor:
    """Returns `value` detached, as a plain torch.Tensor; keeps the class of `value` if it wraps other tensors (DTensor)."""
    if type(value) is Tensor or type(value).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return Tensor.detach(value)
    with torch._C.DisableTorchFunctionSubclass():
        return Tensor.as_subclass(Tensor.detach(value), Tensor)


def held(thing: Any) -> Dict[str, Any]:
    """Returns an object's own attributes; {} if it has slots or is implemented in C, or if reading them fails."""
    try:
        own: Any = object.__getattribute__(thing, "__dict__")
    except Exception:  # a program's class may have its own property `__dict__`, as lazy proxies do: it may raise anything
        return {}
    return own if isinstance(own, (dict, MappingProxyType)) else {}  # type: ignore[return-value]  # the attributes of a class


def _table(module: Any, name: str) -> Any:
    return held(module).get(name, {})
