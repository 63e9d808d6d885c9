"""Gives one module a class of its own: a subclass of its class that overrides a method or two.

It survives deepcopy, pickling and `state_dict`, which see the program's class; an attribute `forward` of the instance does not:
a deepcopy then ran the original's weights.
"""

from __future__ import annotations

from typing import Any, Callable, Dict

_CLASS: Any = object.__dict__["__class__"]  # the real slot, under whatever a class says of `__class__`


class _NoSubclassHook:
    """Before the program's class in the order of resolution: its `__init_subclass__` (a registry, say) is not told.

    Without `__slots__`: an object's class can only be replaced by one of the same layout.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        pass


def subclass(module: Any, methods: Dict[str, Callable[..., Any]]) -> bool:
    """Gives a module a subclass of its own class with these methods.

    `__class__`, copies and pickles show the program's own class; only `type(module)` tells.

    Args:
        module: the module.
        methods: name -> function; they call the program's own by its class.

    Returns:
        Whether the module could be given another class (a ScriptModule cannot).
    """
    original = type(module)

    def show_class(self: Any) -> type:
        return original

    def undressed(method: str) -> Callable[..., Any]:
        def call(self: Any, *args: Any) -> Any:
            kind = type(self)
            _CLASS.__set__(self, original)
            try:
                return getattr(self, method)(*args)
            finally:
                _CLASS.__set__(self, kind)

        return call

    body: Dict[str, Any] = {name: getattr(original, name) for name in ("__qualname__", "__module__", "__doc__")}
    body.update(methods)
    body.update(__class__=property(show_class, _CLASS.__set__), __reduce_ex__=undressed("__reduce_ex__"))
    if hasattr(original, "__deepcopy__"):
        body["__deepcopy__"] = undressed("__deepcopy__")
    try:
        metaclass: Any = type(original)
        _CLASS.__set__(module, metaclass(original.__name__, (_NoSubclassHook, original), body))
    except Exception:
        return False  # the program's class or its metaclass does not allow it
    return True
