"""Names: nothing shadows another module, and other people's private names stay where they are listed."""

from __future__ import annotations

import ast
import re
import sys
from importlib import metadata

import pytest

from ._sources import ROOT, Module, all_modules, imports

PRIVATE_ALLOWED = {"_compat.py", "_compat_metrics.py", "_private.py"}
# The standard library documents these, in spite of their underscore.
DOCUMENTED = {"os._exit", "sys._getframe", "sys._current_frames"}


def _dependencies() -> set[str]:
    """Import names of everything that the project's extras ask for."""
    asked = {re.split(r"[^A-Za-z0-9_.-]", line, maxsplit=1)[0] for line in metadata.requires("lightning-spot") or []}
    wanted = {re.sub(r"[-_.]+", "-", name).lower() for name in asked} - {"lightning-spot"}
    return {
        module
        for module, distributions in metadata.packages_distributions().items()
        if any(re.sub(r"[-_.]+", "-", name).lower() in wanted for name in distributions)
    } | {"torch", "numpy", "lightning", "pytorch_lightning", "accelerate", "fsspec", "s3fs", "gcsfs"}


def test_no_module_is_named_after_the_standard_library_or_a_dependency() -> None:
    """A script started beside such a file would import it in place of the real one."""
    taken = set(sys.stdlib_module_names) | _dependencies()
    wrong = []
    for module in all_modules():
        parts = module.name.split(".")[1:]
        wrong += [module.where for part in parts if part in taken and part != "__main__"]
    assert wrong == []


def test_examples_shadow_nothing() -> None:
    taken = set(sys.stdlib_module_names) | _dependencies()
    wrong = [str(path.relative_to(ROOT)) for path in (ROOT / "examples").rglob("*.py") if path.stem in taken]
    assert wrong == []


def _own_private_names() -> set[str]:
    """Every private name that the project itself defines: attributes, functions, classes, variables, parameters."""
    own: set[str] = set()
    for module in all_modules():
        own |= {part for part in module.name.split(".") if part.startswith("_")}
        for node in ast.walk(module.tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                own.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                own.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
                own.add(node.attr)
    return own


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def _private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def _foreign_private_names(module: Module, own: set[str]) -> list[str]:
    found = []
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and _private(node.attr) and not _is_self(node.value):
            if node.attr not in own and ast.unparse(node) not in DOCUMENTED:
                found.append(f"{module.where}:{node.lineno} uses {ast.unparse(node)}")
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("getattr", "hasattr", "setattr", "delattr")
            and len(node.args) > 1
            and isinstance(node.args[1], ast.Constant)
            and isinstance(node.args[1].value, str)
            and _private(node.args[1].value)
            and node.args[1].value not in own
        ):
            found.append(f"{module.where}:{node.lineno} uses {ast.unparse(node)}")
    for item in imports(module):
        if item.top in ("spot_core", "lightning_spot", "accelerate_spot"):
            continue
        parts = [*item.module.split("."), *item.names]
        if any(_private(part) for part in parts):
            found.append(f"{module.where}:{item.line} imports {'.'.join(parts)}")
    return found


@pytest.mark.parametrize("package", ["spot_core", "lightning_spot", "accelerate_spot"])
def test_foreign_private_names_stay_in_their_one_file(package: str) -> None:
    """Other people's private names change without notice; one file per package lists them, each with a test."""
    own = _own_private_names()
    wrong = [
        line
        for module in all_modules()
        if module.name.split(".")[0] == package and module.path.name not in PRIVATE_ALLOWED
        for line in _foreign_private_names(module, own)
    ]
    assert wrong == []


def test_framework_versions_are_read_in_compat_only() -> None:
    """`lightning.__version__` in a second place would let two files disagree on what is supported."""
    wrong = [
        f"{module.where}:{node.lineno}"
        for module in all_modules()
        if module.name.split(".")[0] != "spot_core" and module.path.name != "_compat.py"
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Attribute) and node.attr == "__version__"
    ]
    assert wrong == []
