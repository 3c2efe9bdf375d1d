"""What only rank 0 does: decide for all, begin generations, follow the save in flight, write the stop record.

Its answers go to the other ranks as the words of `Joint`; nothing here talks to them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Literal

from spot_core import signals
from spot_core.clock import Clock
from spot_core.config import Settings
from spot_core.errors import SpotError, StoreError
from spot_core.estimate import Estimator
from spot_core.generation import Committed, Open
from spot_core.interval import parse_interval
from spot_core.launch.stoprecord import StopRecord, write_stop
from spot_core.layout import GenerationId
from spot_core.policy import CONTINUE, Kind
from spot_core.pytorch import history
from spot_core.pytorch.agree import Request
from spot_core.pytorch.bulletin import Bulletin
from spot_core.pytorch.channel import Channel, ChannelError
from spot_core.pytorch.committer import Committer, Flight, Patience
from spot_core.pytorch.describe import describe
from spot_core.pytorch.outcome import Outcome, Tally
from spot_core.pytorch.pilot import Pilot
from spot_core.pytorch.relay import Share
from spot_core.pytorch.stage import Stager
from spot_core.run import Run, Writer
from spot_core.tiers import KEPT, LocalTier

log = logging.getLogger(__name__)

_LOOK_S = 0.25


class Lead:
    """Rank 0 of a session, from `start` on. Only `save_ended` is called from another thread."""

    def __init__(
        self,
        run: Run,
        settings: Settings,
        writer: Writer,
        channel: Channel,
        bulletin: Bulletin,
        tally: Tally,
        *,
        resumed: Committed | None,
        damaged: list[GenerationId],
        patience: Patience,
        local: LocalTier | None = None,
        local_copy: Committed | None = None,
        durable_copy: GenerationId | None = None,
    ) -> None:
        self._local = local
        self._local_writer: Writer | None = None if local is None else writer.at(local.store)
        self._local_copies = [] if local_copy is None else [local_copy.id]  # committed ones, newest first
        self._newest_local = local_copy
        # Those whose way to the store was begun, whatever came of it.
        self._tried = set() if durable_copy is None else {durable_copy}
        self._called_for: GenerationId | None = None
        self._durable_copy = durable_copy  # what this life was resumed from, if the run's store has it
        self._run = run
        self._clock: Clock = run.clock
        self._bulletin = bulletin
        self._tally = tally
        self._description = describe(settings)
        self._opened: Open | None = None
        self._flights: list[Flight] = []  # those that not every rank has heard the end of, oldest first
        self._drains = True
        self._refresh = False
        estimator = _estimator(run, resumed, writer.life, channel.world_size)
        self.pilot = Pilot(parse_interval(settings.interval), estimator, run.clock, window_s=settings.window_s)
        self.pilot.tiered = local is not None
        self.committer = Committer(
            channel,
            writer,
            settings.retention,
            damaged=damaged,
            patience=patience,
            clock=run.clock,
            ended=self._save_ended,
            tiered=local is not None,
        )

    def wants_a_look(self, *, inside: bool) -> bool:
        """At each boundary, cheap: whether to call all ranks together. `inside` a step only a stop is worth it."""
        if self._refresh:
            self.settle()
        left = None if inside else self._left_behind()
        if left is not None and left.id != self._called_for:
            self._called_for = left.id  # once
            return True
        return self.pilot.wants_a_look(self._in_flight_s(), room=self._room(), stops_only=inside)

    def look(self, step: int, requests: tuple[Request, ...], *, step_due: bool, inside: bool) -> dict[str, Any]:
        """The word for a boundary where all ranks are: the decision, and outcomes to take."""
        for request in requests:
            if request.kind == "notice":
                self.pilot.heard(signals.Notice.from_json(request.payload))
        outcomes = self.settle()
        decision = self.pilot.decide(step, step_due=step_due, in_flight_s=self._in_flight_s(), room=self._room())
        if inside and decision.kind is Kind.SAVE:
            decision = CONTINUE  # it waits for the end of the step
        saves = decision.kind in (Kind.SAVE, Kind.STOP_SAVE)
        return {
            "again": None if saves else self.take_up(),
            "kind": decision.kind.value,
            "reason": decision.reason,
            "deadline": decision.deadline,
            "outcomes": _json(outcomes),
        }

    def open_save(
        self, step: int, *, finished: bool, wait: bool, claim_info: Mapping[str, Any], left_s: float | None
    ) -> dict[str, Any]:
        """The word at the start of a save: finish what is in flight, begin the generation; "gen" None for no save.

        With `left_s` the job has to leave after so many seconds: what is in flight gets those that this save can spare.
        A notice that comes meanwhile does the same.
        With a local tier, a save that nobody waits for (`wait`, `finished`) only needs the memory of the one before; it
        stays local ("drain" False) while that is still on its way to the store, as does one that has no time for more.
        """
        spare_s = self.pilot.timing.save_s
        self._drains = True
        if self._local is not None and left_s is None and not (wait or finished):
            free = self._wait("landed", None, spare_s=spare_s)
            self._drains = self._in_flight_s() is None
        else:
            free = self.land(None if left_s is None else max(0.0, left_s - spare_s), spare_s=spare_s)
            if not free and self._local is not None:
                free, self._drains = self._wait("landed", 0.0), False
        if not free:
            late = f"step {step} is not saved: the save in flight leaves no time for it"
            log.error("spot: %s", late)
            return {"outcomes": [], "gen": None, **self._late(late)}
        outcomes = self.settle()
        word: dict[str, Any] = {"outcomes": _json(outcomes), "gen": None}
        if any(self._tally.must_raise(outcome) for outcome in outcomes):
            return word
        newest = self._newest(outcomes)
        if newest is not None and newest.id.step == step:
            if not finished or newest.manifest.finished:
                log.debug("step %d is committed already", step)
                return word
            # Nothing may be written over a generation, and one of a newer life outranks it.
            log.info("spot: step %d is saved again, as finished, in a life of its own", step)
            info = {**claim_info, "continues": newest.id.life}
            self.committer.go_on(lambda: self._run.claim(info=info, continues=newest))
            self._enter_local_tier(claim_info)
        self._opened = self.committer.writer.begin(step)
        gen = self._opened.id
        spare, extra = self._keep_locally(gen)
        return {
            **word,
            "gen": [gen.life, gen.step],
            "write_id": self._opened.write_id,
            "drain": self._drains,
            "spare": spare,
            "extra": extra,
        }

    def _enter_local_tier(self, info: Mapping[str, Any]) -> None:
        record = self._run.record()
        if self._local is not None and record is not None:
            self._local.enter(record, self.committer.writer.life, info)
            self._local_writer = self.committer.writer.at(self._local.store)

    def _keep_locally(self, gen: GenerationId) -> tuple[list[str], list[str]]:
        """Names of the generations that have to stay at the local tier while `gen` is written, and that may."""
        flying = [flight.opened.id for flight in self._flights if flight.outcome is None]
        return [x.name for x in [gen, *self._local_copies[:1], *flying]], [x.name for x in self._local_copies[1:KEPT]]

    def take_off(
        self,
        number: int,
        share: Share | SpotError,
        stager: Stager,
        *,
        began: float,
        blocked_s: float,
        meta: Mapping[str, Any],
    ) -> None:
        """The snapshot of this rank is begun (or failed): follow the save in the background.

        `began` (monotonic s) is when the save could begin, `blocked_s` how long the loop stood still for it.
        """
        assert self._opened is not None, "open_save comes first"
        own = {**self._description, **history.to_meta(self.pilot.estimator, self.pilot.uptime_s)}
        flight = Flight(number, self._opened.id.step, began, self._opened, {**own, **meta})
        flight.blocked_s = blocked_s
        flight.drains, gen = self._drains, self._opened.id
        if gen not in self._local_copies:
            flight.local_tier = self._local_writer
        self._opened = None
        if flight.drains:
            self._tried.add(gen)
        self._flights.append(flight)
        self.pilot.save_started(flight.step, began)
        self.committer.start(flight, share, stager.staged)

    def _left_behind(self) -> Committed | None:
        """The newest local generation, where nothing is on its way to the store and it never was."""
        newest, safe = self._newest_local, self.committer.writer.newest
        if newest is None or newest.id in self._tried or (safe is not None and newest.id < safe):
            return None
        return None if any(flight.outcome is None for flight in self._flights) else newest

    def take_up(self) -> dict[str, Any] | None:
        """The word that brings a generation that is only local to the store, for `local_tier.bring` on every rank; None
        when there is none. Rank 0 then follows it by `follow`.
        """
        left = self._left_behind()
        if left is None:
            return None
        self._opened = self.committer.writer.again(left)
        return {"manifest": left.manifest.to_json(), "write_id": self._opened.write_id}

    def follow(self, number: int) -> None:
        """The ranks are bringing what was taken up to the store: follow that in the background, as save `number`."""
        assert self._opened is not None, "take_up comes first"
        assert self._newest_local is not None
        (opened, self._opened), committed, began = (self._opened, None), self._newest_local, self._clock.monotonic()
        own = opened.id.life == self.committer.writer.life
        flight = Flight(number, opened.id.step, began, opened, committed.manifest.meta, brought=True, local=committed)
        flight.harmless = not own
        flight.landed.set()
        self._flights.append(flight)
        self._tried.add(opened.id)
        self.committer.start_again(flight, committed.manifest.parts)

    def waited_for_staging(self, seconds: float) -> None:
        if self._flights:
            self._flights[-1].blocked_s += seconds

    def drain(self, timeout_s: float | None) -> dict[str, Any]:
        """The word of a drain; "late" says why it did not finish, and "until" when the job has to leave."""
        if not self.land(timeout_s):
            within = "before the machine goes" if timeout_s is None else f"within {timeout_s} s"
            late = f"The save of step {self._flights[-1].step} did not finish {within}; it goes on."
            return {"outcomes": [], "again": None, **self._late(late)}
        return {"outcomes": _json(self.settle()), "again": self.take_up()}

    def _late(self, why: str) -> dict[str, Any]:
        return {"late": why, "until": self.pilot.stop_until()}

    def last_call(self, left_s: float) -> dict[str, Any]:
        """With a local tier, the word before a stop: what is only local goes on to the store while there is time."""
        self.land(left_s)
        self.settle()
        return {"again": self.take_up()}

    def last_words(self, step: int, reason: str, *, left_s: float, exit_code: int) -> dict[str, Any]:
        """The word of a stop: land the save in flight within `left_s`, put the stop record."""
        if not self.land(left_s):
            log.error("spot: the deadline comes before the save in flight is safe; the generation before it counts")
        outcomes = self.settle()
        for outcome in outcomes:
            if outcome.error is not None:
                log.error("spot: the last save failed: %s", outcome.error)
        newest = self._newest(outcomes)
        saved = newest is not None and newest.id.step == step
        at = "nothing was saved" if newest is None else f"saved up to step {newest.id.step} (generation {newest.id})"
        safe = [gen for gen in (self._durable_copy, None if newest is None else newest.id) if gen is not None]
        here = max(self._local_copies, default=None)
        if self._local is not None and here is not None and all(here > gen for gen in safe):
            at += f"; step {here.step} only at the local tier {self._local.store.uri}"
        text = f"{reason}; {at}"
        record = StopRecord(self.committer.writer.life, step, text, exit_code, self._clock.now())
        try:
            write_stop(self._run.store, record)
        except StoreError as error:
            log.error("spot: the stop record could not be put: %s", error)
        log.warning("spot: stopped at step %d: %s", step, text)
        return {"record": asdict(record), "saved": saved}

    def land(self, timeout_s: float | None, *, spare_s: float = 0.0) -> bool:
        """Wait for what is in flight to be safe at the run's store, or to fail; False when it did not end in time.

        Without a time-out a notice that stops the run sets one, `spare_s` before the job has to leave: the loop, which
        would hear of it at its next boundary, stands still here.
        """
        return self._wait("done", timeout_s, spare_s=spare_s)

    def _wait(self, what: Literal["done", "landed"], timeout_s: float | None, *, spare_s: float = 0.0) -> bool:
        end = None if timeout_s is None else self._clock.monotonic() + timeout_s
        for flight in self._flights:
            event = flight.done if what == "done" else flight.landed
            if end is not None:
                if not event.wait(max(0.0, end - self._clock.monotonic())):
                    return False
                continue
            while not event.wait(_LOOK_S):
                self._hear_meanwhile()
                until = self.pilot.stop_until()
                if until is not None and self._clock.now() >= until - spare_s:
                    return False
        return True

    def _hear_meanwhile(self) -> None:
        try:
            for notice in self._bulletin.read():
                self.pilot.heard(notice)
        except ChannelError as error:
            log.debug("no word of notices: %s", error)

    def settle(self) -> list[Outcome]:
        """Learn from saves that have ended; their outcomes stay until all ranks have heard them (`heard`)."""
        self._refresh = False
        for flight in self._flights:
            if flight.local is not None and flight.opened.id not in self._local_copies:
                self._local_copies.insert(0, flight.opened.id)
                self._newest_local = flight.local
        ended = [(flight, flight.outcome) for flight in self._flights if flight.outcome is not None]
        for flight, outcome in ended:
            if not flight.told and outcome.error is None:  # learned once
                self.pilot.estimator.saved(
                    blocked_s=None if flight.brought else flight.blocked_s,
                    staged_s=flight.staged_s,
                    durable_s=None if outcome.local else flight.durable_s,
                )
            flight.told = True
            if outcome.error is not None:
                self.pilot.hasten()
        if ended:
            self.pilot.replan()
        return [outcome for _, outcome in ended]

    def heard(self) -> None:
        """All ranks have taken the outcomes of the saves that have ended, as far as they were told."""
        self._flights = [flight for flight in self._flights if not flight.told]

    def _newest(self, outcomes: list[Outcome]) -> Committed | None:
        """The newest generation of this life that is safe at the run's store."""
        durable = (o.committed for o in reversed(outcomes) if not o.local and o.committed is not None)
        return next(durable, self._tally.newest)

    def _in_flight_s(self) -> float | None:
        """The age of the oldest save that is not safe at the run's store yet."""
        started = [flight.started for flight in self._flights if flight.outcome is None]
        return self._clock.monotonic() - min(started) if started else None

    def _room(self) -> bool:
        return self._local is not None and all(flight.landed.is_set() for flight in self._flights)

    def _save_ended(self) -> None:
        """In the background, right after an outcome is known: the next boundary looks at it."""
        self._refresh = True


def _json(outcomes: list[Outcome]) -> list[dict[str, Any]]:
    return [outcome.to_json() for outcome in outcomes]


def _estimator(run: Run, resumed: Committed | None, life: int, world_size: int) -> Estimator:
    manifest = None if resumed is None else resumed.manifest
    try:
        lives = history.past_lives(run.store, manifest, life)
    except StoreError as error:
        log.warning("spot: earlier lives could not be read, so the interval starts from its prior: %s", error)
        lives = []
    return history.estimator_for(world_size, manifest, lives)
