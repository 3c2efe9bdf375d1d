"""Sessions of two gloo ranks in real processes: exact resume, failures on one rank, death of one rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from spot_core.launch.stoprecord import read_stop
from spot_core.run import Run
from spot_core.verify import Depth

pytestmark = pytest.mark.dist

ROOT = Path(__file__).parents[2]


class Pair:
    """Two ranks that run scenarios, one after another, until they are closed or killed. `store`: see `job`."""

    def __init__(self, store: str = "tcp") -> None:
        self.server = dist.TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False, timeout=timedelta(seconds=60))
        self.workers = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.session.job", str(rank), "2", str(self.server.port), store],
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]

    def run(self, scenario: dict[str, Any]) -> list[str]:
        for worker in self.workers:
            assert worker.stdin is not None
            worker.stdin.write(json.dumps(scenario) + "\n")
            worker.stdin.flush()
        return [worker.stdout.readline() for worker in self.workers if worker.stdout is not None]

    def codes(self) -> list[int]:
        return [worker.wait(60) for worker in self.workers]

    def kill(self) -> None:
        for worker in self.workers:
            worker.kill()
            worker.communicate()


class Lives:
    """Lives of one run, two ranks each; what they said and logged."""

    def __init__(self, pair: Pair, folder: Path) -> None:
        self.pair = pair
        self.folder = folder
        self.uri = str(folder / "run")
        self.count = 0

    def live(self, *, answers: tuple[str, str] = ("done\n", "done\n"), **scenario: Any) -> Life:
        self.count += 1
        folder = self.folder / f"life{self.count}"
        folder.mkdir(parents=True)
        assert tuple(self.pair.run({"uri": self.uri, "folder": str(folder), **scenario})) == answers
        return Life(folder)

    def run(self) -> Run:
        return Run.open(self.uri)

    def steps(self) -> list[int]:
        """Steps of the committed generations, newest first, every byte of them verified."""
        generations = self.run().discover().generations
        for committed in generations:
            self.run().verify(committed, Depth.DIGESTS)
        return [committed.id.step for committed in generations]


class Life:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def said(self, rank: int) -> dict[str, Any]:
        said: dict[str, Any] = json.loads((self.folder / f"said{rank}.json").read_text())
        return said

    def log(self, rank: int = 0) -> str:
        return (self.folder / f"log{rank}").read_text()

    def final(self, rank: int) -> list[torch.Tensor]:
        tensors: list[torch.Tensor] = torch.load(self.folder / f"final{rank}.pt", weights_only=True)
        return tensors


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.kill()


@pytest.fixture
def lives(pair: Pair, tmp_path: Path) -> Lives:
    return Lives(pair, tmp_path)


def assert_same(one: Life, other: Life) -> None:
    for rank in range(2):
        for a, b in zip(one.final(rank), other.final(rank), strict=True):
            assert torch.equal(a, b)


def test_resume_is_bit_exact_with_the_uninterrupted_run(lives: Lives, tmp_path: Path) -> None:
    control = Lives(lives.pair, tmp_path / "control")
    whole = control.live(steps=24, settings={"interval": "100 steps"})
    lives.live(steps=17, settings={"interval": "5 steps"})
    second = lives.live(steps=24, settings={"interval": "5 steps"})
    assert [second.said(rank)["resumed"] for rank in range(2)] == ["000001-000000000015"] * 2
    assert_same(whole, second)
    assert f"spot: no generation in {control.uri}, starting at step 0 (life 1)" in whole.log()
    line = f"spot: resumed from step 15 (life 1 -> 2, generation 000001-000000000015 of {lives.uri})"
    assert line in second.log()
    assert "spot: resumed" not in second.log(1)


def test_a_failed_write_on_one_rank_is_taken_by_both_and_the_next_save_commits(lives: Lives) -> None:
    life = lives.live(steps=9, fail=[[1, 1]], save_at=[2, 6], drain_at=[4, 8], settings={"interval": "1h"})
    for rank in range(2):
        # Both go on at step 4, one failed save counted, and have the same generation at step 8.
        assert life.said(rank)["committed"] == [[4, None], [8, "000001-000000000006"]]
        assert life.said(rank)["errors"] == []
    assert "the save of step 2 failed (1 in a row" in life.log()
    assert "rank 1" in life.log()
    assert lives.steps() == [6]


def test_a_failed_write_on_one_rank_is_raised_on_both_if_wanted(lives: Lives) -> None:
    life = lives.live(
        steps=9, fail=[[1, 1]], save_at=[2, 6], drain_at=[4, 8], settings={"interval": "1h", "on_save_error": "raise"}
    )
    for rank in range(2):
        ((kind, text),) = life.said(rank)["errors"]
        assert kind == "SaveError"
        assert "rank 1" in text
        assert "no entry (test)" in text
        # Raised at step 3 or 4, wherever the ranks met first; on both at the same call.
        assert life.said(rank)["committed"] == life.said(0)["committed"]
    assert life.said(0).get("stopped") == life.said(1).get("stopped")


def test_a_rank_killed_in_a_save_is_named_within_bounds_and_the_generation_before_is_whole(tmp_path: Path) -> None:
    lives = Lives(Pair(), tmp_path)
    try:
        life = lives.live(
            answers=("done\n", ""),
            steps=6,
            hold=[1, 2],  # rank 1 never finishes writing its second part
            save_at=[3, 6],
            kill_after=[1, 6],
            drain_at=[5, 6],
            settings={"interval": "1h", "on_save_error": "raise"},
        )
    finally:
        lives.pair.kill()
    ((kind, text),) = life.said(0)["errors"][:1]
    assert kind == "SaveError"
    assert "rank 1 did not report its part within 3 s" in text
    assert "Earlier generations are whole" in text
    assert lives.steps() == [3]


@pytest.mark.parametrize("rank", [0, 1])
def test_damage_in_any_part_makes_both_ranks_take_the_older_one(lives: Lives, rank: int) -> None:
    lives.live(steps=11, settings={"interval": "5 steps"})
    part = lives.run().discover().generations[0].manifest.parts[rank]
    assert part.blob is not None
    blob = Path(lives.uri) / part.blob.key
    data = bytearray(blob.read_bytes())
    # The rank's own random state is what only this rank reads; it comes last.
    data[-100] ^= 1
    blob.write_bytes(data)
    life = lives.live(steps=12, settings={"interval": "1h"})
    assert [life.said(r)["resumed"] for r in range(2)] == ["000001-000000000005"] * 2
    (line,) = [line for line in life.log().splitlines() if "is passed over" in line]
    assert "generation 000001-000000000010 is passed over" in line
    assert f"rank {rank}: " in line
    assert "is not what was written" in line
    assert "spot: resumed from step 5 (life 1 -> 2" in life.log()


def test_a_mismatch_on_one_rank_refuses_on_both(lives: Lives) -> None:
    lives.live(steps=6, settings={"interval": "5 steps"})
    life = lives.live(steps=8, mismatch_on=1)
    for rank in range(2):
        assert life.said(rank)["errors"] == [["ResumeMismatchError", "another model (test)"]]
    assert lives.steps() == [5]
    assert not (Path(lives.uri) / "lives/000002.json").exists()


def test_a_state_that_one_rank_cannot_save_is_raised_on_both(lives: Lives) -> None:
    life = lives.live(steps=8, save_at=[2, 4], bad_at=[1, 4], settings={"interval": "1h"})
    assert life.said(0)["errors"][0][0] == "SaveError"
    assert life.said(1)["errors"][0][0] == "ConfigError"
    assert lives.steps() == [2]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_notice_to_one_rank_stops_both_at_one_step_saved(lives: Lives, tmp_path: Path, rank: int) -> None:
    control = Lives(lives.pair, tmp_path / "control")
    whole = control.live(steps=400, settings={"interval": "1h"})
    life = lives.live(steps=400, notice_at=[rank, 20], settings={"interval": "1h"})
    (step, code) = life.said(0)["stopped"]
    assert life.said(1)["stopped"] == [step, code]
    assert code == 143
    assert 20 <= step < 400
    assert lives.steps() == [step]
    stop = read_stop(lives.run().store, 1)
    assert stop is not None
    assert (stop.step, stop.exit_code) == (step, 143)
    assert f"saved up to step {step}" in stop.reason
    second = lives.live(steps=400, settings={"interval": "1h"})
    assert second.said(1)["resumed"] == f"000001-{step:012d}"
    assert_same(whole, second)


def test_interval_saves_of_two_ranks_meet_at_one_step(lives: Lives) -> None:
    lives.live(steps=800, settings={"interval": "0.2s", "keep": 50})
    committed = lives.run().discover().generations
    assert committed  # how many depends on the pace of the machine
    assert all(len(c.manifest.parts) == 2 for c in committed)
    assert lives.steps()


# -- no boundary to hear at -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1])
def test_a_notice_to_one_rank_ends_the_wait_of_both_behind_a_save_that_hangs(lives: Lives, rank: int) -> None:
    life = lives.live(
        steps=400,
        hold=[0, 2],  # rank 0 never finishes writing its part of step 10, so the save of step 15 waits
        notice_soon_after=[rank, 15],
        settings={"interval": "5 steps", "window_s": 4},
    )
    assert "step 15 is not saved: the save in flight leaves no time for it" in life.log()
    assert life.said(0)["stopped"] == life.said(1)["stopped"] == [16, 143]
    assert lives.steps() == [5]
    stop = read_stop(lives.run().store, 1)
    assert stop is not None
    assert "saved up to step 5 " in stop.reason


def test_rank_0_killed_while_the_other_waits_for_its_word_is_named_within_bounds(tmp_path: Path) -> None:
    lives = Lives(Pair(), tmp_path)
    try:
        life = lives.live(
            answers=("", "done\n"),
            steps=400,
            hold=[0, 2],
            kill_soon_after=[0, 15],
            settings={"interval": "5 steps"},
        )
    finally:
        lives.pair.kill()
    ((kind, text),) = life.said(1)["errors"]
    assert kind == "ChannelError"
    assert "rank 0 has given no sign of life for" in text
    assert lives.steps() == [5]


# -- no store to agree over -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_sigterm_to_one_rank_where_no_store_can_be_cloned(lives: Lives, tmp_path: Path, rank: int) -> None:
    whole = Lives(lives.pair, tmp_path / "control").live(steps=400, settings={"interval": "1h"})
    settings = {"interval": "30 steps", "sources": "signals", "keep": 50}
    lives.pair = Pair("own")
    try:
        life = lives.live(steps=400, signal_at=[rank, 100], leaves=True, settings=settings)
        assert lives.pair.codes() == [143, 143]
    finally:
        lives.pair.kill()
    step, code = life.said(0)["stopped"]
    assert life.said(1)["stopped"] == [step, code]
    assert 100 < step < 110
    assert lives.steps() == [step, 90, 60, 30]
    assert "they agree by an all-reduce at every step" in life.log(0)
    stop = read_stop(lives.run().store, 1)
    assert stop is not None
    assert (stop.step, stop.exit_code) == (step, 143)
    lives.pair = Pair("own")
    try:
        second = lives.live(steps=400, settings=settings)
    finally:
        lives.pair.kill()
    assert second.said(1)["resumed"] == f"000001-{step:012d}"
    assert_same(whole, second)


def test_how_the_ranks_agree_is_told(lives: Lives) -> None:
    life = lives.live(steps=2)
    assert "the ranks agree over a clone of the store that they met over" in life.log(0)
    assert "agree" not in life.log(1)
