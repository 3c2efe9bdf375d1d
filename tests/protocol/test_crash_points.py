"""Every operation of a life (resume, claim, save, commit, prune), each with every fault, one at a time.

A first life has run and left two generations; the second meets the fault; a reader checks the invariants; a third life
must come through and clear up. Reproduce one case by its id.

Mutants that these tests were seen to catch: marker before data; marker before the last blob; prune before commit; no
tombstone; tombstone last, after the data; no read-back of a lost reply; only the pointer looked at; pointer before
marker.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from spot_core import GenerationId, Run, TransientStoreError, layout
from spot_core.generation import Committed
from spot_core.store import LocalStore, MemoryStore, Store
from spot_core.testing import CRASH_MODES, CrashingStore, FailingStore, LostReplyStore, SimulatedCrash, StoreWrapper

from ._lives import Witness, check, live, settle


def _prepared(store: Store) -> tuple[Store, Witness]:
    """A store on which one life has run to its end, and one save of it was cut off."""
    witness = Witness()
    live(store, witness)
    opened = Run.open(store).claim().begin(25)
    opened.write(0, {"weights": b"half a save"})
    return store, witness


def _operations(*, prepared: bool) -> list[tuple[str, str]]:
    recorder = StoreWrapper(_prepared(MemoryStore())[0] if prepared else MemoryStore())
    live(recorder, Witness())
    return recorder.operations


FIRST = _operations(prepared=False)
SECOND = _operations(prepared=True)


def _name(index: int, operation: tuple[str, str]) -> str:
    verb, key = operation
    if verb in ("get", "stat", "get_ranges") and key.endswith((".blob", ".index.json")):
        return f"{index}:verify"  # done by several threads: which of them comes at this index is open
    return f"{index}:{verb}:{key}"


def _cases(modes: tuple[str, ...]) -> list[object]:
    return [
        pytest.param(prepared, index, mode, id=f"{'second' if prepared else 'first'}-{_name(index, operation)}-{mode}")
        for prepared, operations in ((False, FIRST), (True, SECOND))
        for index, operation in enumerate(operations)
        for mode in modes
        if mode != "torn" or operation[0] == "put_blob"
    ]


def test_the_enumeration_is_not_vacuous() -> None:
    verbs = {verb for verb, _ in SECOND}
    reading = {"get", "get_ranges", "stat", "list", "list_dirs", "unfinished"}
    assert verbs == reading | {"put_if_absent", "put", "put_blob", "delete"}
    assert len(SECOND) > 100
    assert any(key.startswith("tombstones/") for verb, key in SECOND if verb == "put_if_absent")


@pytest.mark.parametrize(("prepared", "index", "mode"), _cases(CRASH_MODES))
def test_every_crash_point(prepared: bool, index: int, mode: str) -> None:
    store, witness = _prepared(MemoryStore()) if prepared else (MemoryStore(), Witness())
    with pytest.raises(SimulatedCrash):
        live(CrashingStore(store, index, mode), witness)
    check(store, witness)
    settle(store, witness)


@pytest.mark.parametrize(("prepared", "index", "mode"), _cases(("lost", "fails")))
def test_every_lost_reply_and_every_failed_request(prepared: bool, index: int, mode: str) -> None:
    """The process lives on: a lost reply is read back where that can be done, else the save counts as failed."""
    store, witness = _prepared(MemoryStore()) if prepared else (MemoryStore(), Witness())
    before = len(witness.acknowledged)
    operation = (SECOND if prepared else FIRST)[index]
    faulty: StoreWrapper
    if mode == "lost":
        faulty = LostReplyStore(store, {index})
    else:
        faulty = FailingStore(store, lambda i, verb, key: TransientStoreError("unavailable") if i == index else None)
    live(faulty, witness)
    if mode == "lost" and operation[0] == "put_if_absent":
        assert len(witness.acknowledged) == before + 3, "a lost reply of a conditional put was not settled"
    check(store, witness)
    settle(store, witness)


@pytest.mark.parametrize("mode", CRASH_MODES)
def test_crash_points_on_a_real_folder(tmp_path: Path, mode: str) -> None:
    """The same on a file system, every seventh point: fsync makes all of them slow."""
    for index in range(0, len(SECOND), 7):
        store, witness = _prepared(LocalStore(tmp_path / f"{mode}{index}"))
        with pytest.raises(SimulatedCrash):
            live(CrashingStore(store, index, mode), witness)
        check(store, witness)
        settle(store, witness)


def test_the_pointer_moves_last() -> None:
    """It may only ever name what is committed: a pointer to nothing refuses a start at zero."""
    puts = [(verb, key) for verb, key in FIRST if verb in ("put", "put_if_absent", "put_blob")]
    moves = [index for index, operation in enumerate(puts) if operation == ("put", "latest.json")]
    assert len(moves) == 3
    for index in moves:
        assert puts[index - 1][1].endswith("/COMMIT.json")


def test_a_commit_is_told_when_its_marker_is_there() -> None:
    """And not a pointer later: that is a hint."""
    store = MemoryStore()
    opened = Run.open(store).claim().begin(1)
    told: list[tuple[str, bool]] = []

    def durable(committed: Committed) -> None:
        assert [found.id for found in Run.open(store).discover().generations] == [committed.id]
        told.append((committed.id.name, store.stat(layout.POINTER) is not None))

    committed = opened.seal([opened.write(0, {"w": b"x"})], world_size=1).commit({}, durable)
    assert told == [(committed.id.name, False)]
    assert store.stat(layout.POINTER) is not None


def test_two_crashes_in_a_row() -> None:
    """A prune that is cut off, and cut off again while it is being finished."""
    first_prune = next(i for i, (_, key) in enumerate(SECOND) if key.startswith("tombstones/"))
    for one in range(first_prune, first_prune + 12):
        for two in range(0, len(SECOND), 5):
            store, witness = _prepared(MemoryStore())
            with pytest.raises(SimulatedCrash):
                live(CrashingStore(store, one, "after"), witness)
            try:
                live(CrashingStore(store, two, "after"), witness)
            except SimulatedCrash:
                check(store, witness)
            settle(store, witness)


def test_a_life_without_faults() -> None:
    store, witness = _prepared(MemoryStore())
    live(store, witness)
    assert witness.resumed == [None, GenerationId(1, 30)]
    assert witness.lives == [1, 3]
    expected = [(1, 10), (1, 20), (1, 30), (3, 40), (3, 50), (3, 60)]
    assert witness.acknowledged == [GenerationId(life, step) for life, step in expected]
