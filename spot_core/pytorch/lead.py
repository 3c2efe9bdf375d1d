"""What only rank 0 does: decide for all, begin generations, follow the save in flight, write the stop record.

Its answers go to the other ranks as the words of `Joint`; nothing here talks to them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any

from spot_core import signals
from spot_core.clock import Clock
from spot_core.config import Settings
from spot_core.errors import SpotError, StoreError
from spot_core.estimate import Estimator
from spot_core.generation import Committed, Open
from spot_core.interval import parse_interval
from spot_core.launch.stoprecord import StopRecord, write_stop
from spot_core.layout import GenerationId
from spot_core.manifest import Part
from spot_core.policy import CONTINUE, Kind
from spot_core.pytorch import history
from spot_core.pytorch.agree import Request
from spot_core.pytorch.bulletin import Bulletin
from spot_core.pytorch.channel import Channel, ChannelError
from spot_core.pytorch.committer import Committer, Flight, Patience
from spot_core.pytorch.describe import describe
from spot_core.pytorch.outcome import Outcome, Tally
from spot_core.pytorch.pilot import Pilot
from spot_core.pytorch.stage import Stager
from spot_core.run import Run, Writer

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
    ) -> None:
        self._run = run
        self._clock: Clock = run.clock
        self._bulletin = bulletin
        self._tally = tally
        self._description = describe(settings)
        self._opened: Open | None = None
        self._flight: Flight | None = None
        self._refresh = False
        estimator = _estimator(run, resumed, writer.life, channel.world_size)
        self.pilot = Pilot(parse_interval(settings.interval), estimator, run.clock, window_s=settings.window_s)
        self.committer = Committer(
            channel,
            writer,
            settings.retention,
            damaged=damaged,
            patience=patience,
            clock=run.clock,
            ended=self._save_ended,
        )

    def wants_a_look(self, *, inside: bool) -> bool:
        """At each boundary, cheap: whether to call all ranks together. `inside` a step only a stop is worth it."""
        if self._refresh:
            self.settle()
        return self.pilot.wants_a_look(self._in_flight_s(), stops_only=inside)

    def look(self, step: int, requests: tuple[Request, ...], *, step_due: bool, inside: bool) -> dict[str, Any]:
        """The word for a boundary where all ranks are: the decision, and outcomes to take."""
        for request in requests:
            if request.kind == "notice":
                self.pilot.heard(signals.Notice.from_json(request.payload))
        outcomes = self.settle()
        decision = self.pilot.decide(step, step_due=step_due, in_flight_s=self._in_flight_s())
        if inside and decision.kind is Kind.SAVE:
            decision = CONTINUE  # it waits for the end of the step
        return {
            "kind": decision.kind.value,
            "reason": decision.reason,
            "deadline": decision.deadline,
            "outcomes": _json(outcomes),
        }

    def open_save(
        self, step: int, *, finished: bool, claim_info: Mapping[str, Any], left_s: float | None
    ) -> dict[str, Any]:
        """The word at the start of a save: finish what is in flight, begin the generation; "gen" None for no save.

        With `left_s` the job has to leave after so many seconds: what is in flight gets those that this save can spare.
        A notice that comes meanwhile does the same.
        """
        spare_s = self.pilot.timing.save_s
        if not self.land(None if left_s is None else max(0.0, left_s - spare_s), spare_s=spare_s):
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
            self.committer.writer = self._run.claim(info={**claim_info, "continues": newest.id.life})
        self._opened = self.committer.writer.begin(step)
        gen = self._opened.id
        return {**word, "gen": [gen.life, gen.step], "write_id": self._opened.write_id}

    def take_off(
        self,
        number: int,
        part: Future[Part] | SpotError,
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
        self._opened, self._flight = None, flight
        self.pilot.save_started(flight.step, began)
        self.committer.start(flight, part, stager.staged)

    def waited_for_staging(self, seconds: float) -> None:
        if self._flight is not None:
            self._flight.blocked_s += seconds

    def drain(self, timeout_s: float | None) -> dict[str, Any]:
        """The word of a drain; "late" says why it did not finish, and "until" when the job has to leave."""
        if not self.land(timeout_s):
            assert self._flight is not None
            within = "before the machine goes" if timeout_s is None else f"within {timeout_s} s"
            late = f"The save of step {self._flight.step} did not finish {within}; it goes on."
            return {"outcomes": [], **self._late(late)}
        return {"outcomes": _json(self.settle())}

    def _late(self, why: str) -> dict[str, Any]:
        return {"late": why, "until": self.pilot.stop_until()}

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
        text = f"{reason}; {at}"
        record = StopRecord(self.committer.writer.life, step, text, exit_code, self._clock.now())
        try:
            write_stop(self._run.store, record)
        except StoreError as error:
            log.error("spot: the stop record could not be put: %s", error)
        log.warning("spot: stopped at step %d: %s", step, text)
        return {"record": asdict(record), "saved": saved}

    def land(self, timeout_s: float | None, *, spare_s: float = 0.0) -> bool:
        """Wait for the save in flight; False when it did not end in time.

        Without a time-out a notice that stops the run sets one, `spare_s` before the job has to leave: the loop, which
        would hear of it at its next boundary, stands still here.
        """
        if self._flight is None or timeout_s is not None:
            return self._flight is None or self._flight.done.wait(timeout_s)
        while not self._flight.done.wait(_LOOK_S):
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
        """Learn from a save that has ended; its outcome stays until all ranks have heard it (`heard`)."""
        self._refresh = False
        flight = self._flight
        if flight is None or flight.outcome is None:
            return []
        if flight.durable_s is not None:
            self.pilot.estimator.saved(blocked_s=flight.blocked_s, staged_s=flight.staged_s, durable_s=flight.durable_s)
            flight.durable_s = None  # learned once
        if flight.outcome.error is not None:
            self.pilot.hasten()
        self.pilot.replan()
        return [flight.outcome]

    def heard(self) -> None:
        """All ranks have taken the outcome of the save that has ended."""
        if self._flight is not None and self._flight.outcome is not None:
            self._flight = None

    def _newest(self, outcomes: list[Outcome]) -> Committed | None:
        return next((o.committed for o in reversed(outcomes) if o.committed is not None), self._tally.newest)

    def _in_flight_s(self) -> float | None:
        flight = self._flight
        return None if flight is None or flight.outcome is not None else self._clock.monotonic() - flight.started

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
