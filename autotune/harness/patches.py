"""Replaces functions of torch, of a library, of the program or of `os`, and the class of an nn.Module; no other file does so.

`patches.install(owner, name, wrap)` replaces an attribute of a class, a module or an object by `wrap(original)`. Several
patches of one attribute are stacked, and each can be removed, even if later patches by autotune lie on top of it. But if the
program or a library has replaced the attribute on top of autotune's patch, autotune's patch cannot be removed. It stays in the
stack, and its `is_active` becomes False. From then on, its replacement must only call the original.
"""

from __future__ import annotations

import functools
import importlib.abc
import os
import sys
import threading
from typing import Any, Callable, Dict, Generic, Iterable, List, Optional, Sequence, Tuple

Wrap = Callable[[Any], Any]
MISSING: Any = object()


class Patch:
    """One replacement of one attribute.

    Attributes:
        is_active: whether the replacement is in force. A replacement checks this, because it may be impossible to remove.
        function: the replacement.

    Args:
        site: the attribute and the stack of its patches.
        wrap: returns the replacement for the function it is given.
    """

    def __init__(self, site: _Site, wrap: Wrap) -> None:
        self._site, self.wrap = site, wrap
        self.below: Any = None  # the earlier value of the attribute, from which `function` was made
        self.function: Any = None
        self.is_active = False

    def install(self) -> None:
        """Installs the replacement, possibly again."""
        with _lock:
            if not self.is_active:
                self.is_active = True
                self._site.add(self)

    def uninstall(self) -> bool:
        """Removes the replacement.

        Returns:
            False if the program or a library has replaced the attribute on top: this patch stays, with `is_active` False.
        """
        with _lock:
            self.is_active = False
            return self._site.remove(self)

    def uninstall_during_import(self, name: str) -> None:
        """Removes the replacement while the module `name` is first imported: that module would otherwise store it."""

        def around(execute: Callable[[], None], _: Any) -> None:
            was_active = self.is_active
            self.uninstall()
            try:
                execute()
            finally:
                if was_active:
                    self.install()

        if name not in sys.modules:
            sys.meta_path.insert(0, Awaited(name, around))


class _Site:
    """An attribute of an owner and the stack of its patches, lowest first."""

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self._name = owner, name
        self._before = vars(owner).get(name, MISSING)  # MISSING if the owner only inherits it
        self._layers: List[Patch] = []

    def add(self, patch: Patch) -> None:
        if patch in self._layers:
            return  # it is still there, because it could not be removed
        if not self._layers:
            self._before = vars(self.owner).get(self._name, MISSING)  # it may have changed since `__init__`
        self._put(patch)
        self._layers.append(patch)

    def remove(self, patch: Patch) -> bool:
        if patch not in self._layers:
            return True
        if vars(self.owner).get(self._name, MISSING) is not self._layers[-1].function:
            return False
        position = self._layers.index(patch)
        above = self._layers[position + 1 :]
        if any(upper.below is not lower.function for lower, upper in zip(self._layers[position:], above)):  # noqa: B905
            return False  # the program has replaced the function between two of our patches
        self._layers = self._layers[:position]
        self._restore(patch.below)
        for each in above:
            self._put(each)
            self._layers.append(each)
        return True

    def _put(self, patch: Patch) -> None:
        original = getattr(self.owner, self._name)
        if patch.function is None or patch.below is not original:
            patch.below, patch.function = original, patch.wrap(original)
            if getattr(patch.function, "__wrapped__", None) is not original:
                functools.update_wrapper(patch.function, original)
        setattr(self.owner, self._name, patch.function)

    def _restore(self, below: Any) -> None:
        if self._layers:
            setattr(self.owner, self._name, below)
        elif self._before is MISSING:
            delattr(self.owner, self._name)
        else:
            setattr(self.owner, self._name, self._before)  # the stored object itself, for example a staticmethod


class Patches:
    """All patches of this process."""

    def __init__(self) -> None:
        self._sites: Dict[Tuple[int, str], _Site] = {}

    def install(self, owner: Any, name: str, wrap: Wrap) -> Patch:
        """Replaces an attribute until the patch is uninstalled.

        Args:
            owner: a class or a module.
            name: name of the attribute, which the owner has itself or inherits.
            wrap: returns the replacement, given the current value.
        """
        with _lock:
            site = self._sites.setdefault((id(owner), name), _Site(owner, name))
            patch = Patch(site, wrap)
            patch.install()
            return patch

    def install_in(self, owners: Iterable[Any], name: str, wrap: Wrap) -> None:
        """Replaces a function that several modules hold. All modules get the same new function, so that it can be pickled.

        Pickle rejects a function if the module named by its `__module__` holds a different function under the same name.
        """
        made: Dict[int, Any] = {}

        def wrap_once(original: Any) -> Any:
            if id(original) not in made:
                made[id(original)] = wrap(original)
            return made[id(original)]

        for owner in owners:
            self.install(owner, name, wrap_once)

    def reach(self, modules: Iterable[Any]) -> None:
        """Puts the replacements also into modules that hold the original functions by name, as after `from torch import save`.

        Only modules that were imported before the patches were installed need this: in a warm start, a trial is forked from a
        process that has already imported libraries. Modules that are imported later get the replacements by themselves.
        """
        with _lock:
            layers = [site._layers for site in self._sites.values() if site._layers]
            functions = {id(each[0].below): each[-1].function for each in layers}
            for module in modules:
                for name, value in list(vars(module).items()):
                    if id(value) in functions:
                        setattr(module, name, functions[id(value)])

    def uninstall_all(self) -> List[str]:
        """Removes all patches, the newest first; returns the attributes that the program or a library has replaced on top."""
        with _lock:
            left = []
            for site in reversed(list(self._sites.values())):
                for patch in reversed(list(site._layers)):
                    if not patch.uninstall():
                        left.append(f"{getattr(site.owner, '__name__', site.owner)}.{site._name}")
            return left

    def on_import(self, name: str, act: Callable[[Any], None]) -> None:
        """Calls `act` with a module once the module is imported, or immediately if it already is. `act` must not raise."""
        if name in sys.modules:
            act(sys.modules[name])
            return

        def around(execute: Callable[[], None], module: Any) -> None:
            execute()
            act(module)

        sys.meta_path.insert(0, Awaited(name, around))


def replace_of_object(owner: Any, name: str, wrap: Wrap) -> None:
    """Replaces a method of a single object, such as an epoch's iterator, for as long as the object lives."""
    setattr(owner, name, functools.wraps(getattr(owner, name))(wrap(getattr(owner, name))))


def _renew_lock() -> None:
    global _lock
    _lock = threading.RLock()  # another thread of the parent may have held the old lock during the fork


_lock = threading.RLock()
os.register_at_fork(after_in_child=_renew_lock)
patches = Patches()


# --- imports ---


class Awaited(importlib.abc.MetaPathFinder):
    """An import hook for one module. The other finders find the module; the hook makes `around` execute it.

    The hook removes itself when the module is executed. It stays if a library merely calls `importlib.util.find_spec`.

    Args:
        name: dotted name of the module.
        around: called with a function that executes the module, and with the module. It must call the function.
    """

    def __init__(self, name: str, around: Callable[[Callable[[], None], Any], None]) -> None:
        self.name = name
        self._around = around

    def find_spec(self, fullname: str, path: Optional[Sequence[str]], target: Any = None) -> Any:
        """Returns the module's spec with the wrapped loader; None for every other module."""
        if fullname != self.name:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    self.wrap(spec.loader)
                return spec
        return None

    def wrap(self, loader: Any) -> None:
        """Replaces the loader's `exec_module` for one call, in which `around` decides when to call the original."""
        execute = loader.exec_module

        def exec_module(module: Any) -> None:
            if loader.__dict__.get("exec_module") is exec_module:
                del loader.exec_module  # the module's __spec__.loader is the plain loader again
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            self._around(lambda: execute(module), module)

        loader.exec_module = exec_module


# --- the class of a single module ---

_CLASS: Any = object.__dict__["__class__"]  # the real slot, even if a class overrides `__class__`
ORIGINAL = "_autotune_original"  # attribute of a class made by `subclass`: the class that the module had before


class _NoSubclassHook:
    """Precedes the program's class in the MRO, so that the program's `__init_subclass__` (e.g. a registry) is not called.

    This class has no `__slots__`, because an object's class can only be replaced by a class of the same layout.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        pass


def subclass(module: Any, methods: Dict[str, Callable[..., Any]]) -> bool:
    """Changes the class of a module to a subclass that has these methods.

    `__class__`, copies and pickles show the program's own class; only `type(module)` shows the subclass. Setting a method on
    the instance instead would break deepcopy: the copy would run with the original's weights.

    Each function in `methods` has to call the method that it overrides, through the program's class. Returns whether the
    class of the module could be changed; the class of a ScriptModule cannot.
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
    body[ORIGINAL] = original
    body.update(__class__=property(show_class, _CLASS.__set__), __reduce_ex__=with_original_class("__reduce_ex__"))
    if hasattr(original, "__deepcopy__"):
        body["__deepcopy__"] = with_original_class("__deepcopy__")
    try:
        metaclass: Any = type(original)
        has_hook = any("__init_subclass__" in vars(kind) for kind in original.__mro__ if kind not in (object, Generic))
        # _NoSubclassHook is used only if it is needed: if the first base of the class is ABC or Generic, _NoSubclassHook
        # changes the layout, so that Python refuses to change the module's class.
        bases = (_NoSubclassHook, original) if has_hook else (original,)
        _CLASS.__set__(module, metaclass(original.__name__, bases, body))
    except Exception:
        return False  # the program's class or its metaclass does not allow it
    return True


def original_class(module: Any) -> Any:
    """Returns the program's own class of a module, whether or not `subclass` has changed it."""
    kind = type(module)
    while ORIGINAL in vars(kind):
        kind = vars(kind)[ORIGINAL]
    return kind
