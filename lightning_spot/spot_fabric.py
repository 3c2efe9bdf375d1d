"""A loop of one's own with Lightning Fabric, resumed exactly: `SpotFabric` has the verbs, the loop calls them.

::

    fabric.launch()
    model, optimizer = fabric.setup(model, optimizer)
    with SpotFabric(fabric, "/data/runs/a", interval="10min") as spot:
        loader = spot.loader(loader)
        state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "epoch": 0, "step": 0}
        spot.resume(state)
        while state["epoch"] < 10:
            for batch in loader:
                ...
                state["step"] += 1
                spot.step(state)
            state["epoch"] += 1
        spot.finish(state)
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from lightning_spot import _compat
from lightning_spot.fabric_state import FabricState
from spot_core.config import Settings
from spot_core.errors import ConfigError, ResumeMismatchError
from spot_core.manifest import Manifest
from spot_core.policy import Kind
from spot_core.pytorch import fits, rng
from spot_core.pytorch.position import ResumableView, deal_of, resumable
from spot_core.pytorch.session import Resumed, Session
from spot_core.pytorch.streams import mix
from spot_core.run import Run

__all__ = ["SpotFabric"]


class SpotFabric:
    """One training loop on a launched `Fabric`; every method is called on every rank.

    Parameters
    ----------
    fabric: after `launch`; single device, DDP, FSDP or ModelParallel (else ConfigError).
    run: folder or URI; None takes SPOT_RUN.
    settings: keywords of `spot_core.config.Settings`; what is left out is taken from SPOT_* variables.

    The state is a dict of the caller's: modules and optimizers as `fabric.setup` gave them, anything else that has
    `state_dict` and `load_state_dict`, and plain values, which `resume` puts into the dict. It needs an entry "step",
    the number of optimizer steps done.
    """

    def __init__(self, fabric: Any, run: str | os.PathLike[str] | None = None, **settings: Any) -> None:
        if _compat.fabric_has_engine(fabric):
            raise ConfigError(
                f"SpotFabric does not support {type(fabric.strategy).__name__}, which keeps its state in an engine of "
                "its own.",
                hint='Use strategy="ddp", "fsdp", a ModelParallelStrategy or a single device.',
            )
        self._fabric = fabric
        self._data_rank, self._data_ranks = _compat.data_ranks(fabric)
        self._settings = Settings.from_env(**settings)
        self._uri = fits.resolve_run(run)
        self._seed = int(fabric.broadcast(torch.initial_seed() % 2**62))
        self._views: list[ResumableView] = []
        self._wrapped: list[Any] = []
        self._handles: list[Any] = []
        self._state: FabricState | None = None
        self._session: Session | None = None
        self._finished_at = -1  # the step at which an earlier life finished the loop

    # -- coming up ------------------------------------------------------------------------------------------------

    def loader(self, loader: Any) -> Any:
        """`fabric.setup_dataloaders`, and a place that is saved and resumed. Call it before `resume`, in one order.

        Raises ConfigError after `resume`.
        """
        if self._session is not None:
            raise ConfigError("SpotFabric.loader after resume: the place of this loader would not be resumed.")
        wrapped = self._fabric.setup_dataloaders(loader)
        self._wrapped.append(wrapped)
        return wrapped

    def resume(self, state: MutableMapping[str, Any]) -> bool:
        """Put the newest good generation into `state`; False when the run has none. Claims the run's next life.

        Raises ConfigError for a state without "step", ResumeMismatchError when the run is of another state (entries,
        names, shapes, loaders), TopologyError for another number of ranks where that cannot be, and what
        `Session.resume` raises.
        """
        if self._session is not None:
            raise ConfigError("SpotFabric.resume is called once, before the loop")
        self._state = mine = FabricState.of(self._fabric, state)
        fabric, model = self._fabric, mine.fingerprint()
        about = {"model": model, "names": sorted(state)}

        def check(manifest: Manifest) -> None:
            fits.check_same(manifest, self._uri, model, "fabric", "SpotFabric")

        self._session = session = Session(
            Run.open(self._uri, storage_options=self._settings.storage_options),
            self._settings,
            rank=fabric.global_rank,
            world_size=fabric.world_size,
            group=dist.new_group(backend="gloo") if fabric.world_size > 1 else None,
            meta=lambda: {"fabric": about},
            check=check,
        )
        resumed = session.resume(template=mine.template)
        if resumed is not None:
            self._put(resumed, state)
            self._seed = int(resumed.state.nearest["seed"])
            self._finished_at = resumed.step if resumed.finished else -1
        self._place_loaders(resumed)
        for optimizer in mine.optimizers.values():
            self._handles.append(optimizer.register_step_pre_hook(lambda *_: session.wait_staged()))
        session.start(state_bytes=mine.expected_bytes())
        if resumed is not None:
            own = resumed.state.local
            same = resumed.state.world_size == fabric.world_size and _data_ranks_of(resumed) == self._data_ranks
            saved = own["rng"] if own is not None and same else None
            rng.resume(saved, seed=self._seed, step=resumed.step, rank=self._data_rank)
        return resumed is not None

    def _put(self, resumed: Resumed, state: MutableMapping[str, Any]) -> None:
        assert self._state is not None
        saved = resumed.meta["fabric"]["names"]
        if saved != sorted(state):
            raise ResumeMismatchError(
                f"Generation {resumed.generation} of {self._uri} has the entries {saved}, and the state has "
                f"{sorted(state)}.",
                hint="Give the state the entries that the run was started with, or choose another run folder.",
            )
        self._state.put(resumed.state.shared, resumed.state.nearest, state)

    def _place_loaders(self, resumed: Resumed | None) -> None:
        saved = [] if resumed is None else resumed.state.nearest["loaders"]
        if resumed is not None and len(saved) != len(self._wrapped):
            raise ResumeMismatchError(
                f"Generation {resumed.generation} of {self._uri} has the places of {len(saved)} loaders, and the "
                f"script made {len(self._wrapped)}.",
                hint="Make the loaders that the run was started with, in the same order, by SpotFabric.loader.",
            )
        for number, wrapped in enumerate(self._wrapped):
            known = saved[number] if saved else None
            view = resumable(
                _compat.inside_fabric_loader(wrapped),
                seed=mix(self._seed, number),
                rank=self._data_rank,
                world_size=self._data_ranks,
                deal=None if known is None or resumed is None else self._deal(known["place"], resumed),
                by_index=True,
            )
            if known is not None:
                view.load_state_dict(known["place"])
                _compat.set_fabric_passes(wrapped, max(known["passes"] - 1, 0))  # the pass is opened once more
            _compat.put_inside_fabric_loader(wrapped, view)
            self._views.append(view)

    def _deal(self, place: Mapping[str, Any], resumed: Resumed) -> Any:
        saved, world = _data_ranks_of(resumed), self._data_ranks
        if saved != world and self._settings.on_resize == "keep_global_batch":
            raise ConfigError(
                f"The data of the run were shared out to {saved} ranks and are to {world} now. A loop of one's own "
                "accumulates its gradients itself, so SpotFabric cannot keep the global batch.",
                hint=f"Set on_resize='accept', or share the data out to {saved} ranks.",
            )
        return deal_of(
            place, on_resize=self._settings.on_resize, saved=saved, world=world, speaks=self._fabric.is_global_zero
        )

    # -- in the loop ----------------------------------------------------------------------------------------------

    def step(self, state: Mapping[str, Any]) -> None:
        """Once after each optimizer step. Saves when it is time; raises SystemExit with the exit code at a stop."""
        step, session = int(state["step"]), self._running()
        decision = session.boundary(step)
        if decision.kind in (Kind.SAVE, Kind.STOP_SAVE):
            self._save(state, reason=decision.reason, wait=decision.kind is Kind.STOP_SAVE)
        elif session.untried and not decision.kind.stops:
            session.rehearse(**self._parts(state))
        if decision.kind.stops:
            code = session.stop(step, decision.reason)
            self.close()
            raise SystemExit(code)

    def finish(self, state: Mapping[str, Any]) -> None:
        """After the last step: the final generation, committed when this returns; only one, however often restarted."""
        if int(state["step"]) == self._finished_at:
            return
        self._save(state, reason="the loop has finished", finished=True, wait=True)

    def _save(self, state: Mapping[str, Any], *, reason: str, finished: bool = False, wait: bool = False) -> None:
        given = self._parts(state)
        if wait:
            given["stable"] = []
        self._running().save(int(state["step"]), **given, reason=reason, finished=finished, wait=wait)

    def _parts(self, state: Mapping[str, Any]) -> dict[str, Any]:
        mine = FabricState.of(self._fabric, state)
        shared, local = mine.capture()
        local |= {
            "seed": self._seed,
            "data_ranks": self._data_ranks,
            "loaders": [
                {"place": view.state_dict(), "passes": _compat.fabric_passes(wrapped)}
                for view, wrapped in zip(self._views, self._wrapped, strict=True)
            ],
            "rng": rng.capture(),
        }
        return {"shared": shared, "local": local, "stable": mine.stable(), "frozen": mine.frozen()}

    def _running(self) -> Session:
        if self._session is None:
            raise ConfigError("SpotFabric: call resume(state) before the loop")
        return self._session

    # -- going down -----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Idempotent; waits for no other rank."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._session is not None:
            self._session.close()

    def __enter__(self) -> SpotFabric:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _data_ranks_of(resumed: Resumed) -> int:
    """How many ranks the data were shared out to; generations that do not say are of ranks that each had its own."""
    return int(resumed.state.nearest.get("data_ranks", resumed.state.world_size))
