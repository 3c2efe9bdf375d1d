"""One life of a run: the only place that calls resume, save, commit, prune and stop in their order.

Every method marked *collective* is called by every rank, in the same order. What happens in the background (write,
report, commit) uses the channel only, never a process group, so it cannot meet the training's collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from spot_core.policy import Decision

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from spot_core.config import Settings
    from spot_core.manifest import Manifest
    from spot_core.pytorch.loader import LoadedState
    from spot_core.run import Committed, Run


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


class Session:
    """One life of `run` on one rank.

    Parameters
    ----------
    run: the run (`Run.open(uri)`); every rank opens the same URI.
    settings: validated values, the same on every rank.
    rank, world_size: global rank and number of ranks.
    group: a gloo group of all ranks that nobody else uses; needed when world_size > 1 (ConfigError otherwise).
    meta: called at each save on rank 0; its JSON goes into the manifest's meta beside what the session writes itself.
    check: called on every rank with the manifest of the generation about to be loaded; may raise ResumeMismatchError
        (the run in this folder is not this one), which is raised on every rank and refuses to start.

    Life of the object: `resume()` once, `start()` once, then `boundary()` per step and `save()` when it says so,
    `stop()` after a stopping decision, `close()` always (also by `with`).
    """

    def __init__(
        self,
        run: Run,
        settings: Settings,
        *,
        rank: int = 0,
        world_size: int = 1,
        group: dist.ProcessGroup | None = None,
        meta: Callable[[], Mapping[str, Any]] | None = None,
        check: Callable[[Manifest], None] | None = None,
    ) -> None:
        raise NotImplementedError

    @property
    def life(self) -> int:
        """Number of this life; 0 before `start`."""
        raise NotImplementedError

    def resume(self, *, template: Any = None) -> Resumed | None:
        """Collective: load the newest good generation, the same on every rank; None when the run has none.

        A generation that fails verification or loading on any rank is passed over on all ranks, and the log says why.
        `template` is passed to `loader.load` (a nested state whose tensors say how this rank wants its shards).

        Raises StoreError when the store could not be read (never taken for "no checkpoint"), ResumeMismatchError from
        `check`, RestoreError when generations exist and none of them could be loaded.
        """
        raise NotImplementedError

    def start(self, *, fresh_ok: bool = True) -> None:
        """Collective: claim the next life, start writer, agreement and notice sources.

        With `fresh_ok=False` raises NoGenerationError when `resume` found nothing.
        """
        raise NotImplementedError

    def boundary(self, step: int) -> Decision:
        """Once per optimizer step on every rank, after the step (`step` = optimizer steps done, never going back).

        Returns the same decision on every rank: CONTINUE, SAVE (call `save`, go on), STOP_SAVE (call `save`, then
        `stop`) or STOP_NOW (call `stop`). Costs a lock and an integer when there is nothing to decide.
        """
        raise NotImplementedError

    def save(
        self,
        step: int,
        *,
        shared: Mapping[str, Any],
        local: Mapping[str, Any],
        stable: Iterable[torch.Tensor] = (),
        reason: str = "",
        finished: bool = False,
        wait: bool = False,
    ) -> None:
        """Collective: snapshot `shared` and `local` as generation (life, step); write and commit in the background.

        `shared`: nested dict, its tensors replicated or sharded over the ranks; written once. `local`: nested dict of
        this rank only. `stable`: tensors that nothing changes before `wait_staged()` returns (parameters, optimizer
        state); their copy overlaps what follows. Everything else is copied before this returns.
        A save still in flight is finished first. `wait=True` also finishes this one and consumes its outcome.

        Outcomes of earlier saves are consumed here, on every rank alike: by `settings.on_save_error` a failed one is
        counted and logged, or raised (SaveError); `settings.max_failed_saves` in a row always raise.
        FencedError always raises: a newer life owns the run.
        """
        raise NotImplementedError

    def wait_staged(self) -> None:
        """Wait until every stable tensor is copied; call before anything changes one. Cheap when nothing is staging."""
        raise NotImplementedError

    def drain(self, timeout_s: float | None = None) -> Committed | None:
        """Collective: finish the save in flight and consume its outcome.

        Returns the newest generation committed by this life (None when there is none). On ranks other than 0 the same
        one. Raises as `save` does; DeadlineError when `timeout_s` passes first.
        """
        raise NotImplementedError

    def stop(self, step: int, reason: str) -> int:
        """Collective: finish the save in flight as far as the deadline allows, leave a stop record, meet all ranks.

        Returns the exit code for the process (`settings.exit_code`). Never raises for a failed save: it is logged and
        stands in the stop record.
        """
        raise NotImplementedError

    def close(self) -> None:
        """End threads and the writer of this rank; idempotent, a no-op in a forked child. Waits for no other rank."""
        raise NotImplementedError

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
