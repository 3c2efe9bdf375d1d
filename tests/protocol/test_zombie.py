"""A writer of an older life that stalled and wakes up, and two processes that claim at once.

Mutants that these tests were seen to catch: generations ordered by step first; no tombstone; discovery that ignores
tombstones; no look for a tombstone after the marker; no fence check before a commit, or before a prune; no read-back;
a read-back that takes any bytes for one's own; a claim that takes a conflict for its own; a claim that looks at no
generations; a prune that drops generations, or clears orphans, of newer lives; a save in flight taken for an orphan;
step order not checked at the commit; attempts that share a write id.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from spot_core import (
    CommitError,
    Committed,
    Depth,
    FencedError,
    GenerationId,
    Reason,
    Retention,
    Run,
    TransientStoreError,
    Writer,
)
from spot_core.store import MemoryStore, Store
from spot_core.testing import FailingStore, LostReplyStore, SlowStore

from ._lives import WORLD, Witness, check, content, settle


def save(writer: Writer, step: int, witness: Witness) -> Committed:
    opened = writer.begin(step)
    witness.attempted.add(opened.id)
    parts = [opened.write(rank, content(opened.id, rank)) for rank in range(WORLD)]
    committed = opened.seal(parts, world_size=WORLD).commit({})
    witness.acknowledged.append(committed.id)
    return committed


@contextmanager
def stalled(store: Store, step: int, witness: Witness) -> Iterator[tuple[SlowStore, Future[Committed]]]:
    """Life 1 with one commit at step 10, and stuck between the fence check and the marker of `step`."""
    slow = SlowStore(store, lambda verb, key: verb == "put_if_absent" and key.endswith(f"{step:012d}/COMMIT.json"))
    writer = Run.open(slow).claim()
    save(writer, 10, witness)
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(save, writer, step, witness)
        assert slow.reached.wait(30)
        try:
            yield slow, pending
        finally:
            slow.release.set()


def newest(store: Store) -> GenerationId:
    verified = Run.open(store).select(Depth.DIGESTS).verified
    assert verified is not None
    return verified.committed.id


def test_a_stalled_writer_never_outranks_a_newer_life() -> None:
    """It took many more steps than the newer life, and its marker comes last: still the newer life is resumed from."""
    store, witness = MemoryStore(), Witness()
    with stalled(store, 900, witness) as (slow, pending):
        second = Run.open(store).claim()
        save(second, 20, witness)
        slow.release.set()
        assert pending.result(30).id == GenerationId(1, 900)  # it checked before it stalled, so it is not told
        assert newest(store) == GenerationId(2, 20)
        with pytest.raises(FencedError):
            save(slow_writer(slow), 910, witness)
        check(store, witness)
        settle(store, witness)


def slow_writer(store: Store) -> Writer:
    """Life 1 going on, as the process that stalled would."""
    record = Run.open(store).record()
    assert record is not None
    return Writer(Run.open(store), 1, record.run_id)


def test_a_stalled_writer_cannot_take_a_pruned_name() -> None:
    """The newer life has committed and pruned the stalled save as an orphan before its marker comes."""
    store, witness = MemoryStore(), Witness()
    with stalled(store, 900, witness) as (slow, pending):
        second = Run.open(store).claim()
        save(second, 20, witness)
        pruned = second.prune(Retention(keep=1))
        assert pruned.dropped == (GenerationId(1, 10),)
        assert pruned.leftovers == (GenerationId(1, 900),)
        slow.release.set()
        with pytest.raises(FencedError) as caught:
            pending.result(30)
        assert caught.value.reason is Reason.PRUNED
    assert store.stat("generations/000001-000000000900/COMMIT.json") is not None, "the marker did come"
    assert [c.id for c in Run.open(store).discover().generations] == [GenerationId(2, 20)]
    check(store, witness)
    settle(store, witness)
    assert store.stat("generations/000001-000000000900/COMMIT.json") is None
    assert store.stat("tombstones/000001-000000000900") is not None


def test_a_stalled_writer_whose_name_was_committed_and_pruned() -> None:
    """Its marker was put, its reply got lost, the newer life pruned the generation; then the put is tried again."""
    store, witness = MemoryStore(), Witness()
    first = Run.open(store).claim()
    save(first, 10, witness)
    marker = store.get("generations/000001-000000000010/COMMIT.json")
    second = Run.open(store).claim()
    save(second, 20, witness)
    second.prune(Retention(keep=1))
    store.put_if_absent("generations/000001-000000000010/COMMIT.json", marker)
    assert [c.id for c in Run.open(store).discover().generations] == [GenerationId(2, 20)]
    assert newest(store) == GenerationId(2, 20)
    settle(store, witness)


def test_a_zombie_that_commits_before_the_newer_life_is_not_lost() -> None:
    """Between claim and first commit of the newer life the old one's commit is the newest there is: more work, one
    lineage. It is used when the newer life dies early, and outranked when it does not."""
    store, witness = MemoryStore(), Witness()
    with stalled(store, 900, witness) as (slow, pending):
        second = Run.open(store).claim()
        slow.release.set()
        pending.result(30)
        assert newest(store) == GenerationId(1, 900)
        save(second, 20, witness)
        assert newest(store) == GenerationId(2, 20)


def test_a_fenced_writer_may_not_prune() -> None:
    store, witness = MemoryStore(), Witness()
    first = Run.open(store).claim()
    save(first, 10, witness)
    save(first, 20, witness)
    Run.open(store).claim()
    with pytest.raises(FencedError):
        first.prune(Retention(keep=1))
    assert len(Run.open(store).discover().generations) == 2


def test_a_prune_that_stalls_spares_a_newer_life() -> None:
    """Its fence check is old: it must not touch what a newer life wrote meanwhile, committed or in flight."""
    store, witness = MemoryStore(), Witness()
    slow = SlowStore(store, lambda verb, key: verb == "get" and key == "latest.json")
    slow.release.set()
    first = Run.open(slow).claim()
    for step in (10, 20, 30):
        save(first, step, witness)
    slow.release.clear()
    slow.reached.clear()
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(first.prune, Retention(keep=1))
        assert slow.reached.wait(30)
        second = Run.open(store).claim()
        save(second, 40, witness)
        save(second, 45, witness)
        in_flight = second.begin(50)
        part = in_flight.write(0, content(in_flight.id, 0))
        slow.release.set()
        with pytest.raises(FencedError):  # it looks once more before it deletes
            pending.result(30)
    assert [c.id for c in Run.open(store).discover().generations if c.id.life == 2] == [
        GenerationId(2, 45),
        GenerationId(2, 40),
    ]
    assert store.stat(part.index.key) is not None


def test_a_prune_spares_the_save_in_flight_of_its_own_life() -> None:
    """Its data has no marker yet, as an orphan has none; a save that failed before the last commit is one."""
    store, witness = MemoryStore(), Witness()
    writer = Run.open(store).claim()
    failed = writer.begin(5)
    failed.write(0, content(failed.id, 0))
    save(writer, 10, witness)
    in_flight = writer.begin(20)
    parts = [in_flight.write(rank, content(in_flight.id, rank)) for rank in range(WORLD)]
    assert writer.prune(Retention(keep=1)).leftovers == (failed.id,)
    committed = in_flight.seal(parts, world_size=WORLD).commit({})
    assert newest(store) == committed.id == GenerationId(1, 20)


def test_claimants_get_lives_of_their_own() -> None:
    """Eight processes find the same newest life and claim at once."""
    store = MemoryStore()
    Run.open(store).claim()
    together = threading.Barrier(8)

    class Together(SlowStore):
        def put_if_absent(self, key: str, data: bytes) -> None:
            if key == "lives/000002.json":
                together.wait(30)
            super().put_if_absent(key, data)

    with ThreadPoolExecutor(8) as pool:
        writers = list(pool.map(lambda _: Run.open(Together(store, lambda verb, key: False)).claim(), range(8)))
    assert sorted(writer.life for writer in writers) == list(range(2, 10))
    fenced = []
    for writer in writers:
        try:
            writer.check_fence()
        except FencedError:
            fenced.append(writer.life)
    assert sorted(fenced) == list(range(2, 9)), "all but the newest are told to stop"


def test_a_claim_whose_reply_is_lost_is_recognised() -> None:
    store = MemoryStore()
    probe = LostReplyStore(store, {})
    Run.open(probe).claim()
    claim = probe.operations.index(("put_if_absent", "lives/000001.json"))
    fresh = MemoryStore()
    assert Run.open(LostReplyStore(fresh, {claim})).claim().life == 1
    assert [info.key for info in fresh.list("lives/")] == ["lives/000001.json"]


def test_a_lost_life_record_does_not_free_its_number() -> None:
    """The claims were deleted by hand: a reused number would share names with its forebear."""
    store, witness = MemoryStore(), Witness()
    first = Run.open(store).claim()
    save(first, 10, witness)
    store.delete("lives/000001.json")
    assert Run.open(store).claim().life == 2


def test_an_unknown_outcome_is_said_to_be_one_and_may_be_real() -> None:
    """The marker's put fails and reading back fails too; the marker is there. Nothing is lost, and life goes on."""
    store, witness = MemoryStore(), Witness()
    down = threading.Event()

    def fails(index: int, verb: str, key: str) -> Exception | None:
        return TransientStoreError("gone") if down.is_set() and key.endswith("COMMIT.json") else None

    class Late(FailingStore):
        def put_if_absent(self, key: str, data: bytes) -> None:
            if key.endswith("COMMIT.json") and down.is_set():
                self.inner.put_if_absent(key, data)
            super().put_if_absent(key, data)

    writer = Run.open(Late(store, fails)).claim()
    save(writer, 10, witness)
    down.set()
    with pytest.raises(CommitError) as caught:
        save(writer, 20, witness)
    assert caught.value.reason is Reason.UNKNOWN_OUTCOME
    assert newest(store) == GenerationId(1, 20)
    down.clear()
    save(writer, 30, witness)
    check(store, witness)


def test_a_second_attempt_at_a_step_shares_no_key_with_the_first() -> None:
    store, witness = MemoryStore(), Witness()
    writer = Run.open(store).claim()
    first = writer.begin(10)
    part = first.write(0, {"weights": b"first attempt"})
    second = writer.begin(10)
    assert first.target(0) != second.target(0)
    parts = [second.write(rank, content(second.id, rank)) for rank in range(WORLD)]
    with pytest.raises(CommitError, match="written elsewhere"):
        second.seal([part, parts[1]], world_size=WORLD)
    witness.attempted.add(second.id)
    witness.acknowledged.append(second.seal(parts, world_size=WORLD).commit({}).id)
    with pytest.raises(CommitError) as caught:
        first.seal([part], world_size=1).commit({})
    assert caught.value.reason is Reason.STEP_ORDER
    check(store, witness)


def test_steps_of_a_life_only_go_up() -> None:
    """A lower step would be outranked by what the same life committed before."""
    store, witness = MemoryStore(), Witness()
    writer = Run.open(store).claim()
    save(writer, 20, witness)
    for step in (20, 10):
        with pytest.raises(CommitError) as caught:
            writer.begin(step)
        assert caught.value.reason is Reason.STEP_ORDER
    assert writer.newest == GenerationId(1, 20)
