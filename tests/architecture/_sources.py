"""What the rules of the house are checked on: the project's own modules, read as syntax trees, never imported."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("spot_core", "lightning_spot", "accelerate_spot")


@dataclass(frozen=True)
class Module:
    name: str
    path: Path
    tree: ast.Module

    @property
    def where(self) -> str:
        return str(self.path.relative_to(ROOT))


@dataclass(frozen=True)
class Import:
    """One imported module: ``from a.b import c`` gives module ``a.b`` and names ``("c",)``."""

    module: str
    names: tuple[str, ...]
    line: int
    deferred: bool  # inside a function, or only for the type checker: not run when the module is imported

    @property
    def top(self) -> str:
        return self.module.partition(".")[0]


@functools.cache
def modules(package: str) -> tuple[Module, ...]:
    found = []
    for path in sorted((ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found.append(Module(name, path, ast.parse(path.read_text(encoding="utf-8"), filename=str(path))))
    return tuple(found)


def all_modules() -> tuple[Module, ...]:
    return tuple(module for package in PACKAGES for module in modules(package))


def in_torch_part(module: Module) -> bool:
    return module.name == "spot_core.pytorch" or module.name.startswith("spot_core.pytorch.")


def core_modules() -> tuple[Module, ...]:
    """The part of the core that works without torch."""
    return tuple(module for module in modules("spot_core") if not in_torch_part(module))


def imports(module: Module) -> list[Import]:
    """Absolute imports of a module (relative ones stay inside the package)."""
    return list(_imports(module.tree, deferred=False))


def _imports(node: ast.AST, *, deferred: bool) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield Import(alias.name, (), node.lineno, deferred)
    elif isinstance(node, ast.ImportFrom):
        if node.level == 0 and node.module:
            yield Import(node.module, tuple(alias.name for alias in node.names), node.lineno, deferred)
    else:
        deferred = deferred or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            for child in node.body:
                yield from _imports(child, deferred=True)
            for child in node.orelse:
                yield from _imports(child, deferred=deferred)
            return
        for child in ast.iter_child_nodes(node):
            yield from _imports(child, deferred=deferred)
