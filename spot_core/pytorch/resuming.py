"""Find and load the newest good generation, the same one on every rank, or refuse on every rank."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from spot_core.errors import RestoreError, ResumeMismatchError, StoreError, TornGenerationError
from spot_core.generation import Committed
from spot_core.layout import GenerationId
from spot_core.manifest import Manifest
from spot_core.pytorch.loader import LoadedState
from spot_core.pytorch.local_tier import fill, gather
from spot_core.pytorch.ranks import Ranks
from spot_core.restore import Discovery
from spot_core.run import Run
from spot_core.tiers import Candidate, LocalTier
from spot_core.verify import Depth, Verified

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Resumed:
    """What `Session.resume` found: `state.shared`, `state.local` (None when this rank had none) and where it came from.

    `life` is the life that wrote the generation, `step` the step it was taken at; `meta` is the manifest's.
    """

    state: LoadedState
    step: int
    life: int
    generation: str
    meta: Mapping[str, Any]

    @property
    def finished(self) -> bool:
        """True when the generation was saved with `finished=True`: the run has nothing left to do."""
        return bool(self.meta.get("finished", False))


@dataclass(frozen=True)
class Found:
    """A loaded generation. `local` when it came from the local tier; `durable` when the run's store has it too."""

    committed: Committed
    state: LoadedState
    local: Candidate | None = None
    durable: bool = True


@dataclass
class Search:
    """The way to a loaded generation; `damaged` are those of the run's store that were passed over, newest first.

    With a local tier the newest generation of both is taken, the local copy where both have it. Whether there is
    anything at all, the run's store decides: what is wrong with a local copy only passes it over.
    """

    run: Run
    ranks: Ranks
    load: Callable[[Verified], LoadedState]
    check: Callable[[Manifest], None] | None = None
    local: str | None = None
    """Folder of the local tier."""
    damaged: list[GenerationId] = field(default_factory=list)
    _tier: LocalTier | None = None
    _local: list[Candidate] = field(default_factory=list)

    def newest(self) -> Found | None:
        """Collective. Raises as `Session.resume` does."""
        self._look_at_local()
        found: list[Discovery] = []

        def next_one() -> tuple[Committed | None, list[GenerationId], bool, bool]:
            """The next to try, durable ones found damaged, whether it is local, whether it is durable."""
            if not found:
                found.append(self.run.discover())
            here = self._local[0].committed if self._local else None
            known = {committed.id for committed in found[0].generations if committed.id not in self.damaged}
            if here is not None and all(gen <= here.id for gen in known):
                return here, [], True, here.id in known
            try:
                selection = self.run.select(Depth.SIZES, discovery=found[0], skip=self.damaged)
            except TornGenerationError:
                if here is None:
                    raise
                return here, sorted(known), True, False
            torn = [p.generation for p in selection.problems if p.error is not None and p.generation is not None]
            committed = None if selection.verified is None else selection.verified.committed
            torn = [gen for gen in torn if committed is None or gen > committed.id]
            if here is not None and (committed is None or here.id >= committed.id):
                return here, torn, True, committed is not None and here.id == committed.id
            return committed, torn, False, True

        while True:
            committed, torn, local, durable = self.ranks.from_first(next_one)
            self.damaged += [gen for gen in torn if gen not in self.damaged]
            if committed is None:
                return None
            if local:
                candidate = self._local.pop(0)
                assert self._tier is not None
                fill(self._tier, self.ranks, candidate)
                state = self._load(committed, Run.open(self._tier.store), local=True)
                if state is not None:
                    return Found(committed, state, candidate, durable)
                continue
            state = self._load(committed, self.run)
            if state is not None:
                return Found(committed, state)
            self.damaged.append(committed.id)

    def _look_at_local(self) -> None:
        if self.local is None:
            return
        record = self.ranks.from_first(self.run.record)
        if record is not None:
            self._tier = LocalTier.open(self.local, record.run_id, self.run.store)
            self._local = gather(self._tier, self.ranks)

    def _load(self, committed: Committed, run: Run, *, local: bool = False) -> LoadedState | None:
        """Collective: the loaded state when all ranks could load it, None when it is damaged for any of them."""

        def attempt() -> LoadedState:
            if self.check is not None:
                self.check(committed.manifest)
            return self.load(run.verify(committed, Depth.MARKER))

        state, errors = self.ranks.everywhere(attempt)
        # What is wrong with the run or the store, and not with this one generation, stops every rank.
        passed_over = (RestoreError, StoreError) if local else (RestoreError,)
        for rank, error in enumerate(errors):
            if error is not None and (isinstance(error, ResumeMismatchError) or not isinstance(error, passed_over)):
                log.debug("rank %d could not load generation %s: %s", rank, committed.id, error)
                raise error
        reasons = [f"rank {rank}: {error}" for rank, error in enumerate(errors) if error is not None]
        if not reasons:
            return state
        if self.ranks.rank == 0:
            what = "the local copy of generation" if local else "generation"
            log.warning("spot: %s %s is passed over: %s", what, committed.id, "; ".join(reasons))
        return None


def announce(uri: str, resumed: GenerationId | None, life: int, *, local: str | None = None) -> None:
    """One line that nobody misses: a warning, since these are shown where nobody has set up logging.

    `local` says where the local copy is that was loaded, if it was one.
    """
    if resumed is None:
        log.warning("spot: no generation in %s, starting at step 0 (life %d)", uri, life)
        return
    log.warning(
        "spot: resumed from step %d (life %d -> %d, generation %s of %s%s)",
        resumed.step,
        resumed.life,
        life,
        resumed.name,
        uri,
        "" if local is None else f", {local}",
    )
