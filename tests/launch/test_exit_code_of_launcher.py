"""Which code `spot launch` leaves with: real agents and workers. The rule itself is tested in test_exit_code.py."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from ._launcher import spot_launch

TWO = ("--nproc-per-node", "2")


def leaves(code: int, after: float = 0.3, **more: Any) -> dict[str, Any]:
    return {"after": [after, code], **more}


PEER = {"on": {"SIGTERM": 143}}  # leaves when its peer has left


@pytest.mark.parametrize(
    ("plan", "code"),
    [
        pytest.param(
            {"0": leaves(143, stop=True), "1": PEER}, 143, id="one rank leaves first, clean", marks=pytest.mark.slow
        ),
        pytest.param(
            {"0": leaves(143, stop=True), "1": {}}, 143, id="its peer dies by SIGTERM", marks=pytest.mark.slow
        ),
        pytest.param({"0": leaves(143), "1": PEER}, 1, id="no record of a clean stop"),
        pytest.param({"0": leaves(143, stop=True), "1": {**PEER, "on": {"SIGTERM": 1}}}, 1, id="mixed 143 and 1"),
        pytest.param({"0": leaves(0, 0.1), "1": leaves(143, 0.8, stop=True)}, 143, id="one rank ends with 0"),
        pytest.param({"*": leaves(0)}, 0, id="all end with 0", marks=pytest.mark.slow),
        pytest.param({"0": leaves(77), "1": {}}, 77, id="a failure keeps its code", marks=pytest.mark.slow),
    ],
)
def test_code(tmp_path: Path, plan: dict[str, Any], code: int) -> None:
    with spot_launch(tmp_path, plan, *TWO) as job:
        assert job.code() == code


def test_configured_code_and_arguments(tmp_path: Path) -> None:
    plan = {"0": leaves(85, stop=True)}
    with spot_launch(tmp_path, plan, "--exit-code", "85", args=("--run", "x", "--", "y")) as job:
        assert job.code() == 85
        assert json.loads(job.said(0, "args")[0]) == ["--run", "x", "--", "y"]
        assert "SPOT_EXIT_CODE 85" in job.said(0, "env")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stop", "code"), [("run", 143), ("life", 1), (False, 1)], ids=["record", "life without record", "told nothing"]
)
def test_record_in_the_run(tmp_path: Path, stop: str | bool, code: int) -> None:
    plan = {"0": leaves(143, stop=stop)}
    with spot_launch(tmp_path, plan, env={"SPOT_RUN": str(tmp_path / "run")}) as job:
        assert job.code() == code


@pytest.mark.slow
def test_record_of_an_older_life_does_not_count(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    with spot_launch(tmp_path, {"0": leaves(143, stop="run")}, "--run", run) as job:
        assert job.code() == 143
    with spot_launch(tmp_path, {"0": leaves(143)}, "--run", run) as job:
        assert job.code() == 1


def test_stopped_before_the_run_began(tmp_path: Path) -> None:
    """A preemption while torch is still being imported: nothing is lost, the job may come back."""
    with spot_launch(tmp_path, {}, "--run", str(tmp_path / "run")) as job:
        job.started(1).tell(signal.SIGTERM)
        assert job.code() == 143


def test_crashed_workers_are_restarted_in_place_when_asked_for(tmp_path: Path) -> None:
    with spot_launch(tmp_path, {"*": leaves([3, 0])}, *TWO, "--max-restarts", "1") as job:  # type: ignore[arg-type]
        assert job.code() == 0
        assert [line.split()[1] for line in job.said(0, "start")] == ["0", "1"]


def test_a_wrong_setting_is_told_in_one_line(tmp_path: Path) -> None:
    with spot_launch(tmp_path, {"*": leaves(0)}, "--exit-code", "1") as job:
        output = job.output()
        assert job.process.returncode == 2
        assert "exit_code=1 is not possible" in output
        assert "Traceback" not in output
        assert job.pids() == []
