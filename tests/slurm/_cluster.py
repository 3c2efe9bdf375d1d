"""A real Slurm on this host: one munged, one slurmctld, two slurmd, in a folder of its own, on free ports.

Needs root and Debian's `slurm-wlm` and `munge`; nothing of an installed Slurm's own configuration is read or changed.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import socket
import subprocess
import time
from pathlib import Path

DAEMONS = ("munged", "slurmctld", "slurmd")
PACKAGES = ("slurm-wlm", "munge")
PATIENCE_S = 240.0

# cred_expire is also how long a requeued job waits before it may start (120 s by default).
# RequeueExit is what a cooperating administrator sets; jobs that are to requeue themselves leave with another code.
CONFIG = """\
ClusterName=spot
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=2,sched_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
RequeueExit=143
KillWait=10
ReturnToService=2
MinJobAge=600
InactiveLimit=0
SlurmdTimeout=30
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 State=UNKNOWN
PartitionName=low Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=30 PreemptMode=REQUEUE
PartitionName=high Nodes=n1,n2 MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


def missing() -> list[str]:
    """Daemons that are not installed."""
    path = f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin"
    return [name for name in DAEMONS if shutil.which(name, path=path) is None]


def install() -> None:
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (["apt-get", "update"], ["apt-get", "install", "-y", "--no-install-recommends", *PACKAGES]):
        subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL)


class Cluster:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SPOT_", "PET_"))}
        self.env |= {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": f"{os.environ['PATH']}:/usr/sbin"}
        self._daemons: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        for name in ("state", "spool-n1", "spool-n2"):
            (self.folder / name).mkdir()
        config = CONFIG.format(host=socket.gethostname(), folder=self.folder, ports=_free_ports(3))
        (self.folder / "slurm.conf").write_text(config)
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        files = {"socket": "munge.sock", "key-file": "munge.key", "pid-file": "munged.pid"}
        files |= {"log-file": "munged.log", "seed-file": "munged.seed"}
        self._daemon("munged", "-F", "-f", *(f"--{option}={self.folder / name}" for option, name in files.items()))
        self.until(lambda: (self.folder / "munge.sock").exists(), "munged listens")
        self._daemon("slurmctld", "-D")
        self._daemon("slurmd", "-D", "-N", "n1")
        self._daemon("slurmd", "-D", "-N", "n2")
        self.until(lambda: self.ask("sinfo", "-h", "-p", "low", "-o", "%T %D") == "idle 2", "both nodes are idle")

    def stop(self) -> None:
        """End all jobs, then the daemons."""
        if (self.folder / "slurmctld.pid").exists():
            subprocess.run(["scancel", "--user=root", "--signal=KILL", "--full"], env=self.env, check=False, timeout=60)
            subprocess.run(["scancel", "--user=root"], env=self.env, check=False, timeout=60)
            end = time.monotonic() + 30
            while self.ask("squeue", "-h") and time.monotonic() < end:
                time.sleep(0.5)
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in reversed(self._daemons):
            try:
                daemon.wait(15)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def ask(self, *command: str) -> str:
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=60, check=False)
        return done.stdout.strip() if done.returncode == 0 else f"error: {done.stderr.strip()}"

    def submit(self, script: Path, *options: str) -> str:
        """Queue `script`; its output goes to `<script>.out`, appended over restarts. Returns the job's id."""
        output = ("--open-mode=append", f"--output={script}.out", "--parsable")
        job = self.ask("sbatch", *output, *options, str(script))
        assert job.isdigit(), job
        return job

    def show(self, job: str, field: str) -> str:
        """One field of the job's record: JobState, Restarts, ExitCode, Reason..."""
        text = self.ask("scontrol", "show", "job", "-o", job)
        found = re.search(rf"(?:^| ){field}=(\S*)", text)
        assert found, f"job {job} has no {field}: {text}"
        return found[1]

    def until_state(self, job: str, *states: str, patience_s: float = PATIENCE_S) -> str:
        why = f"job {job} is {' or '.join(states)}"
        self.until(lambda: self.show(job, "JobState") in states, why, job, patience_s)
        return self.show(job, "JobState")

    def until(self, what, why: str, job: str = "", patience_s: float = PATIENCE_S) -> None:  # type: ignore[no-untyped-def]
        end = time.monotonic() + patience_s
        while not what():
            state = self.ask("scontrol", "show", "job", "-o", job) if job else self.ask("sinfo", "-Nl")
            assert time.monotonic() < end, f"never happened: {why}; {state}"
            time.sleep(0.2)

    def _daemon(self, name: str, *arguments: str) -> None:
        with (self.folder / f"{name}.console").open("ab") as console:
            command = [name, *arguments]
            self._daemons.append(subprocess.Popen(command, env=self.env, stdout=console, stderr=console))


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [sock.getsockname()[1] for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports
