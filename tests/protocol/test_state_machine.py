"""Any order of saves, crashes, resumes, prunes, zombies and damage keeps the invariants.

Mutants that this machine was seen to catch: generations ordered by step first; no tombstone; a prune without fence
check; a fresh start over damage; chunk digests not compared.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from spot_core import (
    CommitError,
    Depth,
    FencedError,
    GenerationId,
    Open,
    Reason,
    Retention,
    Run,
    SpotError,
    TornGenerationError,
    Writer,
)
from spot_core.store import MemoryStore
from spot_core.testing import CRASH_MODES, CrashingStore, SimulatedCrash

from ._lives import WORLD, content, resume, seniority


class Lives(RuleBasedStateMachine):
    """Writers come and go; the model knows which generations were acknowledged, may exist, are damaged or dropped."""

    writers = Bundle("writers")
    """Lives that have not ended: at most one is the newest, the others are zombies."""
    flights = Bundle("flights")
    """Saves between `begin` and `commit`."""

    def __init__(self) -> None:
        super().__init__()
        self.store = MemoryStore()
        self.newest_life = 0
        self.acknowledged: set[GenerationId] = set()
        self.attempted: set[GenerationId] = set()
        self.damaged: set[GenerationId] = set()
        self.dropped: set[GenerationId] = set()
        self.dead: set[int] = set()

    @initialize()
    def found(self) -> None:
        Run.open(self.store).claim()
        self.newest_life = 1

    @rule(target=writers)
    def start(self) -> Writer:
        """A new life: what it resumes from is the newest good generation, and it claims."""
        self.look()
        writer = Run.open(self.store).claim()
        assert writer.life == self.newest_life + 1, "lives are claimed one by one"
        self.newest_life = writer.life
        return writer

    @rule(target=flights, writer=writers, step=st.integers(0, 40))
    def begin(self, writer: Writer, step: int) -> tuple[Writer, Open, list[object]] | None:
        """Data is written, no marker yet."""
        if writer.newest is not None and step <= writer.newest.step:
            with pytest.raises(CommitError):
                writer.begin(step)
            return None
        opened = writer.begin(step)
        self.attempted.add(opened.id)
        return writer, opened, [opened.write(rank, content(opened.id, rank)) for rank in range(WORLD)]

    @rule(flight=consumes(flights), stalled=st.booleans())
    def commit(self, flight: tuple[Writer, Open, list[object]] | None, stalled: bool) -> None:
        """`stalled`: the fence was checked long ago."""
        if flight is None or flight[0].life in self.dead:
            return
        writer, opened, parts = flight
        written = opened.seal(parts, world_size=WORLD)  # type: ignore[arg-type]
        superseded = writer.life < self.newest_life
        check = writer.check_fence
        if stalled:
            writer.check_fence = lambda: None  # type: ignore[method-assign]
        reason = None
        try:
            self.acknowledged.add(written.commit({}).id)
        except SpotError as error:
            reason = error.reason
        writer.check_fence = check  # type: ignore[method-assign]
        possible = {Reason.STEP_ORDER, Reason.COMMIT}
        if superseded:
            possible |= {None, Reason.PRUNED} if stalled else {Reason.FENCED}
        else:
            possible |= {None}
        assert reason in possible

    @rule(writer=consumes(writers), step=st.integers(0, 40), at=st.integers(0, 40), mode=st.sampled_from(CRASH_MODES))
    def die_while_saving(self, writer: Writer, step: int, at: int, mode: str) -> None:
        """The process of `writer` dies at some operation of save, commit or prune, and its saves in flight with it."""
        self.dead.add(writer.life)
        twin = Writer(Run.open(CrashingStore(self.store, at, mode)), writer.life, writer.run_id)
        gen = GenerationId(writer.life, step)
        if gen in self.attempted or (writer.newest and gen <= writer.newest):
            return
        self.attempted.add(gen)
        try:
            opened = twin.begin(step)
            parts = [opened.write(rank, content(gen, rank)) for rank in range(WORLD)]
            committed = opened.seal(parts, world_size=WORLD).commit({})
            self.acknowledged.add(committed.id)
            twin.prune(Retention(keep=2))
        except (SimulatedCrash, SpotError):
            pass
        self._note_dropped()

    @rule(writer=writers, keep=st.integers(1, 3), every=st.sampled_from([None, 10]))
    def prune(self, writer: Writer, keep: int, every: int | None) -> None:
        good = self._live() - self.damaged
        try:
            pruned = writer.prune(Retention(keep, every), damaged=self.damaged)
        except FencedError:
            assert writer.life < self.newest_life
            return
        assert writer.life == self.newest_life
        if good:
            assert max(good, key=seniority) not in pruned.dropped, "the newest good generation was dropped"
        self._note_dropped()

    @precondition(lambda self: self._live() - self.damaged)
    @rule(which=st.integers(0, 7), part=st.integers(0, 3), how=st.sampled_from(["flip", "cut", "delete"]))
    def damage(self, which: int, part: int, how: str) -> None:
        """Something that is committed, and whole so far, rots."""
        whole = [c for c in Run.open(self.store).discover().generations if c.id not in self.damaged]
        committed = whole[which % len(whole)]
        key = committed.manifest.objects[part].key
        old = self.store.get(key)
        if how == "delete":
            self.store.delete(key)
        else:
            self.store.put(key, old[:-1] if how == "cut" else old[:-1] + bytes([old[-1] ^ 1]))
        self.damaged.add(committed.id)

    @invariant()
    def look(self) -> None:
        """The newest good generation is found, whole; all damaged is an error; nothing is a fresh start."""
        run = Run.open(self.store)
        live = self._live()
        assert live <= self.attempted
        assert self.acknowledged - self.dropped <= live, "an acknowledged generation is gone, though nothing dropped it"
        good = live - self.damaged
        if live and not good:
            with pytest.raises(TornGenerationError):
                run.select(Depth.DIGESTS)
            return
        verified = run.select(Depth.DIGESTS).verified
        assert (None if verified is None else verified.committed.id) == max(good, key=seniority, default=None)
        assert resume(run) == max(good, key=seniority, default=None)

    def _live(self) -> set[GenerationId]:
        return {committed.id for committed in Run.open(self.store).discover().generations}

    def _note_dropped(self) -> None:
        buried = {GenerationId.parse(info.key.split("/")[1]) for info in self.store.list("tombstones/")}
        self.dropped |= {gen for gen in buried if gen is not None}
        assert not self._live() & self.dropped, "a buried name is live"


TestLives = Lives.TestCase
TestLives.settings = settings(
    max_examples=30, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


@pytest.mark.slow
class TestLivesAtLength(Lives.TestCase):  # type: ignore[name-defined,misc]
    settings = settings(
        max_examples=250, stateful_step_count=60, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
