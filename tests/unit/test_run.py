"""The write side and the read side as types: what each refuses, and that nobody else makes them."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from spot_core import (
    CommitError,
    ConfigError,
    CorruptShardError,
    Depth,
    GenerationId,
    Part,
    Reason,
    Run,
    SaveError,
    StoreError,
    TornGenerationError,
    Writer,
)
from spot_core.digest import CHUNK_SIZE
from spot_core.parts import ALIGNMENT
from spot_core.store import LocalStore, MemoryStore, Store
from spot_core.testing import FailingStore, FakeClock
from tests.architecture._sources import all_modules

BIG = bytes(range(256)) * (2 * CHUNK_SIZE // 256 + 1)


@pytest.fixture
def store() -> Store:
    return MemoryStore()


@pytest.fixture
def writer(store: Store) -> Writer:
    return Run.open(store, clock=FakeClock(1000.0)).claim(info={"host": "a"})


def test_only_their_own_modules_make_the_states() -> None:
    """A `Committed` comes from a commit or a marker, a `Written` from `seal`, a `Verified` from `verify`; and, on the
    other ranks of a world, from what rank 0 tells of them."""
    makers = {
        "Open": {"spot_core.run"},
        "Written": {"spot_core.generation"},
        "Committed": {"spot_core.generation", "spot_core.restore", "spot_core.pytorch.outcome"},
        "Verified": {"spot_core.verify", "spot_core.pytorch.resuming"},
        "Writer": {"spot_core.run"},
    }
    wrong = []
    for module in all_modules():
        for node in ast.walk(module.tree):
            made = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
            if module.name not in makers.get(made, {module.name}):
                wrong.append(f"{module.where}:{node.lineno} makes a {made}")
    assert wrong == []


def test_a_claim_makes_the_run_and_the_life(store: Store, writer: Writer) -> None:
    assert writer.life == 1
    assert [info.key for info in store.list("")] == ["lives/000001.json", "spot.json"]
    claim = json.loads(store.get("lives/000001.json"))
    assert (claim["format"], claim["life"], claim["created"], claim["info"]) == (1, 1, 1000.0, {"host": "a"})
    assert len(claim["nonce"]) == 32
    record = json.loads(store.get("spot.json"))
    assert set(record) == {"format", "features", "run_id", "created"}
    assert record["run_id"] == writer.run_id
    assert Run.open(store).claim().run_id == writer.run_id


def test_a_save_makes_these_objects(store: Store, writer: Writer) -> None:
    opened = writer.begin(7)
    part = opened.write(0, {"a": b"12345", "b": b"", "c": b"678"})
    committed = opened.seal([part], world_size=1).commit({"reason": "interval"})
    names = [info.key for info in store.list("generations/")]
    prefix = "generations/000001-000000000007"
    assert names == [f"{prefix}/COMMIT.json", f"{prefix}/a0-r00000.blob", f"{prefix}/a0-r00000.index.json"]
    index = json.loads(store.get(f"{prefix}/a0-r00000.index.json"))
    assert index["objects"] == {"a": [0, 5], "b": [64, 0], "c": [64, 3]}
    assert ALIGNMENT == 64
    assert json.loads(store.get("latest.json")) == {"format": 1, "generation": "000001-000000000007"}
    assert committed.manifest.created == 1000.0
    assert committed.manifest.meta == {"reason": "interval"}
    (found,) = Run.open(store).discover().generations
    assert found == committed


def test_reading_back_checks_chunks(store: Store, writer: Writer) -> None:
    objects = {"small": b"x", "big": BIG, "after": b"end", "empty": b""}
    opened = writer.begin(1)
    committed = opened.seal([opened.write(0, objects)], world_size=1).commit({})
    verified = Run.open(store).verify(committed, Depth.DIGESTS)
    assert verified.names() == ["after", "big", "empty", "small"]
    assert {name: verified.read(name) for name in objects} == objects
    assert verified.depth is Depth.DIGESTS
    with pytest.raises(KeyError):
        verified.read("nothing")
    with pytest.raises(KeyError):
        verified.read("small", rank=1)
    (part,) = committed.manifest.parts
    assert part.blob is not None
    data = bytearray(store.get(part.blob.key))
    data[CHUNK_SIZE + 5] ^= 1
    store.put(part.blob.key, bytes(data))
    assert verified.read("small") == b"x", "only the chunks that are needed are read"
    with pytest.raises(CorruptShardError, match=rf"bytes {CHUNK_SIZE} to {2 * CHUNK_SIZE} of"):
        verified.read("big")
    store.put(part.blob.key, bytes(data[:CHUNK_SIZE]))
    with pytest.raises(TornGenerationError):
        verified.read("after")
    store.delete(part.blob.key)
    with pytest.raises(TornGenerationError, match="is missing"):
        verified.read("small")


def test_a_rank_may_have_no_blob(store: Store, writer: Writer) -> None:
    """A rank whose tensors are all replicated elsewhere."""
    opened = writer.begin(1)
    full = opened.write(0, {"w": b"1"})
    bare = opened.write(1, {})
    assert bare.blob is not None
    store.delete(bare.blob.key)
    committed = opened.seal([Part(1, None, bare.index), full], world_size=2).commit({})
    verified = Run.open(store).verify(committed, Depth.DIGESTS)
    assert verified.names(1) == []
    assert [part.rank for part in committed.manifest.parts] == [0, 1]


def test_seal_names_the_missing_ranks(writer: Writer) -> None:
    opened = writer.begin(1)
    parts = [opened.write(rank, {"w": b"1"}) for rank in (0, 2)]
    with pytest.raises(SaveError, match=r"ranks \[1, 3\] of 4") as caught:
        opened.seal(parts, world_size=4)
    assert caught.value.reason is Reason.MISSING_RANKS
    for wrong, world in (([parts[0], parts[0]], 1), (parts, 1)):
        with pytest.raises(SaveError):
            opened.seal(wrong, world_size=world)


def test_seal_refuses_parts_of_another_generation(writer: Writer) -> None:
    other = writer.begin(1).write(0, {"w": b"1"})
    with pytest.raises(SaveError, match="written elsewhere"):
        writer.begin(2).seal([other], world_size=1)


def test_a_write_that_fails_says_what_is_safe(store: Store) -> None:
    run = Run.open(FailingStore(store, lambda i, verb, key: StoreError("EIO") if verb == "put_blob" else None))
    with pytest.raises(SaveError, match=r"Rank 0 .* 000001-000000000001 .* EIO Earlier generations are whole"):
        run.claim().begin(1).write(0, {"w": b"1"})


def test_meta_must_be_json(store: Store, writer: Writer) -> None:
    opened = writer.begin(1)
    written = opened.seal([opened.write(0, {"w": b"1"})], world_size=1)
    with pytest.raises(CommitError, match="not JSON"):
        written.commit({"model": object()})  # type: ignore[dict-item]
    assert Run.open(store).discover().generations == ()
    assert written.commit({"loss": float("nan")}).id == GenerationId(1, 1), "a NaN must not cost a generation"


def test_a_pointer_that_cannot_be_moved_does_not_undo_a_commit(store: Store) -> None:
    faulty = FailingStore(store, lambda i, verb, key: StoreError("EIO") if verb == "put" else None)
    opened = Run.open(faulty).claim().begin(1)
    committed = opened.seal([opened.write(0, {"w": b"1"})], world_size=1).commit({})
    assert Run.open(store).discover().generations == (committed,)


def test_depths(store: Store, writer: Writer) -> None:
    opened = writer.begin(1)
    committed = opened.seal([opened.write(0, {"w": b"1" * 100})], world_size=1).commit({})
    (part,) = committed.manifest.parts
    assert part.blob is not None
    store.put(part.blob.key, b"2" * part.blob.size)
    run = Run.open(store)
    run.verify(committed, Depth.MARKER)
    run.verify(committed, Depth.SIZES)
    with pytest.raises(CorruptShardError):
        run.verify(committed, Depth.DIGESTS)
    store.delete(part.blob.key)
    run.verify(committed, Depth.MARKER)
    with pytest.raises(TornGenerationError):
        run.verify(committed, Depth.SIZES)


def test_the_manifest_and_the_index_must_agree_on_the_blob(store: Store, writer: Writer) -> None:
    opened = writer.begin(1)
    committed = opened.seal([opened.write(0, {"w": b"1"})], world_size=1).commit({})
    key = "generations/000001-000000000001/COMMIT.json"
    value = json.loads(store.get(key))
    value["parts"][0]["blob"]["digest"] = "xxh3_128-tree:" + "0" * 32
    store.put(key, json.dumps(value).encode())
    (found,) = Run.open(store).discover().generations
    assert found != committed
    with pytest.raises(CorruptShardError, match="chunk digests"):
        Run.open(store).verify(found, Depth.DIGESTS)


def test_two_starters_agree_on_the_run(store: Store) -> None:
    """Both find no record; one's record stands, the other adopts it."""

    class Blind(FailingStore):
        def get(self, key: str) -> bytes:
            if key == "spot.json" and self.operations.count(("get", key)) == 0:
                self.inner.put_if_absent(key, b'{"format": 1, "run_id": "theirs", "created": 1.0}')
                self.operations.append(("get", key))
                from spot_core import KeyMissingError

                raise KeyMissingError("not yet")
            return super().get(key)

    assert Run.open(Blind(store, lambda i, verb, key: None)).claim().run_id == "theirs"


def test_reprs_are_short(tmp_path: Path) -> None:
    run = Run.open(tmp_path)
    assert repr(run) == f"Run({str(tmp_path)!r})"
    assert repr(run.claim()) == f"Writer({str(tmp_path)!r}, life=1)"
    assert repr(LocalStore(tmp_path)) == f"LocalStore({str(tmp_path)!r})"


def test_a_number_is_no_run() -> None:
    with pytest.raises(ConfigError, match="not by int"):
        Run.open(3)  # type: ignore[arg-type]
