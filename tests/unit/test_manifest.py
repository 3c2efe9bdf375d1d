"""The marker's JSON is a stored format."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from spot_core.errors import FormatError
from spot_core.layout import GenerationId
from spot_core.manifest import Manifest, ObjectRef, Part

MANIFEST = Manifest(
    run_id="8f3a",
    life=3,
    step=1200,
    write_id="a4",
    created=1_700_000_000.5,
    world_size=2,
    parts=(
        Part(
            0,
            ObjectRef("g/a4-r00000.blob", 8192, "xxh3_128-tree:ab"),
            ObjectRef("g/a4-r00000.index.json", 99, "xxh3_128:cd"),
        ),
        Part(1, None, ObjectRef("g/a4-r00001.index.json", 9, "xxh3_128:ef")),
    ),
    meta={"reason": "interval", "versions": {"torch": "2.13.0"}, "finished": False, "loss": None},
)

# Written by format 1; never to be changed, only added to.
GOLDEN = {
    "format": 1,
    "features": [],
    "run_id": "8f3a",
    "life": 3,
    "step": 1200,
    "write_id": "a4",
    "created": 1_700_000_000.5,
    "world_size": 2,
    "parts": [
        {
            "rank": 0,
            "blob": {"key": "g/a4-r00000.blob", "size": 8192, "digest": "xxh3_128-tree:ab"},
            "index": {"key": "g/a4-r00000.index.json", "size": 99, "digest": "xxh3_128:cd"},
        },
        {"rank": 1, "blob": None, "index": {"key": "g/a4-r00001.index.json", "size": 9, "digest": "xxh3_128:ef"}},
    ],
    "meta": {"reason": "interval", "versions": {"torch": "2.13.0"}, "finished": False, "loss": None},
}


def test_the_format_is_pinned() -> None:
    assert json.loads(MANIFEST.to_bytes()) == GOLDEN
    assert Manifest.from_bytes(json.dumps(GOLDEN).encode()) == MANIFEST


def test_base_blobs_are_a_feature_that_older_releases_refuse() -> None:
    own, old = (
        ObjectRef("generations/000003-000000001200/a4-r00000.base.blob", 10, "d"),
        ObjectRef("generations/000001-000000000007/a0-r00000.base.blob", 1000, "e"),
    )
    first, second = MANIFEST.parts
    manifest = replace(MANIFEST, parts=(replace(first, bases=(own, old)), replace(second, bases=(old,))))
    value = json.loads(manifest.to_bytes())
    assert value["features"] == ["bases"]
    assert value["parts"][1]["bases"] == [
        {"key": "generations/000001-000000000007/a0-r00000.base.blob", "size": 1000, "digest": "e"}
    ]
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest
    assert manifest.bases == (own, old)
    assert manifest.referred == (old,)
    assert [ref.size for ref in manifest.objects] == [8192, 99, 10, 1000, 9]
    assert (manifest.size, manifest.own_size) == (9310, 8310)


def test_equal_manifests_are_equal_bytes() -> None:
    """A lost reply is told from another's marker by comparing bytes."""
    again = Manifest.from_bytes(MANIFEST.to_bytes())
    assert again.to_bytes() == MANIFEST.to_bytes()


def test_what_it_says_of_itself() -> None:
    assert MANIFEST.id == GenerationId(3, 1200)
    assert MANIFEST.size == 8192 + 99 + 9
    assert [ref.size for ref in MANIFEST.objects] == [8192, 99, 9]
    assert not MANIFEST.finished
    assert Manifest.from_bytes(json.dumps({**GOLDEN, "meta": {"finished": True}}).encode()).finished


def test_unknown_fields_are_ignored_and_unknown_features_are_not() -> None:
    assert Manifest.from_bytes(json.dumps({**GOLDEN, "later": 1}).encode()) == MANIFEST
    with pytest.raises(FormatError, match=r"delta.*Upgrade"):
        Manifest.from_bytes(json.dumps({**GOLDEN, "features": ["delta"]}).encode())


@pytest.mark.parametrize("number", [2, 99])
def test_a_newer_format_is_refused(number: int) -> None:
    with pytest.raises(FormatError, match=f"format {number}.*Upgrade"):
        Manifest.from_bytes(json.dumps({**GOLDEN, "format": number}).encode())


@pytest.mark.parametrize(
    "change",
    [
        {"format": None},
        {"format": 0},
        {"format": True},
        {"format": "1"},
        {"features": "delta"},
        {"run_id": None},
        {"life": -1},
        {"life": "3"},
        {"step": 1.5},
        {"created": "yesterday"},
        {"parts": None},
        {"parts": [1]},
        {"parts": [{"rank": 0}]},
        {"parts": [{"rank": 0, "blob": {}, "index": {}}]},
        {"meta": []},
    ],
)
def test_garbled_manifests_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(FormatError):
        Manifest.from_bytes(json.dumps({**GOLDEN, **change}).encode())


@pytest.mark.parametrize("field", [name for name in GOLDEN if name != "features"])
def test_missing_fields_are_refused(field: str) -> None:
    with pytest.raises(FormatError):
        Manifest.from_bytes(json.dumps({k: v for k, v in GOLDEN.items() if k != field}).encode())


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'"x"'])
def test_what_is_no_manifest_is_refused(data: bytes) -> None:
    with pytest.raises(FormatError):
        Manifest.from_bytes(data)
