"""An index arrives as the same JSON whatever of it went before, and what did not change does not go again."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from spot_core.layout import PartTarget
from spot_core.manifest import Part
from spot_core.store import LocalStore
from spot_core.writer import RawJson, WriteJob
from spot_core.writer.job import encode_index, fields_of
from spot_core.writer.packing import Packer, Unpacker
from spot_core.writer.places import Places
from spot_core.writer.serve import _Server
from spot_core.writer.slab import Slab
from spot_core.writer.wire import Frame, Wire


def job(**index: Any) -> WriteJob:
    return WriteJob(3, PartTarget("blob", "index"), 0, index)


def nodes(count: int, mark: str = "") -> dict[str, Any]:
    return {f"{mark}{i}": {"$": "tensor", "fqn": f"w{i}"} for i in range(count)}


LONG, LIST, OTHER = nodes(500), [i / 3 for i in range(300)], nodes(500, "b")
TENSORS = RawJson(lambda: {"w": 1})
INDEXES: list[dict[str, Any]] = [
    {"tree": {"shared": LONG, "local": {"step": 1}}, "tensors": TENSORS},
    {"tree": {"shared": LONG, "local": {"step": 2}}, "tensors": TENSORS},
    {"tree": {"shared": {"model": LONG, "again": LONG, "groups": [{"lr": 0.1, "of": LIST}]}}, "tensors": TENSORS},
    {"tree": OTHER, "tensors": RawJson(lambda: {"w": 2})},
    {"tree": {"shared": LONG, "local": {}}, "tensors": TENSORS},
    {"tree": {"int keys": {1: LONG}, "tuple": (1, LIST), "none": None, "text": "1", "ä\udc80": [1 << 62, 0.1, True]}},
    {"tree": nodes(500), "tensors": [], "more": {}},
]


@pytest.mark.parametrize("order", [range(7), [0, 3, 0, 3], [5, 2, 6, 6, 1], [4, 4, 4]])
def test_every_index_is_the_same_json_whatever_went_before(order: Sequence[int]) -> None:
    packer, unpacker = Packer(), Unpacker()
    for number in order:
        one = job(**INDEXES[number])
        text = unpacker.take(packer.pack(one))()
        assert text == encode_index(one)
        assert json.loads(text)["rank"] == 3


def test_an_index_is_made_of_what_it_was_packed_from_and_not_of_the_next_one() -> None:
    """It is made by another thread, later."""
    packer, unpacker = Packer(), Unpacker()
    first, second = (unpacker.take(packer.pack(job(tree=tree))) for tree in (LONG, OTHER))
    assert [json.loads(encode())["tree"] for encode in (second, first)] == [OTHER, LONG]


def test_what_did_not_change_goes_once() -> None:
    packer = Packer()
    sizes = [len(packer.pack(job(**INDEXES[number]))) for number in (0, 1, 3, 0, 0)]
    whole = len(encode_index(job(tree=LONG)))
    assert [size > whole / 3 for size in sizes] == [True, False, True, True, False], sizes
    assert max(sizes[1], sizes[4]) < 300


def test_a_tree_of_many_short_branches_is_not_looked_through_to_its_end() -> None:
    """That would hold the interpreter for longer than to pack it."""
    packer, unpacker = Packer(), Unpacker()
    bush = {f"b{i}": {f"c{j}": {"leaf": [j]} for j in range(60)} for i in range(60)}
    sizes = []
    for tree in ([[LONG], bush], [[LONG], bush], [bush, [LONG]], [bush, [LONG]]):
        packed = packer.pack(job(tree=tree))
        assert unpacker.take(packed)() == encode_index(job(tree=tree))
        sizes.append(len(packed))
    once = sizes[0] - sizes[1]
    assert once > 5000, sizes
    assert sizes[3] == sizes[2] > sizes[1] + once / 2, f"behind the bush it goes each time: {sizes}"


def test_neither_end_holds_more_than_the_newest_index() -> None:
    packer, unpacker = Packer(), Unpacker()
    for _ in range(5):
        unpacker.take(packer.pack(job(a=nodes(100), b=nodes(100))))
    assert (len(packer._sent), len(unpacker._pieces)) == (2, 2)


@pytest.mark.parametrize("bad", [object(), b"1", {"deep": [b"1"]}])
def test_after_an_index_that_cannot_be_packed_the_next_one_is_whole(bad: object) -> None:
    packer, unpacker = Packer(), Unpacker()
    with pytest.raises(ValueError):
        packer.pack(job(tree=LONG, bad=bad))
    good = job(tree=LONG)
    assert unpacker.take(packer.pack(good))() == encode_index(good)


def test_an_index_whose_job_is_over_still_brings_what_the_next_one_refers_to(tmp_path: Path) -> None:
    ours, theirs = (Wire(sock) for sock in socket.socketpair())
    server, packer = _Server(theirs), Packer()
    late, good = job(tree=LONG), job(tree=LONG)

    def frame(op: str, payload: bytes = b"", **fields: Any) -> None:
        assert server.handle(Frame(op, fields, payload))

    frame("open", **Places(LocalStore(tmp_path)).to_json())
    frame("index", packer.pack(late), job=1)
    slab = Slab.create(1)
    assert server.handle(Frame("slab", {"capacity": slab.capacity}, b"", os.dup(slab.fd)))
    slab.close()
    frame("write", job=2, **fields_of(good))
    frame("index", packer.pack(good), job=2)
    done = ours.receive()
    assert done is not None
    assert done.op == "done", done
    part = Part.from_json(done.fields["part"])
    assert json.loads(LocalStore(tmp_path).get(part.index.key))["tree"] == LONG
