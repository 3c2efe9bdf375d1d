"""The public surface is what `__all__` of the listed modules says, and it is frozen in public_api.txt.

A name that appears or goes is a decision: `python tests/architecture/test_public_api.py` writes the file anew, and
the change shows in the review.
"""

from __future__ import annotations

import importlib
import types
from pathlib import Path

import pytest

from spot_core import errors
from spot_core.errors import SpotError

FROZEN = Path(__file__).with_name("public_api.txt")
PUBLIC_MODULES = (
    "spot_core",
    "spot_core.errors",
    "spot_core.interval",
    "spot_core.store",
    "spot_core.signals",
    "spot_core.pytorch",
    "spot_core.testing",
    "lightning_spot",
    "accelerate_spot",
)


def _surface() -> list[str]:
    lines = []
    for name in PUBLIC_MODULES:
        module = importlib.import_module(name)
        lines += [f"{name}.{public}" for public in sorted(getattr(module, "__all__", ()))]
    return lines


def test_public_surface_is_frozen() -> None:
    assert _surface() == FROZEN.read_text().splitlines()


@pytest.mark.parametrize("name", PUBLIC_MODULES)
def test_public_names_exist_and_say_what_they_are(name: str) -> None:
    module = importlib.import_module(name)
    for public in getattr(module, "__all__", ()):
        value = getattr(module, public)
        if isinstance(value, type) and issubclass(value, SpotError):
            assert public in (errors.__doc__ or ""), f"{public} is not in the tree that spot_core.errors begins with"
        elif isinstance(value, (type, types.FunctionType)):
            assert value.__doc__, f"{name}.{public} has no docstring"


if __name__ == "__main__":
    FROZEN.write_text("".join(f"{line}\n" for line in _surface()))
