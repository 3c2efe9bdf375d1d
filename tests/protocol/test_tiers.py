"""Two tiers: the process dies at every operation on either of them, and what was acknowledged is there for the next.

A life here is one rank: it resumes from the newest generation of both tiers, takes up a drain that was cut off, saves
twice (committed locally, then drained), and prunes both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import stamina

from spot_core.errors import SpotError, TransientStoreError
from spot_core.generation import Committed
from spot_core.layout import GenerationId
from spot_core.retention import Retention
from spot_core.run import Run
from spot_core.store import MemoryStore, Store
from spot_core.testing import CrashingStore, FailingStore, LostReplyStore, SimulatedCrash, StoreWrapper
from spot_core.tiers import KEPT, LocalTier, candidates
from spot_core.verify import Depth
from spot_core.writer.drain import DrainJob, drain_part
from spot_core.writer.meter import Throttle

FREELY = Throttle(None)
RETENTION = Retention(keep=2)


@pytest.fixture(autouse=True)
def _one_attempt() -> Iterator[None]:
    with stamina.set_testing(True, attempts=1):
        yield


@dataclass
class Witness:
    """What a life was told is safe, and where it went on from."""

    local: list[GenerationId] = field(default_factory=list)
    durable: list[GenerationId] = field(default_factory=list)
    resumed: list[GenerationId | None] = field(default_factory=list)


def newest(durable: Store, local: Store) -> tuple[Committed, Run] | None:
    """The newest generation of both tiers, the local copy first, verified to the last byte."""
    run = Run.open(durable)
    record = run.record()
    here = [] if record is None else candidates([LocalTier(local, record.run_id).holdings()], record.run_id)
    found = run.select(Depth.DIGESTS)
    behind = None if found.verified is None else found.verified.committed
    for candidate in here:
        if behind is None or candidate.committed.id >= behind.id:
            Run.open(local).verify(candidate.committed, Depth.DIGESTS)
            return candidate.committed, Run.open(local)
    return None if behind is None else (behind, run)


def value(committed: Committed, run: Run) -> bytes:
    return run.verify(committed, Depth.MARKER).read("state")


def live(durable: Store, local: Store, witness: Witness) -> None:
    run = Run.open(durable)
    found = newest(durable, local)
    step = 0
    if found is not None:
        committed, where = found
        assert value(committed, where) == b"%d" % committed.id.step
        step = committed.id.step
    witness.resumed.append(None if found is None else found[0].id)
    writer = run.claim()
    record = run.record()
    assert record is not None
    tier = LocalTier(local, record.run_id)
    tier.enter(record, writer.life, {})
    copies: list[GenerationId] = []
    if found is not None and found[1].store is local:
        copies.append(found[0].id)
        if found[0].id not in {committed.id for committed in run.discover().generations}:
            opened = writer.again(found[0])
            (part,) = found[0].manifest.parts
            drained = drain_part(local, durable, DrainJob(part, opened.target(0)), FREELY)
            witness.durable.append(opened.seal([drained], world_size=1).commit({}).id)
    first = writer.at(local)
    for _ in range(2):
        step += 10
        opened = writer.begin(step)
        tier.make_room([opened.id.name, *(g.name for g in copies[:1])], [g.name for g in copies[1:KEPT]], 0)
        part = first.same(opened).write(0, {"state": b"%d" % step})
        witness.local.append(first.same(opened).seal([part], world_size=1).commit({}).id)
        copies.insert(0, opened.id)
        drained = drain_part(local, durable, DrainJob(part, opened.target(0)), FREELY)
        witness.durable.append(opened.seal([drained], world_size=1).commit({}).id)
        writer.prune(RETENTION)


def check(durable: Store, local: Store, witness: Witness) -> None:
    """With the machine there, the newest that either tier acknowledged, or a newer one; without it, the store's."""
    for store in (durable, local):
        run = Run.open(store)
        for committed in run.discover().generations:
            run.verify(committed, Depth.DIGESTS)
    for here, told in ((local, witness.local + witness.durable), (MemoryStore(), witness.durable)):
        found = newest(durable, here)
        if told:
            assert found is not None
            assert found[0].id >= max(told)
        if found is not None:
            assert value(*found) == b"%d" % found[0].id.step


def settle(durable: Store, local: Store, witness: Witness) -> None:
    """The next life goes on from what `check` saw, and leaves no leftovers."""
    before = newest(durable, local)
    live(durable, local, witness)
    assert witness.resumed[-1] == (None if before is None else before[0].id)
    run = Run.open(durable)
    found = run.discover()
    assert [committed.id for committed in found.generations] == sorted(witness.durable)[-2:][::-1]
    assert [problem for problem in found.problems if problem.generation is not None] == []
    run_id = found.generations[0].manifest.run_id
    here = candidates([LocalTier(local, run_id).holdings()], run_id)
    assert here[0].committed.id == found.generations[0].id
    assert len(here) <= KEPT + 1


def only_local() -> tuple[MemoryStore, MemoryStore, Witness]:
    """A life that died with its last generation on the local tier only."""
    durable, local, witness = MemoryStore(), MemoryStore(), Witness()
    live(durable, local, witness)
    uploads = FailingStore(durable, lambda _i, verb, _k: SimulatedCrash() if verb == "put_blob" else None)  # type: ignore[arg-type,return-value]
    with pytest.raises(SimulatedCrash):
        live(uploads, local, witness)
    assert max(witness.local) > max(witness.durable)
    return durable, local, witness


def operations() -> dict[str, list[tuple[str, str]]]:
    durable, local, witness = only_local()
    seen = {"durable": StoreWrapper(durable), "local": StoreWrapper(local)}
    live(seen["durable"], seen["local"], witness)
    return {name: store.operations for name, store in seen.items()}


OPERATIONS = operations()


def _name(index: int, operation: tuple[str, str]) -> str:
    return f"{index}:{operation[0]}"


def _cases(*modes: str, every: int = 1) -> list[object]:
    return [
        pytest.param(tier, index, mode, id=f"{tier}-{_name(index, operation)}-{mode}")
        for tier, done in OPERATIONS.items()
        for index, operation in list(enumerate(done))[::every]
        for mode in modes
        if mode != "torn" or operation[0] == "put_blob"
    ]


def test_the_enumeration_is_not_vacuous() -> None:
    assert {verb for verb, _ in OPERATIONS["local"]} >= {"put_blob", "put_if_absent", "get_ranges", "delete"}
    assert sum(verb == "put_blob" for verb, _ in OPERATIONS["durable"]) == 3, "the drain taken up, and two saves"
    assert len(OPERATIONS["durable"]) > 40
    assert len(OPERATIONS["local"]) > 40


@pytest.mark.parametrize(("tier", "index", "mode"), _cases("before", "after", "torn"))
def test_every_crash_point_of_both_tiers(tier: str, index: int, mode: str) -> None:
    durable, local, witness = only_local()
    crashing = CrashingStore(durable if tier == "durable" else local, index, mode)
    with pytest.raises(SimulatedCrash):
        live(crashing if tier == "durable" else durable, crashing if tier == "local" else local, witness)
    check(durable, local, witness)
    settle(durable, local, witness)


@pytest.mark.parametrize(("tier", "index", "mode"), _cases("lost", "fails", every=3))
def test_every_lost_reply_and_failed_request_of_both_tiers(tier: str, index: int, mode: str) -> None:
    """A life that a store's error ends: what was acknowledged counts, nothing torn does."""
    durable, local, witness = only_local()
    inner = durable if tier == "durable" else local
    faulty: StoreWrapper
    if mode == "lost":
        faulty = LostReplyStore(inner, {index})
    else:
        faulty = FailingStore(inner, lambda i, verb, key: TransientStoreError("unavailable") if i == index else None)
    try:
        live(faulty if tier == "durable" else durable, faulty if tier == "local" else local, witness)
    except SpotError:
        pass
    check(durable, local, witness)
    settle(durable, local, witness)


def test_without_the_machine_the_durable_store_decides() -> None:
    durable, _, witness = only_local()
    live(durable, MemoryStore(), witness)
    assert witness.resumed[-1] == max(gen for gen in witness.durable if gen.life == 1)


def test_a_generation_that_an_older_life_left_local_stays_behind_a_newer_lifes() -> None:
    """The machine comes back after another one went on: its newer steps do not outrank the newer life (I4)."""
    durable, local, witness = only_local()
    live(durable, MemoryStore(), witness)  # on another machine
    live(durable, local, witness)
    assert witness.resumed[-1] == GenerationId(3, 40)
    assert max(witness.local) == GenerationId(4, 60)
