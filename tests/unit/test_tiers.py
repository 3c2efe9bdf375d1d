"""The local tier by itself: what machines hold together, what goes when room is needed, what a drain lets through."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from spot_core import layout
from spot_core.errors import AccessError, ConfigError, CorruptShardError, FencedError, StoreError, TransientStoreError
from spot_core.generation import Committed
from spot_core.layout import GenerationId
from spot_core.run import Run, Writer
from spot_core.store import BytesSource, LocalStore, MemoryStore, Store
from spot_core.testing import FailingStore, FakeClock
from spot_core.tiers import LocalTier, candidates
from spot_core.verify import Depth
from spot_core.writer.drain import DrainJob, drain_part
from spot_core.writer.meter import Metered, Throttle

FREELY = Throttle(None)


class Job:
    """Two machines and a run behind; saves by hand."""

    def __init__(self) -> None:
        self.durable = MemoryStore()
        self.writer = Run.open(self.durable).claim()
        record = self.writer.run.record()
        assert record is not None
        self.tiers = [LocalTier(MemoryStore(), self.writer.run_id) for _ in range(2)]
        for tier in self.tiers:
            tier.enter(record, self.writer.life, {"host": "x"})
        self.first: Writer = self.writer.at(self.tiers[0].store)

    def save(self, step: int) -> Committed:
        """At the local tier."""
        opened = self.writer.begin(step)
        parts = [self.writer.at(t.store).same(opened).write(r, {"x": b"%d" % step}) for r, t in enumerate(self.tiers)]
        return self.first.same(opened).seal(parts, world_size=2).commit({})

    def found(self) -> list[GenerationId]:
        return [c.committed.id for c in candidates([tier.holdings() for tier in self.tiers], self.writer.run_id)]


def test_machines_hold_together_what_none_of_them_holds_alone() -> None:
    job = Job()
    job.save(1)
    newest = job.save(2)
    assert job.found() == [GenerationId(1, 2), GenerationId(1, 1)]
    (candidate, _) = candidates([tier.holdings() for tier in job.tiers], job.writer.run_id)
    assert candidate.committed == newest
    assert {key[-20:]: ranks for key, ranks in candidate.owners.items()} == {
        ref.key[-20:]: (part.rank,) for part in newest.manifest.parts for ref in part.objects
    }
    assert candidates([job.tiers[0].holdings()], job.writer.run_id) == []


@pytest.mark.parametrize("lost", ["marker", "blob", "index", "tombstone", "a byte"])
def test_a_generation_that_lacks_anything_is_none(lost: str) -> None:
    job = Job()
    job.save(1)
    newest = job.save(2)
    part = newest.manifest.parts[1]
    assert part.blob is not None
    if lost == "marker":
        job.tiers[0].store.delete(layout.marker_key(newest.id))
    elif lost == "tombstone":
        job.tiers[1].store.put(layout.tombstone_key(newest.id), b"{}")
    elif lost == "a byte":
        job.tiers[1].store.put(part.blob.key, bytes(part.blob.size - 1))
    else:
        job.tiers[1].store.delete(part.blob.key if lost == "blob" else part.index.key)
    assert job.found() == [GenerationId(1, 1)]


def test_another_runs_generation_is_none() -> None:
    job = Job()
    job.save(1)
    assert candidates([tier.holdings() for tier in job.tiers], "another") == []


def test_a_local_tier_that_cannot_be_read_holds_nothing(caplog: pytest.LogCaptureFixture) -> None:
    job = Job()
    job.save(1)
    job.tiers[1].store = FailingStore(
        job.tiers[1].store, lambda _i, verb, _k: AccessError("EIO") if verb == "list" else None
    )
    assert job.found() == []
    assert "is left aside" in caplog.text


def test_a_newer_life_of_this_machine_fences_the_local_tier() -> None:
    job = Job()
    job.save(1)
    record = job.writer.run.record()
    assert record is not None
    newer = Run.open(job.durable).claim()
    job.tiers[0].enter(record, newer.life, {})
    with pytest.raises(FencedError):
        job.save(2)
    assert job.found() == [GenerationId(1, 1)]


def test_all_ranks_of_a_machine_enter_it() -> None:
    job = Job()
    record = job.writer.run.record()
    assert record is not None
    before = {info.key for info in job.tiers[0].store.list("")}
    job.tiers[0].enter(record, 1, {"host": "x"})
    assert {info.key for info in job.tiers[0].store.list("")} == before


def test_room_is_made_from_what_is_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job()
    names = [job.save(step).id.name for step in (1, 2, 3, 4)]
    tier = job.tiers[0]
    assert tier.make_room([names[3]], [names[2], names[1]], 10) == [names[0]]
    assert job.found() == [GenerationId(1, step) for step in (4, 3, 2)]
    room = iter([False, True])
    monkeypatch.setattr(tier, "_fits", lambda _n: next(room))
    assert tier.make_room([names[3]], [names[2], names[1]], 10) == [names[1]], "the oldest that may go"
    monkeypatch.setattr(tier, "_fits", lambda _n: False)
    assert tier.make_room([names[3]], [names[3], names[2]], 10) == [names[2]], "never what must stay"
    assert tier.store.stat(layout.marker_key(GenerationId(1, 4))) is not None


def test_a_name_that_was_buried_locally_is_never_live_again() -> None:
    job = Job()
    opened = job.writer.begin(1)
    parts = [job.writer.at(t.store).same(opened).write(r, {"x": b"1"}) for r, t in enumerate(job.tiers)]
    job.tiers[0].make_room([], [], 0)
    with pytest.raises(FencedError):
        job.first.same(opened).seal(parts, world_size=2).commit({})
    assert job.found() == []


def test_a_folder_inside_of_the_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="inside the run"):
        LocalTier.open(str(tmp_path / "run" / "nvme"), "ab", LocalStore(tmp_path / "run"))
    opened = LocalTier.open(str(tmp_path / "nvme"), "ab", LocalStore(tmp_path / "run"))
    assert opened.store.uri == str(tmp_path / "nvme" / "ab")
    assert not (tmp_path / "nvme").exists()


# -- the drain ----------------------------------------------------------------------------------------------------


def drained(job: Job, committed: Committed, sink: Store | None = None, **kw: Any) -> Committed:
    opened = job.writer.again(committed)
    parts = [
        drain_part(tier.store, sink or job.durable, DrainJob(part, opened.target(part.rank)), FREELY, **kw)
        for tier, part in zip(job.tiers, committed.manifest.parts, strict=True)
    ]
    return opened.seal(parts, world_size=2).commit(committed.manifest.meta)


def test_a_drained_generation_is_the_same_under_keys_of_its_own_attempt() -> None:
    job = Job()
    local = job.save(2)
    later = Run.open(job.durable).claim()
    job.writer = later
    durable = drained(job, local)
    assert durable.id == local.id
    assert durable.manifest.write_id == "l2a0"
    assert [part.blob.digest for part in durable.manifest.parts if part.blob] == [
        part.blob.digest for part in local.manifest.parts if part.blob
    ]
    run = Run.open(job.durable)
    assert run.verify(run.discover().generations[0], Depth.DIGESTS).read("x", rank=1) == b"2"


def test_damage_is_not_drained() -> None:
    job = Job()
    local = job.save(2)
    blob = local.manifest.parts[1].blob
    assert blob is not None
    job.tiers[1].store.put(blob.key, bytes(blob.size))
    with pytest.raises(CorruptShardError, match="goes nowhere"):
        drained(job, local)
    assert [info.key for info in job.durable.list("generations/") if "r00001" in info.key] == []


def test_a_store_that_fails_for_a_while_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    import stamina

    job = Job()
    local = job.save(2)
    failures = [TransientStoreError("503"), TransientStoreError("reset")]
    sink = FailingStore(job.durable, lambda _i, verb, _k: failures.pop() if failures and verb == "put_blob" else None)
    with stamina.set_testing(True, attempts=5):
        drained(job, local, sink)
    assert Run.open(job.durable).discover().generations[0].id == local.id


def test_what_a_store_refuses_is_not_tried_again() -> None:
    job = Job()
    sink = FailingStore(job.durable, lambda _i, verb, _k: StoreError("no") if verb == "put_blob" else None)
    with pytest.raises(StoreError, match="no"):
        drained(job, job.save(2), sink)
    assert [verb for verb, _ in sink.operations] == ["put_blob"]


# -- rate and progress --------------------------------------------------------------------------------------------


def test_a_rate_is_kept_over_all_objects() -> None:
    throttle = Throttle(1e6, FakeClock())
    assert [throttle.take(1000) for _ in range(4)] == pytest.approx([0, 0.001, 0.002, 0.003])
    assert FREELY.take(1 << 40) == 0


def test_progress_is_told_now_and_then() -> None:
    clock, told = FakeClock(), []
    source = Metered(
        BytesSource(bytes(4096 * 6), 4096), FREELY, lambda *words: told.append(words), clock=clock, every_s=30
    )
    for i in range(6):
        assert len(source.chunk(i)) == 4096
        clock.advance(20)
    assert told == [(4096 * 3, 4096 * 6, 40.0), (4096 * 5, 4096 * 6, 80.0)]
