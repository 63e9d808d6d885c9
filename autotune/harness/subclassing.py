"""Gives a single module its own class: a subclass of the program's class that overrides some methods.

deepcopy, pickle and `state_dict` still work, because they see the program's class. Setting `forward` on the instance instead
would break deepcopy: the copy would run with the original's weights.
"""

from __future__ import annotations

from typing import Any, Callable, Dict

_CLASS: Any = object.__dict__["__class__"]  # the real slot, even if a class overrides `__class__`


class _NoSubclassHook:
    """Precedes the program's class in the MRO, so that the program's `__init_subclass__` (e.g. a registry) is not called.

    This class has no `__slots__`, because an object's class can only be replaced by a class of the same layout.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        pass


def subclass(module: Any, methods: Dict[str, Callable[..., Any]]) -> bool:
    """Changes the class of a module to a subclass that has these methods.

    `__class__`, copies and pickles show the program's own class; only `type(module)` shows the subclass.

    Args:
        module: the module.
        methods: name -> function. A function calls the program's own method through the program's class.

    Returns:
        Whether the module could be given another class (a ScriptModule cannot).
    """
    original = type(module)

    def show_class(self: Any) -> type:
        return original

    def with_original_class(method: str) -> Callable[..., Any]:
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
    body.update(__class__=property(show_class, _CLASS.__set__), __reduce_ex__=with_original_class("__reduce_ex__"))
    if hasattr(original, "__deepcopy__"):
        body["__deepcopy__"] = with_original_class("__deepcopy__")
    try:
        metaclass: Any = type(original)
        _CLASS.__set__(module, metaclass(original.__name__, (_NoSubclassHook, original), body))
    except Exception:
        return False  # the program's class or its metaclass does not allow it
    return True
