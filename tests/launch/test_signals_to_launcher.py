"""What `spot launch` does with signals: real agents, real workers.

torchrun alone leaves with 1 in every one of these cases, orphans its workers on the third SIGTERM and on SIGUSR1.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from ._launcher import alive, free_port, spot_launch, wait_for

SAVES = {"on": {"SIGTERM": 143, "SIGINT": 143, "SIGUSR1": 143, "SIGUSR2": 143}, "save_s": 1.0, "stop": True}
TWO = ("--nproc-per-node", "2")


@pytest.mark.parametrize("name", [pytest.param("SIGTERM", marks=pytest.mark.slow), "SIGUSR1"])
def test_one_signal_reaches_every_worker_once_and_the_code_is_restored(tmp_path: Path, name: str) -> None:
    with spot_launch(tmp_path, {"*": SAVES}, *TWO) as job:
        job.started().tell(getattr(signal, name))
        assert job.code() == 143
        for rank in (0, 1):
            # The last one comes from the agent, when its peer left first.
            assert job.signals(rank) in ([name], [name, "SIGTERM"])
            assert job.said(rank, "end") == ["143"]


@pytest.mark.parametrize(
    "name", [pytest.param("SIGINT", marks=pytest.mark.slow), pytest.param("SIGUSR2", marks=pytest.mark.slow)]
)
def test_the_other_signals_are_passed_on_too(tmp_path: Path, name: str) -> None:
    with spot_launch(tmp_path, {"*": SAVES}, *TWO) as job:
        job.started().tell(getattr(signal, name))
        assert job.code() == 143
        assert job.signals(0)[0] == job.signals(1)[0] == name


def test_three_sigterms_neither_cut_the_save_nor_leave_a_worker(tmp_path: Path) -> None:
    with spot_launch(tmp_path, {"*": {**SAVES, "save_s": 2.0}}, *TWO) as job:
        job.started()
        for count in (1, 2, 3):
            job.tell(signal.SIGTERM).wait_signals(0, count).wait_signals(1, count)
        assert job.code() == 143
        assert job.said(0, "end") == job.said(1, "end") == ["143"]


def test_one_process_is_stopped_like_many(tmp_path: Path) -> None:
    with spot_launch(tmp_path, {"*": SAVES}) as job:
        job.started(1).tell(signal.SIGTERM).wait_signals(0, 1).tell(signal.SIGTERM)
        assert job.code() == 143
        assert job.said(0, "end") == ["143"]


def test_workers_that_do_not_leave_are_killed_after_the_grace(tmp_path: Path) -> None:
    deaf = {"on": {"SIGTERM": "ignore"}}
    with spot_launch(tmp_path, {"*": deaf}, *TWO, "--grace", "2.5", env={"SPOT_WINDOW_S": "2"}) as job:
        job.started().tell(signal.SIGTERM)
        assert job.code() == 137  # killed, and no record of a clean stop
        assert job.signals(0) == job.signals(1) == ["SIGTERM"]
        assert job.said(0, "end") == job.said(1, "end") == []
        assert {"SPOT_GRACE_S 2.5", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT 3"} <= set(job.said(0, "env"))


@pytest.mark.parametrize("signum", [signal.SIGKILL, pytest.param(signal.SIGSEGV, marks=pytest.mark.slow)])
def test_a_launcher_that_dies_takes_its_workers_along(tmp_path: Path, signum: int) -> None:
    deaf = {"on": {"SIGTERM": "ignore"}}
    with spot_launch(tmp_path, {"*": deaf}, *TWO) as job:
        pids = job.started().pids()
        assert alive(pids) == pids
        job.tell(signum)
        wait_for(lambda: alive(pids) == [], "the workers die with their launcher")
        assert job.process.wait(10) == -signum


def test_two_launchers_stop_together_when_one_is_told(tmp_path: Path) -> None:
    plan = {"*": {**SAVES, "save_s": 0.3, "joint": True}}
    rendezvous = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-id", "two", "--rdzv-endpoint")
    options = (*rendezvous, f"localhost:{free_port()}")
    with spot_launch(tmp_path, plan, *options) as first, spot_launch(tmp_path, plan, *options) as second:
        first.started(2)
        second.tell(signal.SIGTERM)
        assert second.code() == 143
        assert first.code() == 143
        # Only one launcher was told: ranks are given out by the rendezvous, so which one is not known.
        assert sorted(len(first.signals(rank)) > 0 for rank in (0, 1)) == [False, True]


def test_told_to_leave_while_waiting_for_other_nodes(tmp_path: Path) -> None:
    options = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-id", "two", "--rdzv-endpoint")
    with spot_launch(tmp_path, {}, *options, f"localhost:{free_port()}", "--run", str(tmp_path / "run")) as job:
        name = Path(f"/proc/{job.process.pid}/comm")
        wait_for(lambda: "pt_elastic" in name.read_text(), "the agent runs")
        job.tell(signal.SIGTERM)
        assert job.code() == 143  # no life was begun: nothing to save, the job may come back
        assert job.pids() == []


def test_told_to_leave_while_torch_is_imported(tmp_path: Path) -> None:
    with spot_launch(tmp_path, {}) as job:
        status = Path(f"/proc/{job.process.pid}/status")
        term = 1 << (signal.SIGTERM - 1)
        wait_for(lambda: int(status.read_text().split("SigBlk:")[1].split()[0], 16) & term, "the launcher listens")
        job.tell(signal.SIGTERM)
        assert job.process.wait(60) == 143
        assert "Traceback" not in job.output()


@pytest.mark.slow
def test_told_to_leave_while_stuck_in_a_connect(tmp_path: Path) -> None:
    """torch waits for the first node in C++, where no Python handler runs."""
    options = ("--nnodes", "2", "--node-rank", "1", "--master-addr", "127.0.0.1", "--master-port", str(free_port()))
    with spot_launch(tmp_path, {}, *options) as job:
        name = Path(f"/proc/{job.process.pid}/comm")
        wait_for(lambda: "pt_elastic" in name.read_text(), "the agent runs")
        job.tell(signal.SIGTERM)
        assert job.code() == 1


def test_a_stopped_group_is_not_started_again_in_place(tmp_path: Path) -> None:
    with spot_launch(tmp_path, {"*": SAVES}, *TWO, "--max-restarts", "2") as job:
        job.started().tell(signal.SIGTERM).wait_signals(0, 1).wait_signals(1, 1).tell(signal.SIGTERM)
        assert job.code() == 143
        assert len(job.said(0, "start")) == len(job.said(1, "start")) == 1
        assert job.said(0, "end") == job.said(1, "end") == ["143"]
        assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE 1" in job.said(0, "env")


def test_a_group_that_stopped_by_itself_is_not_started_again_in_place(tmp_path: Path) -> None:
    """A notice from the cloud reaches the workers, not the launcher."""
    plan = {"*": {"after": [0.5, 143], "on": {"SIGTERM": 143}, "stop": True}}
    with spot_launch(tmp_path, plan, *TWO, "--max-restarts", "2") as job:
        assert job.code() == 143
        assert len(job.said(0, "start")) == len(job.said(1, "start")) == 1
