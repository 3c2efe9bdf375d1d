"""A training run reduced to what the protocol sees, and what must hold after any fault."""

from __future__ import annotations

from dataclasses import dataclass, field

from spot_core import (
    Committed,
    Depth,
    Discovery,
    GenerationId,
    Open,
    Part,
    Retention,
    Run,
    Selection,
    SpotError,
    TransientStoreError,
    Verified,
)
from spot_core.store import Store
from spot_core.testing import FakeClock

WORLD = 2
RETENTION = Retention(keep=2)


def content(gen: GenerationId, rank: int) -> dict[str, bytes]:
    """What `rank` saves at `gen`: tells every generation and rank from every other."""
    return {"weights": f"{gen} of rank {rank} ".encode() * 300, "step": b"%d" % gen.step, "empty": b""}


def frozen(gen: GenerationId, rank: int) -> dict[str, bytes]:
    """What of `gen` seldom changes: with each third save."""
    return {"base": f"{gen.step // 30} of rank {rank} ".encode() * 300, "nothing": b""}


def seniority(gen: GenerationId) -> tuple[int, int]:
    """The order that must hold, spelled here once more: the code's own may be what is broken."""
    return gen.life, gen.step


@dataclass
class Witness:
    """What somebody outside saw."""

    attempted: set[GenerationId] = field(default_factory=set)
    acknowledged: list[GenerationId] = field(default_factory=list)
    """Commits whose caller was told that they are done."""
    resumed: list[GenerationId | None] = field(default_factory=list)
    lives: list[int] = field(default_factory=list)
    refers: bool = False
    """Saves hold something that seldom changes, and refer to it."""


def live(store: Store, witness: Witness, *, saves: int = 3, retention: Retention = RETENTION) -> None:
    """One life: resume, claim, and `saves` rounds of save and prune. Errors of a save or prune are borne, as a trainer
    bears them; one while resuming or claiming ends the life, as a trainer refuses to start."""
    run = Run.open(store, clock=FakeClock())
    try:
        found = resumed(run)
        start = None if found is None else found.id
        writer = run.claim(info={"host": "test"}, continues=found if witness.refers else None)
    except TransientStoreError:
        return
    witness.resumed.append(start)
    witness.lives.append(writer.life)
    step = 0 if start is None else start.step
    for _ in range(saves):
        step += 10
        try:
            opened = writer.begin(step)
            witness.attempted.add(opened.id)
            parts = [write(opened, rank, refers=witness.refers) for rank in range(WORLD)]
            committed = opened.seal(parts, world_size=WORLD).commit({"reason": "interval"})
            witness.acknowledged.append(committed.id)
            writer.prune(retention)
        except SpotError:
            continue


def write(opened: Open, rank: int, *, refers: bool) -> Part:
    return opened.write(rank, content(opened.id, rank), unchanging=frozen(opened.id, rank) if refers else None)


def resume(run: Run) -> GenerationId | None:
    """The id of the generation resumed from, after reading all of it; None for a fresh start."""
    found = resumed(run)
    return None if found is None else found.id


def resumed(run: Run) -> Committed | None:
    verified = run.select(Depth.DIGESTS).verified
    if verified is None:
        return None
    read(verified)
    return verified.committed


def read(verified: Verified) -> None:
    """All of it, and it is what was saved."""
    gen = verified.committed.id
    for rank in range(WORLD):
        seldom = frozen(gen, rank) if verified.committed.manifest.bases else {}
        assert {name: verified.read(name, rank) for name in verified.names(rank)} == content(gen, rank) | seldom


def check(store: Store, witness: Witness) -> Selection:
    """The invariants, seen by a fresh and fault-free reader after whatever happened."""
    run = Run.open(store, clock=FakeClock())
    selection = run.select(Depth.DIGESTS)
    newest = max(witness.acknowledged, key=seniority, default=None)
    if newest is not None:
        assert selection.verified is not None, "an acknowledged commit was lost"
        chosen = selection.verified.committed.id
        assert seniority(chosen) >= seniority(newest), "something older than an acknowledged commit was chosen"
    if selection.verified is not None:
        assert selection.verified.committed.id in witness.attempted
        resume(run)
    discovery = run.discover()
    for committed in discovery.generations:
        verified = run.verify(committed, Depth.DIGESTS)  # no torn generation is ever live
        if witness.refers:
            assert all(part.bases for part in committed.manifest.parts)
            read(verified)
    return selection


def settle(store: Store, witness: Witness) -> Discovery:
    """One more life without faults clears everything up: only what retention keeps is left, and nothing else."""
    before = len(witness.acknowledged)
    live(store, witness, saves=1)
    assert len(witness.acknowledged) == before + 1
    discovery = Run.open(store).discover()
    assert discovery.problems == (), "leftovers remain"
    kept = [committed.id for committed in discovery.generations]
    assert kept[0] == witness.acknowledged[-1]
    assert len(kept) <= RETENTION.keep
    allowed = {obj.key for committed in discovery.generations for obj in committed.manifest.objects}
    allowed |= {f"generations/{gen}/COMMIT.json" for gen in kept}
    left = {info.key for info in store.list("generations/")}
    assert left == allowed, "objects that belong to nothing remain"
    return discovery
