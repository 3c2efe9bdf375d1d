"""The flag's way into an unchanged script: patches put on accelerate and transformers when they are imported.

Nothing happens before `install`, and then nothing but at the import of two modules:
``accelerate.accelerator`` (every `Accelerator` made from then on is attached to the run) and ``transformers.trainer``
(handed to `accelerate_spot.trainer.patch`). A class is patched in place, not replaced, so it does not matter who
imported what before.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType
from typing import Any

__all__ = ["install", "left_alone"]

_alone: ContextVar[bool] = ContextVar("accelerate_spot_left_alone", default=False)


@contextmanager
def left_alone() -> Iterator[None]:
    """An `Accelerator` made inside is nobody's concern: whoever makes it drives the run by another way.

    For a Trainer's own accelerator, and for one that is attached by hand.
    """
    token = _alone.set(True)
    try:
        yield
    finally:
        _alone.reset(token)


def install() -> None:
    """Patch the two modules, now if they are imported, else when they are. Idempotent."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    for name, patch in _PATCHES.items():
        if name in sys.modules:
            patch(sys.modules[name])
    sys.meta_path.insert(0, _Finder())


def patch_accelerator(module: ModuleType) -> None:
    """`module`: ``accelerate.accelerator``. Idempotent."""
    cls = module.Accelerator
    if hasattr(cls.__init__, "__wrapped_by_spot__"):
        return
    original = cls.__init__

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if not _alone.get():
            from accelerate_spot.attaching import attach  # only now: it needs accelerate imported

            attach(self)

    __init__.__wrapped_by_spot__ = True  # type: ignore[attr-defined]
    cls.__init__ = __init__


def patch_trainer(module: ModuleType) -> None:
    """`module`: ``transformers.trainer``."""
    if importlib.util.find_spec("accelerate_spot.trainer") is not None:
        importlib.import_module("accelerate_spot.trainer").patch(module)


_PATCHES: dict[str, Callable[[ModuleType], None]] = {
    "accelerate.accelerator": patch_accelerator,
    "transformers.trainer": patch_trainer,
}


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the two modules as the other finders do, and lets the patch follow the module's own code."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        patch = _PATCHES.get(fullname)
        if patch is None:
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec = None if find is None else find(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, patch)
                return spec
        return None


class _Loader(importlib.abc.Loader):
    def __init__(self, inner: Any, patch: Callable[[ModuleType], None]) -> None:
        self._inner, self._patch = inner, patch

    def __getattr__(self, name: str) -> Any:  # get_source and the like
        if name in ("_inner", "_patch"):
            raise AttributeError(name)
        return getattr(self._inner, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._inner.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        self._patch(module)
