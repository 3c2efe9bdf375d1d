"""One accelerator's training: resume, save and stop where the script asks for its next batch, finish.

That request, after an update of the weights, is the one point where the update, the scheduler's step, the zeroing of
gradients and the script's own counting are all done. Inside `optimizer.step` the scheduler would be one step behind.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from accelerate_spot import _compat, capture, refusals
from accelerate_spot.loaders import Kept, Loaders
from accelerate_spot.loops import Counters, Loops, as_items
from accelerate_spot.resizing import GlobalBatch
from accelerate_spot.section import Section
from spot_core.errors import ConfigError, DeadlineError, ResumeMismatchError
from spot_core.manifest import Manifest
from spot_core.policy import Decision, Kind
from spot_core.pytorch import fits, nested
from spot_core.pytorch.session import Resumed, Session
from spot_core.run import Run

log = logging.getLogger(__name__)


@dataclass
class _Held:
    """The state at the end of a pass, kept while the script evaluates."""

    shared: dict[str, Any]
    local: dict[str, Any]
    weight: torch.Tensor


class Job:
    """`steps` around each prepared loader, `epochs` around the loop, `stepped` from the optimizers, `finish`."""

    def __init__(self, accelerator: Any, section: Section) -> None:
        refusals.check_accelerator(accelerator, section.run)
        self.accelerator = accelerator
        self.section = section
        self._run = Run.open(section.run, storage_options=section.settings.storage_options)
        self._session: Session | None = None
        self._group: Any = None
        self._loaders = Loaders(accelerator)
        self._loops = Loops()
        self._resumed: dict[str, Any] | None = None  # what is still to be put back of a loaded generation
        self._loaded = ""
        self._running = False
        self._updates = 0
        self._saved_at = -1
        self._stepped: set[int] = set()
        self._held: _Held | None = None
        self._waiting: Decision | None = None
        self._model = ""
        self._batch = GlobalBatch.of(accelerator)
        self._had_finished = False
        self._moved = False  # the loaded generation is another number of processes'
        self.accumulates = False
        """Whether the script has trained inside `accelerator.accumulate`."""
        self._passed = 0  # while the first batch of a pass that was taken up is out: steps of earlier lives
        self._handles: list[Any] = []

    # -- what the script calls -----------------------------------------------------------------------------------------

    def epochs(self, first: Any, *more: int) -> Iterator[Any]:
        return self._loops.epochs(as_items(first, *more), self.open, self.finish, self._nothing_left)

    def counters(self, **initial: Any) -> Counters:
        if _compat.optimizers(self.accelerator):
            self.open()  # a loop may end by them before it reads a batch
        return self._loops.counters(initial)

    def numbered(self, items: Iterable[Any], start: int = 0) -> Iterator[tuple[int, Any]]:
        """`enumerate` that goes on at the number a batch has in its pass, when the pass is taken up inside."""
        shift = None
        for number, item in enumerate(items, start):
            if shift is None:
                shift = self._passed
            yield number + shift, item

    def left(self) -> None:
        """The epoch loop is behind: if the script left it early, everything is saved now."""
        if self._running and not self._loops.finished:
            self._loops.leave()
            self.finish()

    def finish(self) -> None:
        """Collective: the last generation, committed when this returns."""
        self._loops.finished = True
        self._session_now.wait_staged()
        self._held = None
        if self._stepped:
            self._updates += 1
            self._stepped.clear()
        shared, local = self._capture()
        try:
            self._save(shared, local, reason="the training has finished", finished=True, wait=True)
        except DeadlineError as late:
            # The machine goes first. To leave as if it were finished would end the job without its last generation.
            self._leave(str(late))

    def _nothing_left(self) -> None:
        """An epoch loop was done in an earlier life; in a run that had finished, this is the end."""
        if self._running:
            return
        self._loops.finished = True
        if self._loaded and self.accelerator.is_main_process:
            # The session, which tells of every other resume, was never started.
            log.warning(
                "spot: resumed from step %d, the end of the training: nothing is left to train (generation %s of %s)",
                self._updates, self._loaded, self._run.uri,
            )

    # -- from accelerate's objects -------------------------------------------------------------------------------------

    def steps(self, loader: Any, iterate: Callable[[Any], Iterator[Any]]) -> Iterator[Any]:
        """The loader's own steps, with the place to save and stop between them."""
        if not _compat.optimizers(self.accelerator):
            yield from iterate(loader)  # nothing is trained yet
            return
        self.open()
        kept = self._loaders.find(loader)
        if kept is None:
            yield from iterate(loader)
            return
        self._arrive(kept)
        if kept.over:
            kept.over = False
            return
        kept.live = True
        try:
            for batch in kept.steps(iterate):
                self._passed = kept.passed if kept.given == 1 else 0
                yield batch
                self._passed = 0
                self._boundary(kept)
        finally:
            kept.live = False
        self._session_now.wait_staged()  # what a script does after a pass may change weights

    def stepped(self, optimizer: Any) -> None:
        """A prepared optimizer has made its part of an update (or was kept from it by the gradient scaler)."""
        for number, prepared in enumerate(_compat.optimizers(self.accelerator)):
            if prepared is optimizer:
                self._stepped.add(number)
                return

    # -- resuming ------------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Collective, at the first loop: load the newest generation. Everything is prepared and registered by now."""
        if self._session is not None:
            return
        accelerator = self.accelerator
        refusals.check_prepared(accelerator)
        self._model = capture.fingerprint(accelerator)
        if accelerator.num_processes > 1:
            # A group of our own: the background never meets the training's collectives.
            self._group = dist.new_group(backend="gloo")
        session = Session(
            self._run,
            self.section.settings,
            rank=int(accelerator.process_index),
            world_size=int(accelerator.num_processes),
            group=self._group,
            meta=self._meta,
            check=self._check_same,
        )
        self._session = session
        self._loaders.seed = int(_compat.from_first(_compat.initial_seed()))
        resumed = session.resume(template=lambda: capture.template(accelerator))
        if resumed is not None:
            self._load(resumed)
        self._loaders.take_all()
        if resumed is None or not resumed.finished:
            self._start()
        for optimizer in _compat.optimizers(accelerator):
            inner = _compat.wrapped(optimizer)
            self._handles.append(inner.register_step_pre_hook(lambda *_: session.wait_staged()))

    def _check_same(self, manifest: Manifest) -> None:
        fits.check_same(manifest, self._run.uri, self._model, "accelerate", "training under accelerate_spot")
        saved: Any = manifest.meta["accelerate"]
        was, now = bool(saved.get("sharded", False)), _compat.shards(self.accelerator)
        if was is not now:
            raise ResumeMismatchError(
                f"{self._run.uri} holds the run of a model that was {'sharded' if was else 'whole on every process'}, "
                f"and it is {'sharded' if now else 'whole'} now: their optimizers' states are named otherwise. Nothing "
                "was changed.",
                hint="Start it as before (with or without FSDP), or give the job a run of its own.",
            )

    def _load(self, resumed: Resumed) -> None:
        state = resumed.state
        local = dict(state.nearest)
        self._moved, self._had_finished = not state.same_world, resumed.finished
        self.accumulates = local["accumulates"]
        self._batch = GlobalBatch(**local["global_batch"]).taken_up(
            self.accelerator,
            saved_by=state.world_size,
            on_resize=self.section.settings.on_resize,
            accumulates=self.accumulates,
        )
        capture.restore(self.accelerator, state.shared, local)
        self._loaders.seed = local["seed"]
        self._loops.load(local["loops"])
        self._updates = self._saved_at = local["updates"]
        self._loaded = resumed.generation
        if self._moved:
            # At a save every update is complete: all processes begin to accumulate anew.
            local |= {"micro_step": 0, "rng": None if state.local is None else state.local["rng"]}
        self._resumed = local

    def _start(self) -> None:
        if not self._running:
            self._running = True
            self._session_now.start(state_bytes=capture.expected_bytes(self.accelerator))

    def _arrive(self, kept: Kept) -> None:
        """The script is about to ask `kept` for a batch. When it is the loader that was read at the save: go on there.

        Loaders that are read before it (an evaluation at the start of the script) change nothing.
        """
        local = self._resumed
        if local is not None:
            live = [number for number, state in enumerate(local["loaders"]) if state["live"]]
            if live and kept.number != live[0]:
                return
            self._check_loop(local)
            self._resumed = None
            self._loaders.load(local["loaders"], resized=self._moved)
            capture.restore_late(self.accelerator, local, seed=self._loaders.seed, updates=self._updates)
            if kept.over:  # the evaluation of that pass is yet to come
                shared, _ = self._capture()
                self._held = self._hold(shared, local)
        if not self._loops.finished:
            self._start()

    def _check_loop(self, local: dict[str, Any]) -> None:
        """A loop that begins to count at zero again would train too much."""
        if self._had_finished and not self._loops.known:
            raise ResumeMismatchError(
                f"the training of {self._run.uri} has finished (generation {self._loaded}), and this script does not "
                "say how far its loop has come: it would train all of it again. Nothing was changed.",
                hint="Write `for epoch in accelerate_spot.epochs(N):`, or give the job a run of its own.",
            )
        live = [state for state in local["loaders"] if state["live"]]
        inside = any(state["iteration"] > (1 if state["place"].get("ended") else 0) for state in live)
        if inside and not self._loops.known:
            raise ResumeMismatchError(
                f"generation {self._loaded} was saved in a later pass over the data, and this script does not say in "
                "which one it is: its loop would begin at the first one again. Nothing was changed.",
                hint="Write `for epoch in accelerate_spot.epochs(N):` (import accelerate_spot), or keep the counters "
                "that end the loop in accelerate_spot.state(...).",
            )

    # -- at every step -------------------------------------------------------------------------------------------------

    def _boundary(self, kept: Kept) -> None:
        if not self.accelerator.sync_gradients:
            return  # in the middle of an accumulation: gradients are saved by nobody
        if self._stepped:
            self._after_update(kept)
        elif self._held is not None:
            decision = self._waiting or self._session_now.boundary(self._updates)
            if decision.kind.stops:
                self._stop_while_held(self._held, decision)

    def _after_update(self, kept: Kept) -> None:
        self._start()
        self._updates += 1
        self._held = None
        # A stop that had to wait was decided for another step: whether this one can be saved is another question.
        decision = self._session_now.boundary(self._updates, again=self._waiting is not None)
        self._waiting = None
        state = None
        if decision.kind is not Kind.CONTINUE:
            state = self._capture()
            self._act(decision, *state)
        if self._session_now.untried:
            state = state or self._capture()
            self._session_now.rehearse(**self._given(*state))
        if kept.ended:
            shared, local = state or self._capture()
            self._held = self._hold(shared, nested.frozen(local))
        self._stepped.clear()

    def _hold(self, shared: dict[str, Any], local: dict[str, Any]) -> _Held:
        settled = capture.settled(self.accelerator, shared)
        return _Held(settled, local, capture.weigh(settled))

    def _stop_while_held(self, held: _Held, decision: Decision) -> None:
        """Told to stop during an evaluation: the state is that of the last update, if it is still in place."""
        needed = decision.kind is Kind.STOP_SAVE and self._updates > self._saved_at
        if needed and not self._on_all_ranks(torch.equal(capture.weigh(held.shared), held.weight)):
            if self._waiting is None:
                log.warning("spot: weights or registered objects were changed since the last update (averaged weights "
                            "for an evaluation?): stopping when they are back, or at the next update")
            self._waiting = decision
            return
        self._act(decision, held.shared, held.local)

    def _on_all_ranks(self, mine: bool) -> bool:
        """Collective, at a boundary that all ranks come by."""
        if self._group is None:
            return mine
        everybody = torch.tensor(mine, dtype=torch.int32)
        dist.all_reduce(everybody, dist.ReduceOp.MIN, group=self._group)
        return bool(everybody)

    def _act(self, decision: Decision, shared: dict[str, Any], local: dict[str, Any]) -> None:
        if decision.kind in (Kind.SAVE, Kind.STOP_SAVE) and self._updates > self._saved_at:
            self._save(shared, local, reason=decision.reason, wait=decision.kind is Kind.STOP_SAVE)
        if decision.kind.stops:
            self._leave(decision.reason)

    def _leave(self, reason: str) -> NoReturn:
        session = self._session_now
        code = session.stop(self._updates, reason)
        session.close()
        raise SystemExit(code)

    def _capture(self) -> tuple[dict[str, Any], dict[str, Any]]:
        shared, local = capture.capture(self.accelerator, self._stepped)
        local |= {
            "loaders": self._loaders.state(),
            "seed": self._loaders.seed,
            "loops": self._loops.state(),
            "updates": self._updates,
            "global_batch": self._batch.to_state(),
            "accumulates": self.accumulates,
        }
        return shared, local

    def _save(
        self, shared: dict[str, Any], local: dict[str, Any], *, reason: str, finished: bool = False, wait: bool = False
    ) -> None:
        self._saved_at = self._updates
        state = self._given(shared, local)
        if wait:
            state["stable"] = []
        self._session_now.save(self._updates, **state, reason=reason, finished=finished, wait=wait)

    def _given(self, shared: dict[str, Any], local: dict[str, Any]) -> dict[str, Any]:
        stable, frozen = capture.stable_tensors(self.accelerator, shared), capture.frozen_tensors(self.accelerator)
        return {"shared": shared, "local": local, "stable": stable, "frozen": frozen}

    # -- shorthand -----------------------------------------------------------------------------------------------------

    @property
    def _session_now(self) -> Session:
        if self._session is None:
            raise ConfigError("the training has not begun: no prepared loader was read yet")
        return self._session

    def _meta(self) -> dict[str, Any]:
        accelerator = self.accelerator
        return {
            "accelerate": {
                "model": self._model,
                "version": _compat.VERSION,
                "processes": int(accelerator.num_processes),
                "sharded": _compat.shards(accelerator),
                "accumulation": _compat.accumulation(accelerator),
            },
            "position": {"updates": self._updates, **self._loaders.position()},
        }

    def close(self) -> None:
        """End the session of this rank; idempotent, waits for no other."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._session is not None:
            self._session.close()
