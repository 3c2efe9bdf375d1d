"""One life of a run: the only place that calls resume, save, commit, prune and stop in their order.

Every method marked *collective* is called by every rank, in the same order. What happens in the background (write,
report, commit) uses the channel only, never a process group, so it cannot meet the training's collectives.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from spot_core import layout, memory, signals
from spot_core.config import Settings
from spot_core.errors import ConfigError, DeadlineError, NoGenerationError, SaveError
from spot_core.generation import Committed
from spot_core.interval import Rule, parse_interval
from spot_core.layout import GenerationId
from spot_core.manifest import Manifest
from spot_core.policy import CONTINUE, EXIT_S, Decision, Kind
from spot_core.pytorch import loader
from spot_core.pytorch.agree import Agreed, Request
from spot_core.pytorch.arrival import arrive, await_ranks
from spot_core.pytorch.bases import Held, Key
from spot_core.pytorch.channel import Channel, ChannelError
from spot_core.pytorch.committer import Patience
from spot_core.pytorch.lead import Lead
from spot_core.pytorch.live import Live, claim_info, claim_life, close_at_exit
from spot_core.pytorch.local_tier import bring
from spot_core.pytorch.outcome import Outcome, Tally
from spot_core.pytorch.parting import Parting
from spot_core.pytorch.ranks import Ranks
from spot_core.pytorch.readiness import Readiness
from spot_core.pytorch.resuming import Resumed, Search, announce
from spot_core.pytorch.snapshot import Opened, begin_snapshot, rehearse
from spot_core.run import Run, Writer
from spot_core.signals.posix_signals import ignore_at_exit
from spot_core.tiers import LocalTier

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

__all__ = ["Patience", "Resumed", "Session"]

log = logging.getLogger(__name__)

_NEAR_S = 600.0
"""A notice whose deadline is further away does not hurry the agreement."""


class Session:
    """One life of `run` on one rank.

    Parameters
    ----------
    run: the run (`Run.open(uri)`); every rank opens the same URI.
    settings: validated values, the same on every rank.
    rank, world_size: global rank and number of ranks.
    group: a gloo group of all ranks that nobody else uses; needed when world_size > 1 (ConfigError otherwise).
    meta: called for each save on rank 0, by the thread that calls `save`; its JSON goes into the manifest's meta beside
        what the session writes itself (code, versions, settings, reason, finished, history, pace).
    check: called on every rank with the manifest of the generation about to be loaded; may raise ResumeMismatchError
        (the run in this folder is not this one), which is raised on every rank and refuses to start.
    sources: where notices come from; None for what `settings.sources` says.
    patience: bounds of all waits.

    Life of the object: `resume()` once, `start()` once, then `boundary()` per step and `save()` when it says so,
    `stop()` after a stopping decision, `close()` always (also by `with`).

    Raises ConfigError for settings that cannot work together, before anything is touched.
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
        sources: Sequence[signals.Source] | None = None,
        patience: Patience | None = None,
    ) -> None:
        self._patience = patience or Patience()
        self._ranks = Ranks(rank, world_size, group)
        self._interval = parse_interval(settings.interval)
        self._counts_steps = self._interval.rule is Rule.STEPS
        if sources is None:
            signals.parse(settings.sources)
        if settings.window_s <= 2 * EXIT_S:
            raise ConfigError(
                f"window_s={settings.window_s:g} is shorter than the margin: give more than {2 * EXIT_S:g} s, or no "
                "save could ever be started on a notice"
            )
        self._run, self._settings = run, settings
        self._clock = run.clock
        self._meta, self._check, self._sources = meta, check, sources
        self._tally = Tally(
            on_save_error=settings.on_save_error, max_failed=settings.max_failed_saves, speaks=rank == 0
        )
        self._resumed: Committed | None = None
        self._from_local, self._durable = False, False
        self._held: Mapping[Key, Held] = {}
        self._damaged: list[GenerationId] = []
        self._ready = Readiness(run, settings, self._ranks)
        self._live: Live | None = None
        self._lead: Lead | None = None
        self._saves = 0
        self._last_boundary: int | None = None
        self._sub = 0
        self._until: float | None = None  # unix s, from the decision that stops
        self._alone = False  # the ranks are out of step: no joint call may be tried
        self._closed = False
        self._pid = os.getpid()
        close_at_exit(self)

    @property
    def life(self) -> int:
        """Number of this life; 0 before `start`."""
        return 0 if self._live is None else self._live.life

    @property
    def watcher(self) -> signals.Watcher | None:
        """The notice watcher; None before `start`. An adapter may let its signal source take signals again."""
        return None if self._live is None else self._live.watcher

    # -- coming up ------------------------------------------------------------------------------------------------

    def resume(self, *, template: Any = None) -> Resumed | None:
        """Collective: load the newest good generation, the same on every rank; None when the run has none.

        A generation that fails verification or loading on any rank is passed over on all ranks, and the log says why.
        `template` is passed to `loader.load` (a nested state whose tensors say how this rank wants its shards), or
        makes that state when a generation is found: called on every rank.

        With `settings.preflight` the store is tried first (see `preflight.examine_store`).

        Raises StoreError when the store could not be read (never taken for "no checkpoint") or did not permit what a
        run needs, ResumeMismatchError from `check`, RestoreError on all ranks that came when another one did not within
        `patience.arrive_s`, dies or gets stuck on the way, which it names, RestoreError when generations exist and none
        of them could be loaded.
        """
        ranks = self._ranks
        ranks.place = arrive(ranks, self._patience.arrive_s, self._patience.silent_s, self._clock)
        self._ready.access()
        search = Search(
            self._run,
            ranks,
            lambda verified: loader.load(
                verified.store,
                verified,
                rank=ranks.rank,
                world=ranks.world_size,
                template=template() if callable(template) else template,
                allow_pickle=self._settings.allow_pickle,
                progress=ranks.tick,
            ),
            self._check,
            self._settings.local,
        )
        found = search.newest()
        self._damaged = search.damaged
        if found is None:
            return None
        committed, state = found.committed, found.state
        self._resumed = committed
        # Not the state itself: it is the caller's, and large.
        self._from_local, self._durable = found.local is not None, found.durable
        self._held = state.held
        return Resumed(state, committed.id.step, committed.id.life, committed.id.name, committed.manifest.meta)

    def start(self, *, fresh_ok: bool = True, state_bytes: int | None = None) -> None:
        """Collective: claim the next life, start writer, agreement and notice sources.

        `state_bytes`: what this rank's snapshot will take, if known; then its memory is taken now, in the background,
        and the log says whether it fits; one that can never fit is refused (StoreError).
        With `fresh_ok=False` raises NoGenerationError when `resume` found nothing.
        Call it in the main thread (signals), after other handlers of signals were installed.
        """
        if self._live is not None or self._closed:
            raise ConfigError("a session starts once")
        if self._resumed is None and not fresh_ok:
            raise NoGenerationError(
                f"{self._run.uri} has no generation to resume from, and a fresh start was ruled out."
            )
        self._ready.room(state_bytes)
        ranks = self._ranks
        life, writers, local, refers = claim_life(self._run, self._settings, ranks, self._resumed)
        self._held = self._held if refers else {}
        channel = Channel.open(ranks, clock=self._run.clock)
        ranks.together(lambda: self._come_alive(life, channel, writers, local))
        if ranks.rank == 0:
            where = None
            if local is not None and self._from_local:
                where = f"{'from' if self._durable else 'only in'} the local tier {local.store.uri}"
            announce(self._run.uri, None if self._resumed is None else self._resumed.id, life, local=where)
        if self._resumed is not None and self._from_local and not self._durable:
            self._bring(ranks.from_first(lambda: self._leading().take_up()))
        ranks.part()
        if state_bytes is not None:
            self.reserve(state_bytes)

    def reserve(self, state_bytes: int) -> None:
        """Take the memory for a snapshot of `state_bytes` on this rank in the background; says whether it fits."""
        memory.fits(state_bytes)
        self._started().stager.reserve(state_bytes)

    def _bring(self, word: Mapping[str, Any] | None) -> bool:
        """On every rank, by rank 0's word: what is only local goes to the store. False when there is nothing."""
        if word is None:
            return False
        number, self._saves = self._saves, self._saves + 1
        bring(self._started(), number, word)
        if self._lead is not None:
            self._lead.follow(number)
        return True

    def _come_alive(self, life: int, channel: Channel, writers: list[Writer], local: LocalTier | None) -> None:
        # Kept as soon as it exists: `close` has to find it when another rank fails here.
        self._live = Live.open(
            self._run,
            self._settings,
            self._ranks,
            life,
            channel,
            sources=self._sources,
            patience=self._patience,
            notify=self.notify,
            local=local,
            held=self._held,
        )
        for writer in writers:  # rank 0's one
            self._lead = Lead(
                self._run,
                self._settings,
                writer,
                channel,
                self._live.bulletin,
                self._tally,
                resumed=self._resumed,
                damaged=self._damaged,
                patience=self._patience,
                local=local,
                local_copy=self._resumed if self._from_local else None,
                durable_copy=self._resumed.id if self._resumed is not None and self._durable else None,
            )
        self._live.watcher.start()

    # -- at every step --------------------------------------------------------------------------------------------

    def boundary(self, step: int, sub: int | None = None, *, again: bool = False) -> Decision:
        """Once per optimizer step on every rank, after the step (`step` = optimizer steps done, never going back).

        Returns the same decision on every rank: CONTINUE, SAVE (call `save`, go on), STOP_SAVE (call `save`, then
        `stop`) or STOP_NOW (call `stop`). Costs a lock and an integer when there is nothing to decide.

        Calls with the same step again are places inside it where the run may stop too, such as the batches of a
        validation; every rank has to come by the same ones. `sub` numbers them, from 0 for the step itself; None
        counts the calls. With `again`, given on every rank, the decision is taken anew for this step: the last one was
        to stop, at a place where the caller could not save.

        Raises, on every rank at the same boundary, what a failed save has to raise (see `save`).
        """
        live = self._live
        if live is None:
            raise ConfigError("boundary before start")
        before, self._last_boundary = self._last_boundary, step
        if sub is None:
            sub = self._sub + 1 if step == before else 0
        self._sub = sub
        agreed = live.agreement.boundary(step, sub)
        step_due = self._counts_steps and sub == 0 and self._interval.passes(before, step)
        if agreed is None and not step_due and not again:
            if self._lead is not None and self._lead.wants_a_look(inside=sub > 0):
                live.agreement.request(Request("look"))
            return CONTINUE
        return self._look(live, step, agreed, step_due=step_due, inside=sub > 0)

    def notify(self, notice: signals.Notice) -> None:
        """Tell all ranks of a notice, from any thread of any rank; the watcher of the session does."""
        live = self._live
        if live is None or os.getpid() != self._pid:
            return
        deadline = None
        if notice.stops:
            now = self._clock.now()
            deadline = now + self._settings.window_s if notice.deadline is None else notice.deadline
            deadline = deadline if deadline - now < _NEAR_S else None
        live.agreement.request(Request("notice", notice.to_json(), deadline))
        live.bulletin.post(notice)

    def _look(self, live: Live, step: int, agreed: Agreed | None, *, step_due: bool, inside: bool) -> Decision:
        """All ranks are at this boundary: rank 0 decides for all, and outcomes of saves are taken."""
        if agreed is not None and agreed.aborted:
            return self._without_agreement(agreed)
        requests = () if agreed is None else agreed.requests
        try:
            word = live.joint.tell(lambda: self._leading().look(step, requests, step_due=step_due, inside=inside))
        except ChannelError as error:
            return self._out_of_step(str(error))
        self._take(word)
        self._bring(word["again"])
        kind = Kind(word["kind"])
        if kind.stops:
            self._until = word["deadline"]
            if self._ranks.rank == 0:
                log.warning("spot: stopping at step %d: %s", step, word["reason"])
        # To the caller, draining is a stop without a save: `stop` finishes what is in flight.
        return Decision(Kind.STOP_NOW if kind is Kind.DRAIN else kind, word["reason"], word["deadline"])

    def _without_agreement(self, agreed: Agreed) -> Decision:
        if agreed.lost or agreed.urgent:
            return self._out_of_step(agreed.aborted)
        log.warning("spot: rank %d: no agreement on a save, training goes on: %s", self._ranks.rank, agreed.aborted)
        if self._lead is not None:
            self._lead.pilot.gave_up()
        return CONTINUE

    def _out_of_step(self, why: str) -> Decision:
        self._alone = True
        return Decision(Kind.STOP_NOW, f"the ranks cannot agree on a step to save at: {why}", self._until)

    @property
    def untried(self) -> bool:
        """No state was given to this life yet: time for `rehearse`."""
        return self._live is not None and not self._live.tried

    def rehearse(
        self,
        *,
        shared: Mapping[str, Any],
        local: Mapping[str, Any],
        stable: Iterable[torch.Tensor] = (),
        droppable: Collection[str] = (),
        frozen: Iterable[torch.Tensor] = (),
    ) -> None:
        """Take apart and plan a state as `save` would, without saving it; once, after the first optimizer step.

        The first save is then as quick as the others, and a state that could not be loaded back is refused
        (ConfigError) before hours of training depend on it. Not collective.
        """
        allow_pickle = self._settings.allow_pickle
        rehearse(self._started(), shared, local, stable, droppable, frozen=frozen, allow_pickle=allow_pickle)

    # -- saving ---------------------------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        *,
        shared: Mapping[str, Any],
        local: Mapping[str, Any],
        stable: Iterable[torch.Tensor] = (),
        droppable: Collection[str] = (),
        frozen: Iterable[torch.Tensor] = (),
        reason: str = "",
        finished: bool = False,
        wait: bool = False,
    ) -> None:
        """Collective: snapshot `shared` and `local` as generation (life, step); write and commit in the background.

        `shared`: nested dict, its tensors replicated or sharded over the ranks; written once. `local`: nested dict of
        this rank only. `stable`: tensors that nothing changes before `wait_staged()` returns (parameters, optimizer
        state); their copy overlaps what follows. Everything else is copied before this returns.
        `frozen`: tensors of `shared` that are not expected to change (those that no optimizer trains): one that is,
        byte for byte, what the last committed generation holds is not written again, but referred to.
        `droppable`: dotted paths in `shared` under which a value that cannot be saved is left out (see `state.split`).
        A save still in flight is finished first. `wait=True` also finishes this one and takes its outcome; after a
        stopping decision it waits no longer than the deadline, and leaves the outcome to `stop`. If a stopping notice
        comes and the one in flight leaves no time for another, nothing is saved: the next boundary stops the run.
        A step that this life has committed already is not saved again; with `finished=True` it is, as the first
        generation of one more life, since a generation is never overwritten.

        Outcomes of earlier saves are taken here, on every rank alike: by `settings.on_save_error` a failed one is
        counted and logged, or raised (SaveError); more than `settings.max_failed_saves` in a row always raise.
        FencedError always raises: a newer life owns the run.

        Raises DeadlineError, on every rank, when `wait=True` outlasts a stopping notice that no boundary has heard of
        yet (call `stop`); SaveError, on every rank, when the states of the ranks do not fit together; ConfigError for
        a state that could not be loaded back (SaveError on the ranks where it could). A rank that does not come within
        `patience.arrive_s` is named in a SaveError on all that came; the ranks are out of step then.
        """
        live = self._started()
        called = self._clock.monotonic()
        theirs: dict[str, Any] = {}

        def open_save() -> dict[str, Any]:
            await_ranks(live.joint, step, self._patience.arrive_s)
            theirs.update(self._meta() if self._meta is not None else {})
            return self._leading().open_save(
                step,
                finished=finished,
                wait=wait,
                claim_info=claim_info(self._ranks.world_size, self._resumed),
                left_s=None if self._until is None else self._left_s(),
            )

        if self._lead is None:
            live.joint.arrive(self._patience.arrive_s)
        word = live.joint.tell(open_save)
        self._take(word)
        if word["gen"] is None:
            if wait and self._until is None:
                self._raise_late(word)
            return
        began = self._clock.monotonic()
        live.life = word["gen"][0]
        gen, number = GenerationId(*word["gen"]), self._saves
        self._saves += 1
        target = layout.part_target(gen, word["write_id"], self._ranks.rank)
        opened = Opened(number, target, word["drain"], tuple(word["spare"]), tuple(word["extra"]))
        allow_pickle = self._settings.allow_pickle
        share = begin_snapshot(live, opened, shared, local, stable, droppable, frozen=frozen, allow_pickle=allow_pickle)
        if self._lead is not None:
            meta = {**theirs, "reason": reason, "finished": finished}
            blocked_s = self._clock.monotonic() - called
            self._lead.take_off(number, share, live.stager, began=began, blocked_s=blocked_s, meta=meta)
        live.stager.go()
        if wait and self._until is None:
            self.drain()
        elif wait:
            left_s = self._left_s()
            limit_s = left_s + self._patience.stop_s
            live.joint.tell(lambda: {"landed": self._leading().land(left_s)}, timeout_s=limit_s)

    def wait_staged(self) -> None:
        """Wait until every stable tensor is copied; call before anything changes one. Cheap when nothing is staging."""
        live = self._live
        if live is None:
            return
        if self._lead is None or live.stager.staged.is_set():
            live.stager.wait_staged()
        else:
            began = self._clock.monotonic()
            live.stager.wait_staged()
            self._lead.waited_for_staging(self._clock.monotonic() - began)
        live.given = None

    def drain(self, timeout_s: float | None = None) -> Committed | None:
        """Collective: finish the save in flight and take its outcome.

        Returns the newest generation committed by this life (None when there is none), on every rank the same one.
        Raises as `save` does; DeadlineError, on every rank, when `timeout_s` passes first, or without one the time that
        a stopping notice leaves (the save goes on). After the latter only `stop` is of use.
        """
        live = self._started()
        while True:
            word = live.joint.tell(lambda: self._leading().drain(timeout_s))
            live.joint.settle(self._patience.stop_s)
            self._take(word)
            self._raise_late(word)
            if not self._bring(word["again"]):
                return self._tally.newest

    def _raise_late(self, word: Mapping[str, Any]) -> None:
        if word.get("late"):
            self._until = word["until"] if self._until is None else self._until
            raise DeadlineError(word["late"])

    def _take(self, word: Mapping[str, Any]) -> None:
        """On every rank, at the same call: count or raise what rank 0 told of."""
        if self._lead is not None:
            self._lead.heard()
        for outcome in word["outcomes"]:
            self._tally.take(Outcome.from_json(outcome))
        newest = self._tally.newest
        if self._live is not None and newest is not None:
            self._live.newest, self._live.relay.lent = newest, newest.manifest.bases

    # -- going down -----------------------------------------------------------------------------------------------

    def stop(self, step: int, reason: str) -> int:
        """Collective: finish the save in flight as far as the deadline allows, leave a stop record, meet all ranks.

        Returns the exit code for the process (`settings.exit_code`). Never raises for a failed save: it is logged and
        the stop record says what is saved. Being told to stop once more changes nothing about the exit (see
        `ignore_at_exit`).
        """
        live, code = self._started(), self._settings.exit_code
        ignore_at_exit()
        if self._alone:
            log.error("spot: rank %d leaves at step %d without a joint save: %s", self._ranks.rank, step, reason)
            return code
        parting = Parting(live, self._lead, self._left_s, self._patience.stop_s)
        parting.leave(step, reason, code, drain_on=self._bring)
        return code

    def close(self) -> None:
        """End threads and writer of this rank; idempotent, a no-op in a forked child. Does nothing joint.

        A save in flight gets `patience.close_s` to finish, after a stop only what is left until its deadline.
        """
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        self._ranks.part()
        live = self._live
        if live is None:
            return
        close_s = self._patience.close_s if self._until is None else min(self._patience.close_s, self._left_s())
        live.quiet()
        if self._lead is not None:
            self._lead.committer.close(close_s)
        live.close(close_s if self._lead is None else 0.0)
        if self._lead is not None:
            self._lead.committer.join()

    def _left_s(self) -> float:
        """Seconds that saving may still take; the writing bound when no notice named a deadline."""
        return self._patience.write_s if self._until is None else max(0.0, self._until - self._clock.now())

    # -- shorthand ------------------------------------------------------------------------------------------------

    def _started(self) -> Live:
        if self._live is None or self._closed:
            raise SaveError("The session is not running: call start first, and nothing after close.")
        return self._live

    def _leading(self) -> Lead:
        assert self._lead is not None, "only rank 0 leads"
        return self._lead

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
