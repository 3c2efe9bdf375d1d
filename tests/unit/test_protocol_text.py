"""PROTOCOL.md names the test that holds each invariant: those tests must exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
TEXT = (TESTS.parent / "spot_core" / "PROTOCOL.md").read_text(encoding="utf-8")


def test_every_test_that_the_protocol_names_exists() -> None:
    defined: dict[str, set[str]] = {}
    for path in TESTS.rglob("*.py"):
        names = {
            node.name
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, (ast.FunctionDef, ast.ClassDef))
        }
        defined[str(path.relative_to(TESTS))] = names
    named = re.findall(r"\*((?:[a-z_]+/)?(?:_?[a-z_]+\.py)?(?:::)?(?:\w+)?)\*", TEXT)
    wrong = []
    checked = 0
    for reference in named:
        file, _, name = reference.rpartition("::")
        if not file and reference.endswith(".py"):
            file, name = reference, ""
        if file:
            wrong += [] if file in defined and (not name or name in defined[file]) else [reference]
            checked += 1
        elif name.startswith("test_"):
            wrong += [] if any(name in names for names in defined.values()) else [reference]
            checked += 1
    assert wrong == []
    assert checked > 30


def test_every_invariant_names_a_test() -> None:
    tiers = re.findall(r"^\| (T\d+) \|.*\| (.*) \|$", TEXT, flags=re.MULTILINE)
    assert [number for number, _ in tiers] == [f"T{n}" for n in range(1, 12)]
    assert all("*" in held_by for _, held_by in tiers)
    rows = re.findall(r"^\| (I\d+) \|.*\| (.*) \|$", TEXT, flags=re.MULTILINE)
    assert [number for number, _ in rows] == [f"I{n}" for n in range(1, len(rows) + 1)]
    assert len(rows) >= 14
    assert all("*" in held_by for _, held_by in rows)
