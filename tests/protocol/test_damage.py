"""Damage at rest: the next older good generation is used and the problem says why; nothing is ever started at zero
because something could not be read.

Mutants that these tests were seen to catch: an error while looking told as a missing marker; unreadable markers that do
not refuse; a fresh start over damage; sizes, chunk digests or the index's digest not compared; the pointer ignored;
damaged generations that count as kept; markers of another run, or of another name, accepted; a foreign folder claimed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from spot_core import (
    AccessError,
    ConfigError,
    Depth,
    FormatError,
    GenerationId,
    ProblemKind,
    Reason,
    Retention,
    Run,
    StoreError,
    TornGenerationError,
    TransientStoreError,
)
from spot_core.store import LocalStore, MemoryStore, Store
from spot_core.testing import FailingStore

from ._lives import Witness, live, resume, settle

OLD, NEW = GenerationId(1, 20), GenerationId(1, 30)
BLOB = "generations/000001-000000000030/a2-r00001.blob"
INDEX = "generations/000001-000000000030/a2-r00001.index.json"
MARKER = "generations/000001-000000000030/COMMIT.json"


@pytest.fixture(params=["memory", "local"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """A run with two generations, of which the newest is going to be damaged."""
    made: Store = MemoryStore() if request.param == "memory" else LocalStore(tmp_path / "run")
    live(made, Witness())
    assert [c.id for c in Run.open(made).discover().generations] == [NEW, OLD]
    return made


def replace(store: Store, key: str, change: Callable[[bytes], bytes]) -> None:
    store.put(key, change(store.get(key)))


def flip(at: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def manifest(change: Callable[[dict[str, object]], None]) -> Callable[[bytes], bytes]:
    def changed(data: bytes) -> bytes:
        value = json.loads(data)
        change(value)
        return json.dumps(value).encode()

    return changed


DAMAGES: dict[str, tuple[Callable[[Store], None], ProblemKind, Depth, str]] = {
    "blob, first bit": (lambda s: replace(s, BLOB, flip(0)), ProblemKind.CORRUPT, Depth.DIGESTS, BLOB),
    "blob, last bit": (
        lambda s: replace(s, BLOB, lambda d: flip(len(d) - 1)(d)),
        ProblemKind.CORRUPT,
        Depth.DIGESTS,
        BLOB,
    ),
    "blob, one byte short": (lambda s: replace(s, BLOB, lambda d: d[:-1]), ProblemKind.TORN, Depth.SIZES, BLOB),
    "blob, one byte more": (lambda s: replace(s, BLOB, lambda d: d + b"x"), ProblemKind.TORN, Depth.SIZES, BLOB),
    "blob, emptied": (lambda s: replace(s, BLOB, lambda d: b""), ProblemKind.TORN, Depth.SIZES, BLOB),
    "blob, deleted": (lambda s: s.delete(BLOB), ProblemKind.TORN, Depth.SIZES, BLOB),
    "index, a bit": (lambda s: replace(s, INDEX, flip(40)), ProblemKind.CORRUPT, Depth.DIGESTS, INDEX),
    "index, deleted": (lambda s: s.delete(INDEX), ProblemKind.TORN, Depth.SIZES, INDEX),
    "marker without any shard": (
        lambda s: [s.delete(i.key) for i in s.list("generations/000001-000000000030/") if i.key != MARKER],
        ProblemKind.TORN,
        Depth.SIZES,
        "missing",
    ),
    "shards without marker": (lambda s: s.delete(MARKER), ProblemKind.ORPHAN, Depth.SIZES, "no marker"),
    "marker, cut": (lambda s: replace(s, MARKER, lambda d: d[: len(d) // 2]), ProblemKind.FORMAT, Depth.SIZES, "JSON"),
    "marker, emptied": (lambda s: replace(s, MARKER, lambda d: b""), ProblemKind.FORMAT, Depth.SIZES, "JSON"),
    "marker, a foreign file": (
        lambda s: replace(s, MARKER, lambda d: b"\x80\x04pickle"),
        ProblemKind.FORMAT,
        Depth.SIZES,
        "JSON",
    ),
    "marker, JSON of something else": (
        lambda s: replace(s, MARKER, lambda d: b'{"format": 1}'),
        ProblemKind.FORMAT,
        Depth.SIZES,
        "field",
    ),
    "marker of a newer release": (
        lambda s: replace(s, MARKER, manifest(lambda v: v.update(format=2))),
        ProblemKind.FORMAT,
        Depth.SIZES,
        "format 2",
    ),
    "marker with an unknown feature": (
        lambda s: replace(s, MARKER, manifest(lambda v: v.update(features=["delta"]))),
        ProblemKind.FORMAT,
        Depth.SIZES,
        "delta",
    ),
    "marker of another generation": (
        lambda s: replace(s, MARKER, manifest(lambda v: v.update(step=31))),
        ProblemKind.MISPLACED,
        Depth.SIZES,
        "step 31",
    ),
    "marker of another run": (
        lambda s: replace(s, MARKER, manifest(lambda v: v.update(run_id="other"))),
        ProblemKind.FOREIGN_RUN,
        Depth.SIZES,
        "other",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_the_next_older_generation_is_used_and_it_is_said_why(store: Store, name: str) -> None:
    damage, kind, depth, told = DAMAGES[name]
    damage(store)
    run = Run.open(store)
    selection = run.select(Depth.DIGESTS)
    assert selection.verified is not None
    assert selection.verified.committed.id == OLD
    (problem,) = selection.problems
    assert problem.kind is kind
    assert problem.generation == NEW
    assert told in problem.message
    assert store.uri in problem.message
    if depth is Depth.SIZES:
        shallow = run.select(Depth.SIZES).verified
        assert shallow is not None
        assert shallow.committed.id == OLD
    assert resume(run) == OLD


def test_a_fallback_goes_on_past_several_damaged_generations(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "run")
    writer = Run.open(store).claim()
    for step in range(1, 6):
        opened = writer.begin(step)
        opened.seal([opened.write(0, {"w": b"%d" % step})], world_size=1).commit({})
    for step in (3, 4, 5):
        replace(store, f"generations/000001-{step:012d}/a{step - 1}-r00000.blob", flip(0))
    selection = Run.open(store).select(Depth.DIGESTS)
    assert selection.verified is not None
    assert selection.verified.committed.id.step == 2
    assert [p.generation.step for p in selection.problems if p.generation] == [5, 4, 3]
    skipping = Run.open(store).select(Depth.DIGESTS, skip={GenerationId(1, 2)})
    assert skipping.verified is not None
    assert skipping.verified.committed.id.step == 1


def test_all_generations_damaged_refuses_to_start_at_zero(store: Store) -> None:
    for info in list(store.list("generations/")):
        if info.key.endswith(".blob"):
            store.delete(info.key)
    with pytest.raises(TornGenerationError) as caught:
        Run.open(store).select(Depth.SIZES)
    assert caught.value.reason is Reason.ALL_DAMAGED
    assert "Nothing was changed" in str(caught.value)


def test_unreadable_markers_only_refuse_to_start_at_zero(store: Store) -> None:
    for gen in (OLD, NEW):
        replace(store, f"generations/{gen}/COMMIT.json", lambda data: b"garbage")
    with pytest.raises(TornGenerationError):
        Run.open(store).select(Depth.MARKER)


def test_generations_that_vanished_refuse_to_start_at_zero(store: Store) -> None:
    """Somebody removed the folder `generations`: the pointer still tells that there was something."""
    for info in list(store.list("generations/")):
        store.delete(info.key)
    with pytest.raises(TornGenerationError, match="removed by something else"):
        Run.open(store).select(Depth.MARKER)


def test_an_interrupted_first_save_is_a_fresh_start(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "run")
    Run.open(store).claim().begin(10).write(0, {"w": b"cut off"})
    selection = Run.open(store).select(Depth.DIGESTS)
    assert selection.verified is None
    assert [p.kind for p in selection.problems] == [ProblemKind.ORPHAN]


def test_things_that_are_not_ours_are_reported_and_left_alone(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "run")
    witness = Witness()
    live(store, witness)
    strangers = ["notes.txt", "generations/epoch=3.ckpt", "generations/last/weights.pt", f"generations/{NEW}/mine.txt"]
    for key in strangers:
        (store.root / key).parent.mkdir(exist_ok=True)
        (store.root / key).write_bytes(b"not ours")
    (store.root / "generations" / "000009-000000009999").mkdir()
    (store.root / "generations" / "000009-000000000001").write_bytes(b"a file by a generation's name")
    selection = Run.open(store).select(Depth.DIGESTS)
    assert selection.verified is not None
    assert selection.verified.committed.id == NEW
    assert {(p.kind, p.where) for p in selection.problems} == {
        (ProblemKind.FOREIGN, "generations/last"),
        (ProblemKind.FOREIGN, "generations/epoch=3.ckpt"),
        (ProblemKind.FOREIGN, "generations/000009-000000000001"),
        (ProblemKind.EMPTY, "generations/000009-000000009999/COMMIT.json"),
    }
    Run.open(store).claim()
    for key in strangers:
        assert (store.root / key).read_bytes() == b"not ours"


def test_an_empty_folder_by_a_generations_name_is_passed_over(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "run")
    live(store, Witness())
    (store.root / "generations" / "000002-000000000040").mkdir()
    selection = Run.open(store).select(Depth.DIGESTS)
    assert selection.verified is not None
    assert selection.verified.committed.id == NEW
    assert [p.kind for p in selection.problems] == [ProblemKind.EMPTY]


@pytest.mark.parametrize("error", [AccessError("permission denied"), StoreError("input/output error")])
def test_one_unreadable_generation_is_passed_over(store: Store, error: StoreError) -> None:
    """Its folder cannot be read, others can."""
    faulty = FailingStore(store, lambda i, verb, key: error if key.startswith(f"generations/{NEW}/") else None)
    selection = Run.open(faulty).select(Depth.DIGESTS)
    assert selection.verified is not None
    assert selection.verified.committed.id == OLD
    (problem,) = selection.problems
    assert problem.kind is ProblemKind.UNREADABLE
    assert str(error) in problem.message


@pytest.mark.parametrize("suffix", [".blob", ".index.json"])
def test_a_generation_with_an_unreadable_shard_is_passed_over(store: Store, suffix: str) -> None:
    denied = AccessError("permission denied")
    faulty = FailingStore(
        store, lambda i, verb, key: denied if key.startswith(f"generations/{NEW}/") and key.endswith(suffix) else None
    )
    selection = Run.open(faulty).select(Depth.DIGESTS)
    assert selection.verified is not None
    assert selection.verified.committed.id == OLD
    assert [p.kind for p in selection.problems] == [ProblemKind.UNREADABLE]


@pytest.mark.parametrize("error", [AccessError("403"), StoreError("EIO"), TransientStoreError("timeout")])
@pytest.mark.parametrize("where", ["spot.json", "latest.json", "generations/", "tombstones/", "/COMMIT.json"])
def test_an_error_while_looking_is_never_no_checkpoint(store: Store, error: StoreError, where: str) -> None:
    faulty = FailingStore(store, lambda i, verb, key: error if key == where or where in key else None)
    with pytest.raises(StoreError) as caught:
        Run.open(faulty).select(Depth.MARKER)
    assert caught.value is error


@pytest.mark.parametrize("error", [AccessError("403"), StoreError("EIO"), TransientStoreError("timeout")])
def test_an_error_of_an_empty_store_is_not_emptiness(error: StoreError) -> None:
    for index in range(4):
        faulty = FailingStore(MemoryStore(), lambda i, verb, key, at=index: error if i == at else None)
        with pytest.raises(StoreError):
            Run.open(faulty).select(Depth.MARKER)
    assert Run.open(MemoryStore()).select(Depth.MARKER).verified is None


def test_a_transient_error_is_no_reason_to_lose_a_generation(store: Store) -> None:
    """Falling back would throw work away for a store that is slow today."""
    timeout = TransientStoreError("timeout")
    faulty = FailingStore(store, lambda i, verb, key: timeout if key == MARKER else None)
    with pytest.raises(TransientStoreError):
        Run.open(faulty).select(Depth.MARKER)


@pytest.mark.parametrize("content", [b"garbage", b"{}", b'{"format": 1, "generation": "../../etc"}', b""])
def test_a_damaged_pointer_is_only_a_hint_less(store: Store, content: bytes) -> None:
    store.put("latest.json", content)
    selection = Run.open(store).select(Depth.DIGESTS)
    assert selection.verified is not None
    assert selection.verified.committed.id == NEW
    assert [p.kind for p in selection.problems] == [ProblemKind.POINTER]


def test_the_pointer_helps_where_a_listing_is_stale(store: Store) -> None:
    """The listing does not show the newest generation yet; the pointer names it, its marker proves it."""

    class Stale(FailingStore):
        def list_dirs(self, prefix: str) -> list[str]:
            return [name for name in super().list_dirs(prefix) if name != NEW.name]

    selection = Run.open(Stale(store, lambda i, verb, key: None)).select(Depth.DIGESTS)
    assert selection.verified is not None
    assert selection.verified.committed.id == NEW


def test_the_pointer_alone_proves_nothing(store: Store) -> None:
    store.put("latest.json", b'{"format": 1, "generation": "000009-000000000001"}')
    selection = Run.open(store).select(Depth.DIGESTS)
    assert selection.verified is not None
    assert selection.verified.committed.id == NEW
    assert [p.kind for p in selection.problems] == [ProblemKind.VANISHED]


def test_damaged_generations_do_not_count_as_kept(store: Store) -> None:
    """keep=2 with the two newest damaged must not drop the only good one."""
    store.delete(BLOB)
    writer = Run.open(store).claim()
    opened = writer.begin(25)
    opened.seal([opened.write(0, {"w": b"x"})], world_size=1).commit({})
    pruned = writer.prune(Retention(keep=2), damaged={NEW})
    assert pruned.dropped == (NEW,)
    assert [c.id for c in Run.open(store).discover().generations] == [GenerationId(2, 25), OLD]


class TestFoldersThatAreNoRun:
    @pytest.mark.parametrize("name", ["epoch=1.ckpt", "lightning_logs/version_0/x", "last.ckpt", ".hidden"])
    def test_a_folder_of_something_else_is_refused(self, tmp_path: Path, name: str) -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"theirs")
        with pytest.raises(ConfigError) as caught:
            Run.open(tmp_path).claim()
        assert caught.value.reason is Reason.NOT_A_RUN
        assert name.split("/")[0] in str(caught.value)
        assert sorted(p.name for p in tmp_path.iterdir()) == [name.split("/")[0]], "nothing was written"

    @pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"format": 1}', b"\x00\x01", b'{"format": "x"}'])
    def test_a_foreign_record_is_refused(self, content: bytes) -> None:
        store = MemoryStore()
        store.put("spot.json", content)
        for act in (lambda run: run.record(), lambda run: run.claim(), lambda run: run.select(Depth.MARKER)):
            with pytest.raises(ConfigError) as caught:
                act(Run.open(store))
            assert caught.value.reason is Reason.NOT_A_RUN
        assert [info.key for info in store.list("")] == ["spot.json"]

    def test_a_run_of_a_newer_release_is_refused(self) -> None:
        store = MemoryStore()
        store.put("spot.json", b'{"format": 7, "run_id": "x", "created": 1.0}')
        with pytest.raises(FormatError, match="Upgrade"):
            Run.open(store).claim()

    def test_a_lost_record_is_made_again_from_the_generations(self, store: Store) -> None:
        before = Run.open(store).record()
        assert before is not None
        store.delete("spot.json")
        selection = Run.open(store).select(Depth.DIGESTS)
        assert selection.verified is not None
        assert selection.verified.committed.id == NEW
        assert Run.open(store).claim().run_id == before.run_id

    def test_a_lost_record_over_two_runs_is_refused(self, store: Store) -> None:
        replace(store, MARKER, manifest(lambda v: v.update(run_id="other")))
        store.delete("spot.json")
        with pytest.raises(ConfigError) as caught:
            Run.open(store).claim()
        assert caught.value.reason is Reason.FOREIGN_RUN

    def test_looking_has_no_effect(self, tmp_path: Path) -> None:
        run = Run.open(tmp_path / "run")
        assert run.record() is None
        assert run.discover().generations == ()
        assert run.select(Depth.DIGESTS).verified is None
        assert not (tmp_path / "run").exists()


def test_the_damaged_run_goes_on(store: Store) -> None:
    """After any of this a new life commits and clears up what may be cleared."""
    witness = Witness(attempted={OLD, NEW}, acknowledged=[OLD])
    store.delete(MARKER)
    settle(store, witness)
