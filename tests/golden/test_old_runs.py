"""Runs written by each released format, kept in git: every later release must read them.

Each folder was made by `python tests/golden/test_old_runs.py NAME` when its format was new; it is never made anew.
`format1` has one blob per rank; `bases` generations that refer to what a pruned one wrote.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from spot_core import Depth, GenerationId, Retention, Run

HERE = Path(__file__).parent
BASE = {"base": bytes(range(256)) * 16}
CONTENT = {"weights": bytes(range(256)) * 20, "step": b"20", "empty": b""}


def test_format_1_is_read(tmp_path: Path) -> None:
    shutil.copytree(HERE / "format1", tmp_path / "run")
    run = Run.open(tmp_path / "run")
    selection = run.select(Depth.DIGESTS)
    assert selection.problems == ()
    verified = selection.verified
    assert verified is not None
    assert verified.committed.id == GenerationId(1, 20)
    assert verified.committed.manifest.world_size == 2
    assert verified.committed.manifest.meta == {"reason": "interval", "finished": False}
    for rank in (0, 1):
        assert {name: verified.read(name, rank) for name in verified.names(rank)} == CONTENT
    record = run.record()
    assert record is not None
    assert record.run_id == "a golden run"


def test_format_1_is_gone_on_with(tmp_path: Path) -> None:
    shutil.copytree(HERE / "format1", tmp_path / "run")
    writer = Run.open(tmp_path / "run").claim()
    assert (writer.life, writer.run_id) == (2, "a golden run")
    opened = writer.begin(21)
    opened.seal([opened.write(0, {"w": b"1"})], world_size=1).commit({})
    assert writer.prune(Retention(1)).dropped == (GenerationId(1, 20),)


def test_references_are_followed(tmp_path: Path) -> None:
    shutil.copytree(HERE / "bases", tmp_path / "run")
    run = Run.open(tmp_path / "run")
    discovery = run.discover()
    assert discovery.problems == ()
    assert [lender.id for lender in discovery.lenders] == [GenerationId(1, 10)]
    assert [committed.id for committed in discovery.generations] == [GenerationId(1, 20)]
    verified = run.select(Depth.DIGESTS).verified
    assert verified is not None
    assert [ref.key for ref in verified.committed.manifest.referred] == [
        "generations/000001-000000000010/a0-r00000.base.blob"  # both ranks had the same
    ]
    for rank in (0, 1):
        assert {name: verified.read(name, rank) for name in verified.names(rank)} == CONTENT | BASE


def test_references_are_gone_on_with(tmp_path: Path) -> None:
    shutil.copytree(HERE / "bases", tmp_path / "run")
    run = Run.open(tmp_path / "run")
    writer = run.claim(continues=run.discover().generations[0])
    opened = writer.begin(21)
    committed = opened.seal([opened.write(0, {"w": b"1"}, unchanging=BASE)], world_size=1).commit({})
    assert [ref.key for ref in committed.manifest.referred] == ["generations/000001-000000000010/a0-r00000.base.blob"]
    pruned = writer.prune(Retention(1))
    assert (pruned.dropped, pruned.leftovers) == ((GenerationId(1, 20),), ())
    run.verify(committed, Depth.DIGESTS)
    assert len(run.store.list("generations/000001-000000000010/")) == 1


def _make(name: str) -> None:
    from spot_core.record import create_record
    from spot_core.testing import FakeClock

    run = Run.open(HERE / name, clock=FakeClock())
    create_record(run.store, run.clock, "a golden run")
    writer = run.claim(info={"host": "golden"})
    for step in (10, 20):
        opened = writer.begin(step)
        parts = [opened.write(rank, CONTENT, unchanging=BASE if name == "bases" else None) for rank in (0, 1)]
        opened.seal(parts, world_size=2).commit({"reason": "interval", "finished": False})
    writer.prune(Retention(1))


if __name__ == "__main__":
    _make(sys.argv[1])
