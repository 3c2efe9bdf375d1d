"""The read side, as types: Discovery -> Committed -> Verified.

Markers decide. Damage to one generation is a `Problem` and the next older one is used; an error that leaves open
whether there is anything at all is raised: a training run must never start at zero because a disk was slow.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from spot_core import layout
from spot_core.errors import (
    CorruptShardError,
    FormatError,
    KeyMissingError,
    Reason,
    RestoreError,
    SpotError,
    StoreError,
    TornGenerationError,
    TransientStoreError,
)
from spot_core.generation import Committed
from spot_core.layout import GenerationId
from spot_core.lent import Lender, Lent, lent
from spot_core.manifest import Manifest, decode
from spot_core.store import Store
from spot_core.verify import Depth, Verified, verify

__all__ = ["Discovery", "Problem", "ProblemKind", "Selection", "discover", "marked", "select"]

_log = logging.getLogger(__name__)


class ProblemKind(str, enum.Enum):
    """What is wrong with something found in a run. Stable codes, only ever added to."""

    FOREIGN = "foreign"
    """Not ours; left alone."""
    EMPTY = "empty"
    """A generation's folder with nothing in it."""
    ORPHAN = "orphan"
    """Data without a marker: an interrupted save, or one in flight."""
    PRUNED = "pruned"
    """Leftovers of a generation that was pruned."""
    POINTER = "pointer"
    """The pointer cannot be read; it is only a hint."""
    VANISHED = "vanished"
    """The pointer names a generation that is neither there nor pruned."""
    UNREADABLE = "unreadable"
    FORMAT = "format"
    MISPLACED = "misplaced"
    """A marker that speaks of another generation than its folder's name."""
    FOREIGN_RUN = "foreign_run"
    TORN = "torn"
    CORRUPT = "corrupt"

    @property
    def blocks_fresh_start(self) -> bool:
        """True when a generation was, or may have been, committed there: starting at zero would lose it."""
        return self not in _HARMLESS


_UNKNOWN = {ProblemKind.UNREADABLE, ProblemKind.FORMAT, ProblemKind.MISPLACED, ProblemKind.FOREIGN_RUN}
"""A marker is there, and what its generation refers to is not known."""

_HARMLESS = {ProblemKind.FOREIGN, ProblemKind.EMPTY, ProblemKind.ORPHAN, ProblemKind.PRUNED, ProblemKind.POINTER}


@dataclass(frozen=True)
class Problem:
    kind: ProblemKind
    where: str
    """Key below the run's root."""
    message: str
    generation: GenerationId | None = None
    error: SpotError | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True)
class Discovery:
    generations: tuple[Committed, ...]
    """Newest first: by life, then step."""
    problems: tuple[Problem, ...]
    lenders: tuple[Lender, ...] = ()
    """Pruned generations of which only blobs are left that others refer to."""

    def lent(self, *, without: Collection[GenerationId] = ()) -> Lent:
        """What the generations found refer to, those in `without` left aside."""
        manifests = (found.manifest for found in self.generations if found.id not in without)
        unknown = (p.generation for p in self.problems if p.kind in _UNKNOWN and p.generation is not None)
        return lent(manifests, unknown)


@dataclass(frozen=True)
class Selection:
    verified: Verified | None
    """None when nothing was ever committed: a fresh start is right."""
    problems: tuple[Problem, ...]
    """Why newer ones, if any, were passed over, and whatever else was found."""


def discover(store: Store, run_id: str | None) -> Discovery:
    """Find all generations whose marker exists, newest first. `run_id` is the run record's, None where it is lost.

    Raises:
        StoreError: a listing or the pointer could not be read; or a marker could not, and none other is there.
    """
    problems: list[Problem] = []
    pointed = _pointer(store, problems)
    ids = {} if pointed is None else {pointed: True}
    for name in store.list_dirs(layout.GENERATIONS):
        gen = GenerationId.parse(name)
        if gen is None:
            problems.append(
                Problem(ProblemKind.FOREIGN, layout.GENERATIONS + name, "Not a generation's name; skipped.")
            )
        else:
            ids[gen] = False
    for info in store.list(layout.GENERATIONS, recursive=False):
        problems.append(Problem(ProblemKind.FOREIGN, info.key, "A file where only generations belong; skipped."))
    found: list[Committed] = []
    left: list[Lender] = []
    for gen in sorted(ids, reverse=True):
        item = _look(store, gen, run_id, left, only_pointed=ids[gen])
        if isinstance(item, Committed):
            found.append(item)
        elif item is not None:
            problems.append(item)
    if not found:
        for problem in problems:
            if isinstance(problem.error, StoreError):
                raise problem.error
    return _told_apart(Discovery(tuple(found), tuple(problems)), left)


def _told_apart(found: Discovery, left: list[Lender]) -> Discovery:
    """Of pruned generations of which something is `left`: those that only lend are no problem."""
    lends = found.lent().holds
    lenders = {lender.id: lender for lender in left if all(lends(key) for key in lender.keys)}
    problems = (p for p in found.problems if p.kind is not ProblemKind.PRUNED or p.generation not in lenders)
    return Discovery(found.generations, tuple(problems), tuple(lenders.values()))


def _pointer(store: Store, problems: list[Problem]) -> GenerationId | None:
    try:
        data = store.get(layout.POINTER)
    except KeyMissingError:
        return None
    try:
        gen = GenerationId.parse(str(decode(data, layout.POINTER).get("generation")))
    except FormatError:
        gen = None
    if gen is None:
        problems.append(Problem(ProblemKind.POINTER, layout.POINTER, "The pointer cannot be read; markers decide."))
    return gen


def _look(
    store: Store, gen: GenerationId, run_id: str | None, left: list[Lender], *, only_pointed: bool
) -> Committed | Problem | None:
    key = layout.marker_key(gen)
    where = f"Generation {gen} at {store.uri}"

    def problem(kind: ProblemKind, message: str, error: SpotError | None = None) -> Problem:
        return Problem(kind, key, f"{where} {message}", gen, error)

    try:
        if store.stat(layout.tombstone_key(gen)) is not None:
            # An empty folder of a buried generation is nothing: not every file system lets it be removed.
            keys = () if only_pointed else tuple(info.key for info in store.list(layout.generation_prefix(gen)))
            if not keys:
                return None
            left.append(Lender(gen, keys))
            return problem(ProblemKind.PRUNED, "was pruned; leftovers remain.")
        manifest = Manifest.from_bytes(store.get(key), key)
    except KeyMissingError:
        if only_pointed:
            return problem(ProblemKind.VANISHED, "is named by the pointer, but was removed by something else.")
        if store.list(layout.generation_prefix(gen)):
            return problem(ProblemKind.ORPHAN, "has data but no marker: that save did not finish.")
        return problem(ProblemKind.EMPTY, "is an empty folder.")
    except TransientStoreError:
        raise
    except StoreError as error:
        return problem(ProblemKind.UNREADABLE, f"cannot be read: {error}", error)
    except FormatError as error:
        return problem(ProblemKind.FORMAT, f"has an unreadable marker: {error}", error)
    if GenerationId(max(manifest.life, 1), manifest.step) != gen:
        return problem(ProblemKind.MISPLACED, f"has the marker of life {manifest.life}, step {manifest.step}.")
    if run_id is not None and manifest.run_id != run_id:
        return problem(ProblemKind.FOREIGN_RUN, f"belongs to run {manifest.run_id}, not to {run_id}.")
    return Committed(gen, manifest)


def marked(name: str, manifest: Manifest, run_id: str) -> Committed | None:
    """The generation whose marker was read elsewhere (another machine's local tier); None for a misplaced one."""
    gen = GenerationId.parse(name)
    return Committed(manifest.id, manifest) if gen == manifest.id and manifest.run_id == run_id else None


def select(store: Store, discovery: Discovery, depth: Depth, skip: Collection[GenerationId] = ()) -> Selection:
    """The newest generation that verifies at `depth`, passing over damaged ones and those in `skip`.

    Raises:
        TornGenerationError: generations were committed, but none of them is good: starting at zero must be decided by
            a person.
        StoreError: the store failed in a way that may pass.
    """
    problems = list(discovery.problems)
    for committed in discovery.generations:
        if committed.id in skip:
            continue
        try:
            return Selection(verify(store, committed, depth), tuple(problems))
        except TransientStoreError:
            raise
        except (RestoreError, StoreError) as error:
            problem = Problem(_kind(error), layout.marker_key(committed.id), str(error), committed.id, error)
            _log.warning("Generation %s is passed over: %s", committed.id, error)
            problems.append(problem)
    refuse_unless_fresh(store, discovery.generations, problems)
    return Selection(None, tuple(problems))


def refuse_unless_fresh(store: Store, generations: Collection[Committed], problems: Iterable[Problem]) -> None:
    """Raises TornGenerationError unless nothing was ever committed here."""
    reasons = [problem.message for problem in problems if problem.kind.blocks_fresh_start]
    if generations or reasons:
        told = " ".join(reasons) or f"All {len(generations)} were tried."
        raise TornGenerationError(
            f"The run at {store.uri} has generations, but none that can be used. {told} Nothing was changed.",
            reason=Reason.ALL_DAMAGED,
            hint="Look with `spot verify`; to start at zero on purpose, choose another run location.",
        )


def _kind(error: SpotError) -> ProblemKind:
    if isinstance(error, StoreError):
        return ProblemKind.UNREADABLE
    if isinstance(error, FormatError):
        return ProblemKind.FORMAT
    return ProblemKind.CORRUPT if isinstance(error, CorruptShardError) else ProblemKind.TORN
