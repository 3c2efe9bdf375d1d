"""Key strings are a stored format: runs written today must be found by every later release."""

from __future__ import annotations

import ast

import pytest

from spot_core import layout
from spot_core.layout import GenerationId, PartTarget
from tests.architecture._sources import all_modules

GEN = GenerationId(3, 1200)


def test_every_key_is_pinned() -> None:
    assert layout.RUN_RECORD == "spot.json"
    assert layout.POINTER == "latest.json"
    assert layout.GENERATIONS == "generations/"
    assert layout.LIVES == "lives/"
    assert layout.TOMBSTONES == "tombstones/"
    assert layout.STOPS == "stops/"
    assert layout.PROBES == "probes/"
    assert layout.probe_key("ab", "a") == "probes/ab-a"
    assert layout.life_key(3) == "lives/000003.json"
    assert layout.stop_key(3) == "stops/000003.json"
    assert layout.generation_prefix(GEN) == "generations/000003-000000001200/"
    assert layout.marker_key(GEN) == "generations/000003-000000001200/COMMIT.json"
    assert layout.tombstone_key(GEN) == "tombstones/000003-000000001200"
    assert layout.part_target(GEN, "a0", 7) == PartTarget(
        blob_key="generations/000003-000000001200/a0-r00007.blob",
        index_key="generations/000003-000000001200/a0-r00007.index.json",
    )
    assert layout.part_target(GEN, "a0", 7).base_key == "generations/000003-000000001200/a0-r00007.base.blob"
    assert layout.base_key("x/a0-r00007.blob") == "x/a0-r00007.base.blob"
    assert {"spot.json", "latest.json", "generations", "lives", "tombstones", "stops", "probes"} == layout.KNOWN_NAMES


def test_keys_are_told_apart() -> None:
    target = layout.part_target(GEN, "a0", 7)
    assert [layout.is_base(key) for key in (target.base_key, target.blob_key, target.index_key)] == [True, False, False]
    assert layout.generation_of(target.base_key) == layout.generation_of(layout.marker_key(GEN)) == GEN
    others = ("generations/", "generations/x/a.blob", "tombstones/000003-000000001200", "spot.json")
    assert [layout.generation_of(key) for key in others] == [None] * len(others)


def test_only_layout_spells_keys() -> None:
    """No other module holds a string that is, or begins like, a key."""
    words = (
        "spot.json",
        "latest.json",
        "COMMIT.json",
        "generations/",
        "lives/",
        "tombstones/",
        "stops/",
        "probes/",
        ".index.json",
    )
    wrong = []
    for module in all_modules():
        if module.name == "spot_core.layout":
            continue
        docs = {
            node.body[0].value
            for node in ast.walk(module.tree)
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
            and node.body
            and isinstance(node.body[0], ast.Expr)
        }
        for node in ast.walk(module.tree):
            text = node.value if isinstance(node, ast.Constant) and node not in docs else None
            if isinstance(text, str) and text.startswith(words):
                wrong.append(f"{module.where}:{node.lineno} {text!r}")
    assert wrong == []


def test_names_and_ids_are_one_to_one() -> None:
    for gen in (GEN, GenerationId(1, 0), GenerationId(1_234_567, 1_234_567_890_123)):
        assert GenerationId.parse(gen.name) == gen
    assert str(GEN) == GEN.name == "000003-000000001200"


@pytest.mark.parametrize(
    "name",
    [
        "",
        "last",
        "3-1200",
        "0000003-000000001200",  # a second spelling of a known id
        "000003-0000000001200",
        "000000-000000001200",
        "000003-000000001200 ",
        "000003-000000001200/",
        "000003_000000001200",
        "00000٣-000000001200",
        "-000003-000000001200",
    ],
)
def test_other_names_are_no_generation(name: str) -> None:
    assert GenerationId.parse(name) is None


def test_life_outranks_step() -> None:
    assert GenerationId(2, 5) > GenerationId(1, 900)
    assert sorted([GenerationId(2, 5), GenerationId(1, 900), GenerationId(2, 4)]) == [
        GenerationId(1, 900),
        GenerationId(2, 4),
        GenerationId(2, 5),
    ]


def test_lives_are_read_from_keys() -> None:
    assert layout.life_of("lives/000012.json") == 12
    assert layout.life_of("stops/1234567.json") == 1_234_567
    for key in ("lives/.tmp-ab", "lives/12.json", "lives/000012.txt", "other/000012.json", "lives/000012.json/x"):
        assert layout.life_of(key) is None


@pytest.mark.parametrize(("life", "step"), [(0, 1), (-1, 1), (1, -1)])
def test_impossible_ids_are_refused(life: int, step: int) -> None:
    with pytest.raises(ValueError, match="counts from"):
        GenerationId(life, step)


@pytest.mark.parametrize(("write_id", "rank"), [("", 0), ("A0", 0), ("a/0", 0), ("a-0", 0), ("a0", -1)])
def test_impossible_targets_are_refused(write_id: str, rank: int) -> None:
    with pytest.raises(ValueError, match=r"write id|rank"):
        layout.part_target(GEN, write_id, rank)
