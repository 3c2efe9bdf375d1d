"""A job under `spot launch` in a real Slurm: whatever takes it away, it comes back by itself and ends as planned.

Seen with Slurm 22.05.8. `exec srun` in the batch script: the shell would otherwise die of the job's SIGTERM first and
its code would be the job's.
"""

from __future__ import annotations

import shlex
import socket
import sys
from pathlib import Path

import pytest

from ._cluster import Cluster
from ._workload import Counting, Lightning, Plan, Workload

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STEP_S = 0.1
ALL_LIVES_S = 700.0  # under a time limit there are several, and a busy machine takes most of one to start
ROOT = Path(__file__).parents[2]


class Job:
    """One batch job that trains `steps` steps on `nodes` nodes of `ranks` ranks each."""

    def __init__(
        self,
        cluster: Cluster,
        folder: Path,
        workload: Workload,
        *,
        nodes: int,
        ranks: int,
        steps: int,
        step_s: float = STEP_S,
    ):
        self.cluster, self.folder, self.workload = cluster, folder, workload
        self.plan, self.step_s = Plan(folder, nodes, ranks, steps), step_s
        self.id = ""

    def submit(self, *sbatch: str, launch: tuple[str, ...] = ()) -> Job:
        with socket.create_server(("127.0.0.1", 0)) as sock:
            port = sock.getsockname()[1]
        plan = self.plan
        options = [f"--run={plan.run}", f"--nproc-per-node={plan.ranks}", f"--nnodes={plan.nodes}", *launch]
        command = [sys.executable, "-m", "spot_core.cli", "launch", *options, "--rdzv-backend=c10d"]
        train = [str(self.workload.script), *self.workload.arguments(plan, self.step_s)]
        script = self.folder / "job.sh"
        script.write_text(
            "#!/bin/bash\n"
            f"export PYTHONPATH={ROOT}\n"
            f"exec srun --nodes={plan.nodes} --ntasks-per-node=1 {shlex.join(command)} "
            f'--rdzv-endpoint=127.0.0.1:{port} --rdzv-id="$SLURM_JOB_ID.${{SLURM_RESTART_COUNT:-0}}" '
            f"-- {shlex.join(train)}\n"
        )
        nodes = (f"--nodes={plan.nodes}", "--ntasks-per-node=1", "--cpus-per-task=2", "--requeue")
        self.id = self.cluster.submit(script, *nodes, "--export=ALL,OMP_NUM_THREADS=1", *sbatch)
        return self

    def trains(self, starts: int = 1) -> Job:
        """Wait until the workers have started that often."""

        def started() -> bool:
            assert self.cluster.show(self.id, "JobState") not in ("FAILED", "COMPLETED"), self.output()
            return len(self.workload.starts(self.plan)) >= starts

        self.cluster.until(started, f"start {starts}", self.id)
        return self

    def comes_back_and_ends(self, restarts: int = 1) -> None:
        ends = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "PREEMPTED")
        state = self.cluster.until_state(self.id, *ends, patience_s=ALL_LIVES_S)
        print(self.output())
        starts = self.workload.starts(self.plan)
        assert state == "COMPLETED"
        assert int(self.cluster.show(self.id, "Restarts")) >= restarts
        assert [start["life"] for start in starts] == list(range(1, len(starts) + 1))
        steps = [start["step"] for start in starts]
        assert len(steps) >= restarts + 1
        assert steps[0] == 0
        assert steps == sorted(set(steps)), "every start goes on where the one before stopped"
        self.workload.check(self.plan)

    def output(self) -> str:
        path = self.folder / "job.sh.out"
        return path.read_text() if path.exists() else ""


def outranking_job(cluster: Cluster, folder: Path, nodes: int) -> str:
    """A job that takes the nodes away."""
    script = folder / "high.sh"
    script.write_text("#!/bin/bash\nsleep 2\n")
    return cluster.submit(script, "--partition=high", f"--nodes={nodes}", "--exclusive")


WORKLOADS = [pytest.param(workload, id=workload.name) for workload in (Counting(), Lightning())]
every_workload = pytest.mark.parametrize("workload", WORKLOADS)


@pytest.fixture
def workload() -> Workload:
    return Counting()


@pytest.fixture
def job(cluster: Cluster, tmp_path: Path, workload: Workload) -> Job:
    return Job(cluster, tmp_path, workload, nodes=1, ranks=2, steps=150)


@every_workload
def test_preempted_on_two_nodes(cluster: Cluster, tmp_path: Path, workload: Workload) -> None:
    job = Job(cluster, tmp_path, workload, nodes=2, ranks=1, steps=150).submit().trains()
    high = outranking_job(cluster, tmp_path, 2)
    job.comes_back_and_ends()
    assert cluster.show(high, "JobState") == "COMPLETED"


def test_preempted_where_the_cluster_does_not_know_the_exit_code(cluster: Cluster, tmp_path: Path, job: Job) -> None:
    """85 is not in RequeueExit: the job would be over, had it not asked for itself."""
    job.submit(launch=("--exit-code=85", "--slurm-requeue")).trains()
    outranking_job(cluster, tmp_path, 2)
    job.comes_back_and_ends()


@every_workload
def test_requeued_by_an_operator(cluster: Cluster, job: Job) -> None:
    job.submit().trains()
    assert cluster.ask("scontrol", "requeue", job.id) == ""
    job.comes_back_and_ends()


@every_workload
def test_time_limit_with_a_signal_before_it(cluster: Cluster, tmp_path: Path, workload: Workload) -> None:
    # Slurm counts in minutes: two of training, or a busy machine would spend a life on starting.
    job = Job(cluster, tmp_path, workload, nodes=1, ranks=2, steps=130, step_s=1.0)
    job.submit("--time=3", "--signal=TERM@60").comes_back_and_ends()


def test_user_signal_before_the_time_limit(cluster: Cluster, tmp_path: Path) -> None:
    """torchrun dies of SIGUSR1 and leaves its workers behind."""
    job = Job(cluster, tmp_path, Counting(), nodes=1, ranks=2, steps=900)
    job.submit("--time=2", "--signal=USR1@60").comes_back_and_ends()


@pytest.mark.parametrize("options", [(), ("--exit-code=85", "--slurm-requeue")], ids=["RequeueExit", "asks for itself"])
def test_cancelled_stays_cancelled(cluster: Cluster, job: Job, options: tuple[str, ...]) -> None:
    """The same signal and the same code; but nobody wants the job back. Slurm would requeue it if asked."""
    job.submit(launch=options).trains()
    assert cluster.ask("scancel", job.id) == ""
    assert cluster.until_state(job.id, "CANCELLED", "PENDING", "COMPLETED", "FAILED") == "CANCELLED"
    assert "Stopped cleanly at step" in job.output()
    assert cluster.show(job.id, "Restarts") == "0"
