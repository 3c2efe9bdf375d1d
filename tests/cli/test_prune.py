"""prune: what goes, what a dry run tells, and that a running job goes on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from spot_core.run import Run

Spot = Callable[..., Result]
NEWEST, MIDDLE, OLDEST = "000002-000000000030", "000001-000000000020", "000001-000000000010"


def names(run: Run) -> list[str]:
    return [item.id.name for item in run.discover().generations]


def test_keep_drops_the_older_ones(run: Run, spot: Spot) -> None:
    done = spot("prune", run.uri, "--keep", 2, "--json")
    assert done.exit_code == 0
    value = json.loads(done.stdout)
    assert sorted(value) == ["dropped", "dry_run", "leftovers", "objects", "run", "uploads"]
    assert value["dropped"] == [OLDEST]
    assert names(run) == [NEWEST, MIDDLE]
    assert (Path(run.uri) / "tombstones" / OLDEST).exists()


def test_dry_run_tells_the_same_and_does_nothing(run: Run, spot: Spot) -> None:
    told = json.loads(spot("prune", run.uri, "--keep", 1, "--dry-run", "--json").stdout)
    assert names(run) == [NEWEST, MIDDLE, OLDEST]
    assert not (Path(run.uri) / "tombstones").exists()
    done = json.loads(spot("prune", run.uri, "--keep", 1, "--json").stdout)
    assert told.pop("dry_run") is True
    assert done.pop("dry_run") is False
    assert told == done
    assert done["dropped"] == [OLDEST, MIDDLE]


def test_a_damaged_newest_does_not_count_as_kept(run: Run, spot: Spot) -> None:
    next((Path(run.uri) / "generations" / NEWEST).glob("*.blob")).unlink()
    assert spot("prune", run.uri, "--keep", 1).exit_code == 0
    assert MIDDLE in names(run)


def test_orphans_alone_keeps_every_generation(run: Run, spot: Spot) -> None:
    writer = run.claim()
    writer.begin(40).write(0, {"a": b"1"})
    commit = writer.begin(50)
    commit.seal([commit.write(0, {"a": b"1"})], world_size=1).commit({})
    value = json.loads(spot("prune", run.uri, "--orphans", "--json").stdout)
    assert value["dropped"] == []
    assert value["leftovers"] == ["000003-000000000040"]
    assert len(names(run)) == 4


def test_a_running_job_and_its_save_in_flight_are_left_alone(run: Run, spot: Spot) -> None:
    writer = run.claim()
    in_flight = writer.begin(40)
    part = in_flight.write(0, {"a": b"1"})
    assert spot("prune", run.uri, "--keep", 1, "--orphans").exit_code == 0
    in_flight.seal([part], world_size=1).commit({})
    assert names(run) == ["000003-000000000040", NEWEST]


@pytest.mark.parametrize("args", [[], ["--keep", "0"], ["--keep-every", "5"], ["--keep", "2", "--keep-every", "0"]])
def test_a_wrong_call_changes_nothing(run: Run, spot: Spot, args: list[str]) -> None:
    done = spot("prune", run.uri, *args)
    assert done.exit_code == 2
    assert "error: " in done.stderr
    assert names(run) == [NEWEST, MIDDLE, OLDEST]


def test_nothing_to_prune_is_code_3(tmp_path: Path, spot: Spot) -> None:
    assert spot("prune", tmp_path / "absent", "--keep", 1).exit_code == 3
    assert not (tmp_path / "absent").exists()
