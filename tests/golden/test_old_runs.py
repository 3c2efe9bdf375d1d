"""Runs written by each released format, kept in git: every later release must read them.

`format1/` was made by `python tests/golden/test_old_runs.py` at format 1; it is never made anew.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from spot_core import Depth, GenerationId, Retention, Run

HERE = Path(__file__).parent
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


def _make() -> None:
    from spot_core.record import create_record
    from spot_core.testing import FakeClock

    run = Run.open(HERE / "format1", clock=FakeClock())
    create_record(run.store, run.clock, "a golden run")
    writer = run.claim(info={"host": "golden"})
    for step in (10, 20):
        opened = writer.begin(step)
        parts = [opened.write(rank, CONTENT) for rank in (0, 1)]
        opened.seal(parts, world_size=2).commit({"reason": "interval", "finished": False})
    writer.prune(Retention(1))


if __name__ == "__main__":
    _make()
