"""Find and load the newest good generation, the same one on every rank, or refuse on every rank."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from spot_core.errors import RestoreError, ResumeMismatchError
from spot_core.generation import Committed
from spot_core.layout import GenerationId
from spot_core.manifest import Manifest
from spot_core.pytorch.loader import LoadedState
from spot_core.pytorch.ranks import Ranks
from spot_core.restore import Discovery
from spot_core.run import Run
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


@dataclass
class Search:
    """The way to a loaded generation; `damaged` are those passed over, newest first."""

    run: Run
    ranks: Ranks
    load: Callable[[Verified], LoadedState]
    check: Callable[[Manifest], None] | None = None
    damaged: list[GenerationId] = field(default_factory=list)

    def newest(self) -> tuple[Committed, LoadedState] | None:
        """Collective. Raises as `Session.resume` does."""
        found: list[Discovery] = []

        def next_one() -> tuple[Committed | None, list[GenerationId]]:
            if not found:
                found.append(self.run.discover())
            selection = self.run.select(Depth.SIZES, discovery=found[0], skip=self.damaged)
            torn = [p.generation for p in selection.problems if p.error is not None and p.generation is not None]
            committed = None if selection.verified is None else selection.verified.committed
            return committed, [gen for gen in torn if committed is None or gen > committed.id]

        while True:
            committed, torn = self.ranks.from_first(next_one)
            self.damaged += [gen for gen in torn if gen not in self.damaged]
            if committed is None:
                return None
            state = self._load(committed)
            if state is not None:
                return committed, state
            self.damaged.append(committed.id)

    def _load(self, committed: Committed) -> LoadedState | None:
        """Collective: the loaded state when all ranks could load it, None when it is damaged for any of them."""

        def attempt() -> LoadedState:
            if self.check is not None:
                self.check(committed.manifest)
            return self.load(self.run.verify(committed, Depth.MARKER))

        state, errors = self.ranks.everywhere(attempt)
        # What is wrong with the run or the store, and not with this one generation, stops every rank.
        for rank, error in enumerate(errors):
            if error is not None and (isinstance(error, ResumeMismatchError) or not isinstance(error, RestoreError)):
                log.debug("rank %d could not load generation %s: %s", rank, committed.id, error)
                raise error
        reasons = [f"rank {rank}: {error}" for rank, error in enumerate(errors) if error is not None]
        if not reasons:
            return state
        if self.ranks.rank == 0:
            log.warning("spot: generation %s is passed over: %s", committed.id, "; ".join(reasons))
        return None


def announce(uri: str, resumed: GenerationId | None, life: int) -> None:
    """One line that nobody misses: a warning, since these are shown where nobody has set up logging."""
    if resumed is None:
        log.warning("spot: no generation in %s, starting at step 0 (life %d)", uri, life)
        return
    log.warning(
        "spot: resumed from step %d (life %d -> %d, generation %s of %s)",
        resumed.step,
        resumed.life,
        life,
        resumed.name,
        uri,
    )
