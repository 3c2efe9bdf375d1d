"""Letting generations go: tombstone, then marker, then data, but for blobs that others refer to.

The tombstone comes first and stays, so that a name, once given up, is never live again: a stalled writer of an older
life may still put a marker there. A crash in between leaves a buried generation that the next prune clears away.

All tombstones of a prune come before anything is deleted, and in between the caller looks once more whether it may: a
life that began meanwhile, and may build on what this prune knows nothing of, has seen the tombstone or is seen.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass

from spot_core import layout
from spot_core.errors import KeyExistsError, StoreError
from spot_core.generation import Committed
from spot_core.layout import GenerationId
from spot_core.lent import Lent
from spot_core.manifest import FORMAT, encode
from spot_core.restore import Discovery, ProblemKind
from spot_core.retention import Retention
from spot_core.store import Store, put_once

__all__ = ["Pruned", "bury", "prune"]

_log = logging.getLogger(__name__)

_NOTHING = Lent(frozenset())


@dataclass(frozen=True)
class Pruned:
    dropped: tuple[GenerationId, ...]
    """Generations that retention let go, oldest first."""
    leftovers: tuple[GenerationId, ...]
    """Interrupted saves and half-finished prunes that were cleared away."""
    objects: int
    """Objects deleted."""
    uploads: int | None = 0
    """Unfinished uploads aborted; None where they could not be looked for."""


def prune(
    store: Store,
    discovery: Discovery,
    retention: Retention,
    *,
    life: int,
    damaged: Collection[GenerationId] = (),
    held: GenerationId | None = None,
    check: Callable[[], None] | None = None,
    uploads: bool = False,
) -> Pruned:
    """Drop what `retention` lets go, as life `life`. Never the newest good generation, nor anything of a newer life,
    nor a blob that a generation refers to which stays.

    `damaged` names generations known to be bad: they do not count as kept. `held` is kept whatever retention says: the
    newest life's save in flight may refer to it. `check` is called between the tombstones and the first deletion, and
    raises where this caller must not go on. With `uploads` also abort the uploads below this run that dead writers
    left: a cost, never a danger, and one more request to find.
    """
    dropped = [gen for gen in _drops(discovery.generations, retention, life, damaged) if gen != held]
    lent = discovery.lent(without=dropped)
    leftovers = sorted([*_leftovers(discovery, life), *_done_lending(discovery, lent, life)])
    # A stalled writer's save is among them: with all tombstones there nothing live can refer to what goes then.
    doomed = [*leftovers, *dropped]
    for gen in doomed:
        _entomb(store, gen)
    if doomed and check is not None:
        check()
    objects = sum(_clear(store, gen, lent) for gen in doomed)
    if dropped or leftovers:
        _log.info("Pruned %d generations and %d leftovers at %s.", len(dropped), len(leftovers), store.uri)
    aborted = _abort_uploads(store, discovery, life) if uploads else 0
    return Pruned(tuple(dropped), tuple(leftovers), objects, aborted)


def _drops(
    generations: Collection[Committed], retention: Retention, life: int, damaged: Collection[GenerationId]
) -> list[GenerationId]:
    ids = [committed.id for committed in generations]
    good = [gen for gen in ids if gen not in damaged]
    if not good:
        return []
    newest = max(good)
    drops = [*retention.drops(good), *(gen for gen in ids if gen in damaged and gen < newest)]
    return sorted(gen for gen in drops if gen.life <= life)


def _leftovers(discovery: Discovery, life: int) -> list[GenerationId]:
    committed = [c.id for c in discovery.generations if c.id.life == life]
    newest_own = max(committed, default=None)
    found = []
    for problem in discovery.problems:
        gen = problem.generation
        if gen is None:
            continue
        # Data without marker may be a save in flight: within the own life only what lies behind a newer commit is
        # not. An older life's save may be in flight as well, but the tombstone keeps it from counting.
        abandoned = gen.life < life or (newest_own is not None and gen.life == life and gen < newest_own)
        if problem.kind is ProblemKind.PRUNED or (problem.kind is ProblemKind.ORPHAN and abandoned):
            found.append(gen)
    return sorted(found)


def _done_lending(discovery: Discovery, lent: Lent, life: int) -> list[GenerationId]:
    """Pruned generations that kept blobs for others, and for some of these no longer have to."""
    done = (lender for lender in discovery.lenders if not all(lent.holds(key) for key in lender.keys))
    return [lender.id for lender in done if lender.id.life <= life]


def _abort_uploads(store: Store, discovery: Discovery, life: int) -> int | None:
    newest_own = max((c.id for c in discovery.generations if c.id.life == life), default=None)
    aborted = 0
    try:
        for upload in store.unfinished(layout.GENERATIONS):
            gen = GenerationId.parse(upload.key.removeprefix(layout.GENERATIONS).split("/", 1)[0])
            # As for data without marker; and nothing is uploaded any more for what is committed.
            if gen is not None and (gen.life < life or (newest_own is not None and gen <= newest_own)):
                store.abort(upload)
                aborted += 1
    except StoreError as error:
        _log.warning("Uploads that were never finished, if there are any, stay at %s: %s", store.uri, error)
        return None
    if aborted:
        _log.info("Aborted %d unfinished uploads at %s.", aborted, store.uri)
    return aborted


def bury(store: Store, gen: GenerationId, lent: Lent = _NOTHING) -> int:
    """Tombstone, marker, data, whatever is there of each, but for what is `lent`; how many objects went.

    Raises StoreError.
    """
    _entomb(store, gen)
    return _clear(store, gen, lent)


def _entomb(store: Store, gen: GenerationId) -> None:
    try:
        put_once(store, layout.tombstone_key(gen), encode({"format": FORMAT, "generation": gen.name}))
    except KeyExistsError:
        pass  # buried already, in whatever words


def _clear(store: Store, gen: GenerationId, lent: Lent) -> int:
    marker = layout.marker_key(gen)
    store.delete(marker)
    keys = [info.key for info in store.list(layout.generation_prefix(gen)) if info.key != marker]
    gone = [key for key in keys if not lent.holds(key)]
    for key in gone:
        store.delete(key)
    return len(gone) + 1
