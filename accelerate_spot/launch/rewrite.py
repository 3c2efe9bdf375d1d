"""The epoch loop of an unchanged script, recognised in its source and made one that can be resumed.

Recognised is `for <name with "epoch"> in range(...)` with another `for` inside. It becomes
`for ... in epochs(range(...))`, followed by a call that says it is over, and an `enumerate` over batches inside it
goes on counting at the batch of the epoch where the loop goes on.
"""

from __future__ import annotations

import ast
from typing import Any

EPOCHS, LEFT, NUMBERED = "__spot_epochs__", "__spot_left__", "__spot_numbered__"
"""Names that the rewritten script finds among its globals."""


def rewrite(source: str | bytes, filename: str) -> tuple[ast.Module, list[int]]:
    """The script's syntax tree with its epoch loops rewritten, and their line numbers. Raises SyntaxError."""
    tree = ast.parse(source, filename)
    rewriter = _Rewriter()
    rewriter.visit(tree)
    ast.fix_missing_locations(tree)
    return tree, rewriter.lines


class _Rewriter(ast.NodeTransformer):
    def __init__(self) -> None:
        self.lines: list[int] = []

    def visit_For(self, node: ast.For) -> Any:
        if not _is_epoch_loop(node):
            return self.generic_visit(node)
        self.lines.append(node.lineno)
        _Numbering().visit(node)
        items = ast.copy_location(ast.Call(ast.Name(EPOCHS, ast.Load()), [node.iter], []), node.iter)
        over = ast.copy_location(ast.Expr(ast.Call(ast.Name(LEFT, ast.Load()), [], [])), node)
        node.iter = items
        return [node, over]


class _Numbering(ast.NodeTransformer):
    def visit_For(self, node: ast.For) -> Any:
        self.generic_visit(node)
        for call in ast.walk(node.iter):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "enumerate":
                call.func.id = NUMBERED
        return node


def _is_epoch_loop(node: ast.For) -> bool:
    named = isinstance(node.target, ast.Name) and "epoch" in node.target.id.lower()
    counted = isinstance(node.iter, ast.Call) and isinstance(node.iter.func, ast.Name) and node.iter.func.id == "range"
    nested = any(isinstance(inner, ast.For) for statement in node.body for inner in ast.walk(statement))
    return named and counted and nested
