"""Generations that refer to blobs of older ones: no generation that is kept ever loses anything.

Mutants that these tests were seen to catch: see at each test.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spot_core import (
    CommitError,
    Committed,
    CorruptShardError,
    Depth,
    FencedError,
    GenerationId,
    Retention,
    Run,
    SaveError,
    TornGenerationError,
    TransientStoreError,
    Writer,
    Written,
    layout,
)
from spot_core.cli.prune import prune as spot_prune
from spot_core.prune import bury, prune
from spot_core.store import LocalStore, MemoryStore, Store
from spot_core.testing import (
    CRASH_MODES,
    CrashingStore,
    FailingStore,
    LostReplyStore,
    SimulatedCrash,
    SlowStore,
    StoreWrapper,
)

from ._lives import WORLD, Witness, check, content, frozen, live, settle, write


def prepared(store: Store) -> tuple[Store, Witness]:
    """A store on which one life has run to its end, and one save of it, that refers, was cut off."""
    witness = Witness(refers=True)
    live(store, witness)
    run = Run.open(store)
    opened = run.claim(continues=run.discover().generations[0]).begin(35)
    write(opened, 0, refers=True)
    return store, witness


def operations() -> list[tuple[str, str]]:
    recorder = StoreWrapper(prepared(MemoryStore())[0])
    live(recorder, Witness(refers=True))
    return recorder.operations


OPERATIONS = operations()


def save(writer: Writer, step: int, base: bytes = b"frozen" * 100) -> Committed:
    opened = writer.begin(step)
    part = opened.write(0, content(opened.id, 0), unchanging={"base": base})
    return opened.seal([part], world_size=1).commit({})


def keys(store: Store) -> set[str]:
    return {info.key for info in store.list("generations/")}


def base_of(committed: Committed) -> str:
    (ref,) = committed.manifest.parts[0].bases
    return ref.key


def test_what_does_not_change_is_written_once_and_referred_to_where_it_was_written() -> None:
    recorder = StoreWrapper(MemoryStore())
    first = Run.open(recorder).claim()
    one, two, three = save(first, 1), save(first, 2), save(first, 3)
    second = Run.open(recorder).claim(continues=three)
    four = save(second, 4)
    assert {base_of(item) for item in (one, two, three, four)} == {layout.part_target(one.id, "a0", 0).base_key}
    assert [ref.key for ref in four.manifest.referred] == [base_of(one)]
    assert one.manifest.referred == ()
    assert sum(verb == "put_blob" and layout.is_base(key) for verb, key in recorder.operations) == 1
    five = save(second, 5, b"thawed")
    assert base_of(five) == layout.part_target(five.id, "a1", 0).base_key
    assert four.manifest.own_size == four.manifest.size - 600


def test_what_is_referred_to_stays_until_nothing_refers_to_it() -> None:
    """Caught: a prune that deletes with the generation what others refer to, or that never deletes it."""
    store = MemoryStore()
    run = Run.open(store)
    writer = run.claim()
    one = save(writer, 1)
    for step in (2, 3):
        save(writer, step)
        writer.prune(Retention(keep=1))
        discovery = run.discover()
        assert [c.id.step for c in discovery.generations] == [step]
        assert discovery.problems == ()
        assert [(lender.id, lender.keys) for lender in discovery.lenders] == [(one.id, (base_of(one),))]
        run.verify(discovery.generations[0], Depth.DIGESTS)
    four = save(writer, 4, b"thawed")
    writer.prune(Retention(keep=2))
    assert base_of(one) in keys(store), "step 3 is still there and refers to it"
    save(writer, 5, b"thawed")
    pruned = writer.prune(Retention(keep=2))
    assert pruned.dropped == (GenerationId(1, 3),)
    assert pruned.leftovers == (one.id,)
    assert run.discover().lenders == ()
    assert {layout.generation_of(key) for key in keys(store)} == {four.id, GenerationId(1, 5)}


def cases(*modes: str) -> list[object]:
    return [
        pytest.param(index, mode, id=f"{index}:{verb}:{key}-{mode}")
        for index, (verb, key) in enumerate(OPERATIONS)
        for mode in modes
        if verb == "put_blob" or (verb in ("put", "put_if_absent", "delete") and mode != "torn")
    ]


def test_the_enumeration_is_not_vacuous() -> None:
    puts = [key for verb, key in OPERATIONS if verb == "put_blob"]
    assert {layout.is_base(key) for key in puts} == {True, False}
    assert sum(map(layout.is_base, puts)) < len(puts) / 2, "nothing is referred to"
    assert any(layout.is_base(key) for verb, key in OPERATIONS if verb == "delete"), "no base is ever let go"


@pytest.mark.parametrize(("index", "mode"), cases(*CRASH_MODES))
def test_every_crash_point(index: int, mode: str) -> None:
    store, witness = prepared(MemoryStore())
    with pytest.raises(SimulatedCrash):
        live(CrashingStore(store, index, mode), witness)
    check(store, witness)
    settle(store, witness)


@pytest.mark.parametrize(("index", "mode"), cases("lost", "fails"))
def test_every_lost_reply_and_every_failed_request(index: int, mode: str) -> None:
    store, witness = prepared(MemoryStore())
    faulty: StoreWrapper
    if mode == "lost":
        faulty = LostReplyStore(store, {index})
    else:
        faulty = FailingStore(store, lambda i, verb, key: TransientStoreError("unavailable") if i == index else None)
    live(faulty, witness)
    check(store, witness)
    settle(store, witness)


def kill_points(seed: int, kills: int, folder: Path | None = None) -> int:
    """Lives with retentions by chance, each killed somewhere from its first tombstone on; how many were."""
    chance = random.Random(seed)
    store: Store = MemoryStore() if folder is None else LocalStore(folder)
    witness = Witness(refers=True)
    killed = 0
    while killed < kills:
        retention = Retention(chance.randint(1, 3), chance.choice([None, 30]))
        saves = chance.randint(1, 4)
        recorder = _copy(store)
        live(recorder, Witness(refers=True), saves=saves, retention=retention)
        prunes = [i for i, (_, key) in enumerate(recorder.operations) if key.startswith("tombstones/")]
        if not prunes:
            live(store, witness, saves=saves, retention=retention)
            continue
        index = chance.randrange(prunes[0], len(recorder.operations))
        try:
            live(CrashingStore(store, index, chance.choice(CRASH_MODES)), witness, saves=saves, retention=retention)
        except SimulatedCrash:
            killed += 1
        check(store, witness)
    settle(store, witness)
    return killed


def _copy(store: Store) -> StoreWrapper:
    twin = MemoryStore()
    for info in store.list(""):
        twin.put(info.key, store.get(info.key))
    return StoreWrapper(twin)


def test_kills_around_pruning() -> None:
    assert kill_points(0, 40) == 40


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 11))
def test_a_thousand_kills_around_pruning(seed: int) -> None:
    """100 for each seed."""
    assert kill_points(seed, 100) == 100


@pytest.mark.slow
def test_kills_around_pruning_on_a_real_folder(tmp_path: Path) -> None:
    assert kill_points(11, 50, tmp_path / "run") == 50


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("save"), st.integers(0, 2)),
        st.tuples(st.just("prune"), st.integers(1, 3), st.sampled_from([None, 3])),
        st.tuples(st.just("prune by hand"), st.integers(1, 2)),
        st.tuples(st.just("resume")),
        st.tuples(st.just("lose the newest")),
    ),
    max_size=25,
)


@settings(max_examples=150, deadline=None)
@given(STEPS)
def test_any_order_of_saves_and_prunes_loses_nothing(steps: list[tuple[Any, ...]]) -> None:
    """With bases that come, change and come back; and no blob stays that nothing needs."""
    store = MemoryStore()
    run = Run.open(store)
    writer, bases = run.claim(), dict[GenerationId, bytes]()
    for number, (what, *how) in enumerate(steps, start=1):
        found = run.discover()
        if what == "save":
            base = b"base %d" % how[0]
            bases[save(writer, number, base).id] = base
        elif what == "prune":
            writer.prune(Retention(*how))
        elif what == "prune by hand":
            held = writer.newest if writer._before is None else writer._before.id
            prune(store, found, Retention(how[0]), life=writer.life, held=held)
        elif what == "resume":
            writer = run.claim(continues=found.generations[0] if found.generations else None)
        elif found.generations and found.generations[0].id.life < writer.life:
            # As a new life finds it that has to go back to the generation before.
            bury(store, found.generations[0].id, found.lent())
            writer = run.claim(continues=found.generations[1] if len(found.generations) > 1 else None)
        found = run.discover()
        for committed in found.generations:
            assert run.verify(committed, Depth.DIGESTS).read("base") == bases[committed.id]
    writer.prune(Retention(100))
    found = run.discover()
    needed = {ref.key for committed in found.generations for ref in committed.manifest.objects}
    assert {key for key in keys(store) if layout.is_base(key)} <= needed


# -- who prunes what another one is about to refer to ------------------------------------------------------------------


def test_a_save_may_refer_only_to_what_the_generation_before_holds() -> None:
    """Caught: a seal that takes any reference."""
    run = Run.open(MemoryStore())
    writer = run.claim()
    one = save(writer, 1)
    save(writer, 2, b"thawed")
    for late in (writer.begin(3), Run.open(run.store).claim().begin(3)):  # the second one has loaded nothing
        part = late.write(0, {}, unchanging={"base": b"thawed"})
        stolen = type(part)(part.rank, part.blob, part.index, one.manifest.parts[0].bases)
        with pytest.raises(SaveError, match="does not hold"):
            late.seal([stolen], world_size=1)


def test_a_life_that_loaded_a_generation_which_is_being_pruned_refers_to_nothing_of_it() -> None:
    """Caught: no look for the tombstone after the claim."""
    run = Run.open(MemoryStore())
    one = save(run.claim(), 1)
    run.store.put_if_absent(layout.tombstone_key(one.id), b"{}")
    second = run.claim(continues=one)
    assert second.lendable == {}
    two = save(second, 2)
    second.prune(Retention(1))
    assert two.manifest.referred == ()
    run.verify(two, Depth.DIGESTS)


def test_a_prune_that_stalls_deletes_nothing_once_a_life_began() -> None:
    """It drops what the new life has loaded, as it knows of something newer that the new life found damaged. Caught:
    no look for newer lives between the tombstones and the deletion."""
    store = MemoryStore()
    slow = SlowStore(store, lambda verb, key: verb == "put_if_absent" and key.startswith("tombstones/"))
    first = Run.open(slow).claim()
    one, _two = save(first, 1), save(first, 2, b"damaged")
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(first.prune, Retention(1))
        assert slow.reached.wait(30)
        second = Run.open(store).claim(continues=one)
        three = save(second, 3)
        slow.release.set()
        with pytest.raises(FencedError):
            pending.result(30)
    assert three.manifest.referred
    Run.open(store).verify(three, Depth.DIGESTS)
    second.prune(Retention(1))
    Run.open(store).verify(three, Depth.DIGESTS)


@pytest.mark.parametrize("committed", [False, True], ids=["before its first commit", "after"])
def test_a_prune_by_hand_keeps_what_the_running_life_builds_on(tmp_path: Path, committed: bool) -> None:
    """A stalled life's commit came in between and is the newest. Caught: a prune that keeps by retention alone."""
    run = Run.open(tmp_path)
    zombie = run.claim()
    one = save(zombie, 1)
    second = run.claim(continues=one)
    stalled = zombie.begin(900)
    zombie.check_fence = lambda: None  # type: ignore[method-assign]  # it was asked before the second life began
    stalled.seal([stalled.write(0, {})], world_size=1).commit({})
    if committed:
        save(second, 2)
    opened = second.begin(3)
    part = opened.write(0, content(opened.id, 0), unchanging={"base": b"frozen" * 100})
    spot_prune(run.uri, keep=1)
    three = opened.seal([part], world_size=1).commit({})
    assert three.manifest.referred
    run.verify(three, Depth.DIGESTS)


def test_a_stalled_save_that_refers_is_buried_before_what_it_refers_to_goes() -> None:
    """At every instant of the prune that lets its base go, its marker may come. Caught: a prune that deletes before all
    its tombstones are there."""
    for index in range(200):
        store = MemoryStore()
        run = Run.open(store)
        zombie = run.claim()
        one = save(zombie, 1)
        stalled = zombie.begin(2)
        part = stalled.write(0, content(stalled.id, 0), unchanging={"base": b"frozen" * 100})
        written = stalled.seal([part], world_size=1)
        second = Run.open(store).claim(continues=one)
        save(second, 3, b"thawed")
        zombie.check_fence = lambda: None  # type: ignore[method-assign]  # it was asked before the second life began
        faulty = _Interrupted(store, index, written)
        try:
            Writer(Run.open(faulty), 2, second.run_id).prune(Retention(1))
        except SimulatedCrash:
            # Right after the marker came, and before the prune could do anything about it.
            for found in run.discover().generations:
                run.verify(found, Depth.DIGESTS)
        else:
            assert index > 20
            return
    raise AssertionError("the prune never ended")


class _Interrupted(StoreWrapper):
    """The marker of `written` comes before operation `index`, and the process that did the operations dies."""

    def __init__(self, store: Store, index: int, written: Written) -> None:
        super().__init__(store)
        self.index, self.written = index, written

    def around(self, index: int, verb: str, key: str, action: Callable[[], Any]) -> Any:
        if index == self.index:
            with suppress(CommitError):
                self.written.commit({})
            raise SimulatedCrash
        return action()


# -- damage ------------------------------------------------------------------------------------------------------------


def test_a_marker_that_cannot_be_read_keeps_what_it_may_refer_to() -> None:
    """A newer release's, or one that will be repaired. Caught: only what is known to be referred to is spared."""
    store = MemoryStore()
    run = Run.open(store)
    writer = run.claim()
    one = save(writer, 1)
    two = save(writer, 2)
    good = store.get(layout.marker_key(two.id))
    store.put(layout.marker_key(two.id), b"garbage")
    save(writer, 3, b"thawed")
    writer.prune(Retention(1))
    assert base_of(one) in keys(store)
    store.put(layout.marker_key(two.id), good)
    run.verify(two, Depth.DIGESTS)
    writer.prune(Retention(1))
    assert {layout.generation_of(key) for key in keys(store)} == {GenerationId(1, 3)}


def test_damage_to_what_is_referred_to_is_damage_to_all_that_refer_to_it() -> None:
    store = MemoryStore()
    run = Run.open(store)
    writer = run.claim()
    alone, one, two = save(writer, 1, b"other"), save(writer, 2), save(writer, 3)
    whole = store.get(base_of(one))
    store.put(base_of(one), b"F" + whole[1:])
    for item in (one, two):
        run.verify(item, Depth.SIZES)
        with pytest.raises(CorruptShardError, match=r"a1-r00000\.base\.blob"):
            run.verify(item, Depth.DIGESTS)
    verified = run.select(Depth.DIGESTS).verified
    assert verified is not None
    assert verified.committed.id == alone.id
    store.delete(base_of(one))
    for item in (one, two):
        with pytest.raises(TornGenerationError, match=r"a1-r00000\.base\.blob is missing"):
            run.verify(item, Depth.SIZES)


def test_two_ranks_that_refer_to_one_blob_read_it_once() -> None:
    store = MemoryStore()
    writer = Run.open(store).claim()
    opened = writer.begin(1)
    parts = [opened.write(rank, content(opened.id, rank), unchanging=frozen(opened.id, 0)) for rank in range(WORLD)]
    writer.build_on(opened.seal(parts, world_size=WORLD).commit({}))
    again = writer.begin(2)
    parts = [again.write(rank, content(again.id, rank), unchanging=frozen(again.id, 0)) for rank in range(WORLD)]
    committed = again.seal(parts, world_size=WORLD).commit({})
    assert len(committed.manifest.referred) == 1
    recorder = StoreWrapper(store)
    verified = Run.open(recorder).verify(committed, Depth.DIGESTS)
    assert sum(verb == "get_ranges" and layout.is_base(key) for verb, key in recorder.operations) == 1
    assert [verified.read("base", rank) for rank in range(WORLD)] == [frozen(opened.id, 0)["base"]] * WORLD
