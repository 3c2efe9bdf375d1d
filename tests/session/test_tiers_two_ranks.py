"""A local tier on two machines: each rank has a folder of its own; together they hold a generation, or they do not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from spot_core.run import Run

from .test_two_ranks import Life, Lives, Pair, assert_same

pytestmark = pytest.mark.dist

OLD, NEW = "000001-000000000003", "000001-000000000006"


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.kill()


class Machines(Lives):
    """Lives whose ranks have a local tier each."""

    def __init__(self, pair: Pair, folder: Path) -> None:
        super().__init__(pair, folder)
        self.local = folder / "local"

    def first(self) -> None:
        """Step 3 at both tiers; the drain of step 6 hangs on rank 1."""
        life = self.live(
            steps=7,
            save_at=[3, 6],
            drain_at=[4],
            hold=[1, 2],
            close_s=0.5,
            local=str(self.local),
            settings={"interval": "1h"},
        )
        assert life.said(0)["committed"] == [[4, OLD]]
        assert self.steps() == [3]

    def second(self) -> Life:
        return self.live(steps=9, drain_at=[8], local=str(self.local), settings={"interval": "1h"})

    def machine(self, rank: int) -> Path:
        return self.local / f"m{rank}"


@pytest.fixture
def machines(pair: Pair, tmp_path: Path) -> Machines:
    machines = Machines(pair, tmp_path)
    machines.first()
    return machines


def whole(pair: Pair, folder: Path) -> Life:
    return Lives(pair, folder).live(steps=9, settings={"interval": "1h"})


def resumed(life: Life) -> list[str]:
    return [life.said(rank)["resumed"] for rank in range(2)]


def test_what_is_only_local_on_both_is_resumed_from_and_goes_on_to_the_store(
    machines: Machines, pair: Pair, tmp_path: Path
) -> None:
    life = machines.second()
    assert resumed(life) == [NEW, NEW]
    assert life.said(0)["committed"] == life.said(1)["committed"] == [[8, NEW]]
    assert machines.steps() == [6, 3]
    assert_same(whole(pair, tmp_path / "control"), life)


@pytest.mark.parametrize(
    ("damage", "rank"), [("machine replaced", 0), ("machine replaced", 1), ("torn", 1), ("corrupt", 1)]
)
def test_when_one_machine_lacks_its_part_both_take_the_durable_one(
    machines: Machines, pair: Pair, tmp_path: Path, damage: str, rank: int
) -> None:
    (blob,) = machines.machine(rank).glob(f"*/generations/{NEW}/*-r{rank:05d}.blob")
    if damage == "machine replaced":
        shutil.rmtree(machines.machine(rank))
    elif damage == "torn":
        blob.write_bytes(blob.read_bytes()[:-1])
    else:
        data = bytearray(blob.read_bytes())
        data[-100] ^= 1  # the rank's own random state, which only this rank reads, comes last
        blob.write_bytes(data)
    life = machines.second()
    assert resumed(life) == [OLD, OLD]
    assert_same(whole(pair, tmp_path / "control"), life)


def test_ranks_that_changed_machines_still_hold_it_together(machines: Machines, pair: Pair, tmp_path: Path) -> None:
    machines.machine(0).rename(machines.local / "m")
    machines.machine(1).rename(machines.machine(0))
    (machines.local / "m").rename(machines.machine(1))
    life = machines.second()
    assert resumed(life) == [NEW, NEW]
    assert_same(whole(pair, tmp_path / "control"), life)


def test_each_machine_keeps_only_what_it_needs(machines: Machines) -> None:
    machines.second()
    machines.live(steps=16, save_at=[11, 13, 15], drain_at=[12, 14, 16], local=str(machines.local))
    for rank in range(2):
        (folder,) = machines.machine(rank).iterdir()
        names = sorted(path.name for path in (folder / "generations").iterdir())
        assert [int(name.partition("-")[2]) for name in names] == [11, 13, 15]
    assert Run.open(machines.uri).discover().generations[0].id.step == 15
    assert json.loads((folder / "lives" / "000003.json").read_text())["life"] == 3
