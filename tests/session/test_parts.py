"""The small parts of a session by themselves: outcomes and their policy, rank 0's pilot, history, memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from spot_core import memory
from spot_core.errors import FencedError, SaveError
from spot_core.estimate import Estimator, PastLife
from spot_core.generation import Committed
from spot_core.interval import exact, parse_interval
from spot_core.launch.stoprecord import StopRecord, write_stop
from spot_core.layout import GenerationId
from spot_core.manifest import Manifest, ObjectRef, Part
from spot_core.policy import Kind
from spot_core.pytorch import history
from spot_core.pytorch.outcome import Outcome, Tally
from spot_core.pytorch.pilot import Pilot
from spot_core.run import Run
from spot_core.signals import Notice, NoticeKind
from spot_core.store import open_store
from spot_core.testing import FakeClock


def manifest_of(life: int = 1, step: int = 5, world: int = 1, **meta: Any) -> Manifest:
    parts = tuple(Part(rank, None, ObjectRef(f"i{rank}", 1, "xxh3_128:0")) for rank in range(world))
    return Manifest("run", life, step, "a0", 1.0, world, parts, meta)


def failed(error: Any = None) -> Outcome:
    return Outcome(7, error=error or SaveError("no", hint="free some space"))


def test_outcomes_travel_whole() -> None:
    good = Outcome(5, Committed(GenerationId(1, 5), manifest_of(reason="x")))
    assert Outcome.from_json(good.to_json()) == good
    back = Outcome.from_json(failed(FencedError("old", hint="stop")).to_json())
    assert isinstance(back.error, FencedError)
    assert (back.step, back.error.message, back.error.hint) == (7, "old", "stop")


def test_the_tally_bears_so_many_in_a_row() -> None:
    tally = Tally(on_save_error="warn", max_failed=2, speaks=False)
    tally.take(failed())
    tally.take(failed())
    tally.take(Outcome(8, Committed(GenerationId(1, 8), manifest_of())))
    tally.take(failed())
    tally.take(failed())
    assert tally.must_raise(failed())
    with pytest.raises(SaveError, match="free some space"):
        tally.take(failed())
    assert tally.newest is not None


def test_the_tally_raises_at_once_if_wanted_or_fenced() -> None:
    with pytest.raises(SaveError):
        Tally(on_save_error="raise", max_failed=9, speaks=False).take(failed())
    with pytest.raises(FencedError):
        Tally(on_save_error="warn", max_failed=9, speaks=False).take(failed(FencedError("old")))


# -- the pilot, with a clock turned by hand -----------------------------------------------------------------------


def pilot_of(interval: str, clock: FakeClock, **measured: float) -> Pilot:
    estimator = Estimator()
    if measured:
        estimator.saved(**measured)
    return Pilot(parse_interval(interval), estimator, clock, window_s=25)


def test_the_pilot_asks_once_per_interval_from_the_start_of_the_last_save() -> None:
    clock = FakeClock()
    pilot = pilot_of("60s", clock)
    clock.advance(59.9)
    assert not pilot.wants_a_look(None)
    clock.advance(0.2)
    assert pilot.wants_a_look(None)
    assert not pilot.wants_a_look(None)  # asked already
    assert pilot.decide(8, step_due=False, in_flight_s=None).kind is Kind.SAVE
    pilot.save_started(8, clock.monotonic())
    clock.advance(59.9)
    assert not pilot.wants_a_look(None)
    clock.advance(0.2)
    assert pilot.wants_a_look(None)


def test_auto_follows_what_is_measured() -> None:
    clock = FakeClock()
    pilot = pilot_of("auto", clock)
    clock.advance(30)
    assert pilot.wants_a_look(None)
    pilot.decide(1, step_due=False, in_flight_s=None)
    pilot.save_started(1, clock.monotonic())
    pilot.estimator.saved(blocked_s=2.0, staged_s=2.0, durable_s=5.0)
    pilot.replan()
    tau = exact(2.0, 6 * 3600 + 30)
    clock.advance(tau - 1)
    assert not pilot.wants_a_look(None)
    clock.advance(2)
    assert pilot.wants_a_look(None)


def test_a_slow_save_holds_the_next_one_back_but_not_a_stop(caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    pilot = pilot_of("60s", clock)
    pilot.save_started(1, clock.monotonic())
    clock.advance(61)
    assert not pilot.wants_a_look(61.0)
    assert not pilot.wants_a_look(61.0)
    assert [m for m in caplog.messages if "An interval of 68 s or more would hold" in m] == caplog.messages
    pilot.heard(Notice("n", NoticeKind.TIME_LIMIT, "slurm", deadline=clock.now() + 100))
    pilot.replan()
    clock.advance(50.1)
    assert pilot.wants_a_look(111.0)
    decision = pilot.decide(2, step_due=False, in_flight_s=111.0)
    assert decision.kind is Kind.STOP_SAVE


def test_a_maintenance_far_away_is_saved_for_early_and_stopped_for_in_time() -> None:
    clock = FakeClock()
    pilot = pilot_of("1h", clock, blocked_s=0.1, staged_s=0.1, durable_s=4.0)
    pilot.heard(Notice("m", NoticeKind.MAINTENANCE, "gcp", deadline=clock.now() + 900))
    assert pilot.decide(3, step_due=False, in_flight_s=None).kind is Kind.SAVE
    pilot.save_started(3, clock.monotonic())
    clock.advance(849)
    assert not pilot.wants_a_look(None)
    clock.advance(1.1)
    assert pilot.wants_a_look(None)
    assert pilot.decide(4, step_due=False, in_flight_s=None).kind is Kind.STOP_SAVE


def test_an_advisory_one_that_meets_a_save_in_flight_gets_its_own_afterwards() -> None:
    clock = FakeClock()
    pilot = pilot_of("1h", clock)
    pilot.save_started(1, clock.monotonic())
    pilot.heard(Notice("a", NoticeKind.ADVISORY, "aws"))
    assert pilot.decide(2, step_due=False, in_flight_s=3.0).kind is Kind.CONTINUE
    assert not pilot.wants_a_look(4.0)
    assert pilot.wants_a_look(None)
    assert pilot.decide(3, step_due=False, in_flight_s=None).kind is Kind.SAVE


def test_a_round_that_was_aborted_is_tried_again_an_interval_later() -> None:
    clock = FakeClock()
    pilot = pilot_of("60s", clock)
    clock.advance(61)
    assert pilot.wants_a_look(None)
    pilot.gave_up()
    assert not pilot.wants_a_look(None)
    clock.advance(61)
    assert pilot.wants_a_look(None)


def test_a_bound_that_cannot_be_kept_is_told(caplog: pytest.LogCaptureFixture) -> None:
    pilot_of("lose at most 10min", FakeClock(), blocked_s=1.0, staged_s=1.0, durable_s=200.0)
    assert not caplog.messages
    pilot_of("lose at most 10min", FakeClock(), blocked_s=1.0, staged_s=1.0, durable_s=400.0)
    assert "up to 700 s can be lost" in caplog.messages[0]


# -- history ------------------------------------------------------------------------------------------------------


def test_history_is_carried_forward_and_closed_with_what_the_stop_record_says(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    before = Estimator(history=[PastLife(100.0, True), PastLife(50.0, True, True, 2)], world_size=2)
    before.saved(blocked_s=0.5, staged_s=1.0, durable_s=3.0)
    manifest = manifest_of(life=3, step=9, world=2, **history.to_meta(before, 777.0))
    assert history.past_lives(store, manifest, 4) == [*before.history, PastLife(777.0, True, False, 2)]
    write_stop(store, StopRecord(3, 9, "told to", 143))
    lives = history.past_lives(store, manifest, 4)
    assert lives[-1] == PastLife(777.0, True, True, 2)
    assert history.estimator_for(2, manifest, lives).durable_p95_s == 3.0
    assert history.estimator_for(4, manifest, lives).cost_s is None  # another size, other costs


def test_lives_that_committed_nothing_are_known_by_their_claims(tmp_path: Path) -> None:
    run = Run.open(tmp_path)
    for _ in range(3):
        run.claim(info={})
    lives = history.past_lives(run.store, None, 3)
    assert [(life.interrupted, life.saved) for life in lives] == [(True, False)] * 2
    run.claim(info={"continues": 3})
    assert len(history.past_lives(run.store, None, 5)) == 3  # the fourth is a part of the third


def test_a_damaged_history_is_no_history(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    garbled = manifest_of(history="x", pace=[1])
    assert history.past_lives(store, garbled, 2) == [PastLife(0.0, True)]
    assert history.estimator_for(1, garbled, []).cost_s is None


# -- memory -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"memory.max": "1000", "memory.current": "400"}, 600),
        ({"memory.max": "1000", "memory.current": "4000"}, 0),
        ({"memory/memory.limit_in_bytes": "900", "memory/memory.usage_in_bytes": "100"}, 800),
    ],
)
def test_the_containers_limit_counts(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert memory.available_bytes(tmp_path) == expected


def test_without_a_limit_the_machine_counts(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("5\n")
    assert memory.available_bytes(tmp_path) > 1 << 20


def test_one_copy_per_rank_of_the_machine() -> None:
    assert memory.fits(100, ranks=4, available=400)
    assert not memory.fits(101, ranks=4, available=400)
