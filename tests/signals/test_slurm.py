"""Against stand-ins for scontrol and squeue that print what 22.05 and 23.11 print; the real ones are in tests/slurm."""

from __future__ import annotations

from datetime import datetime

import pytest

from spot_core.signals import NoticeKind
from spot_core.signals.slurm import SlurmTimeLimit, job_id, requeue

SHOW = "JobId=42 JobName=train TimeLimit=01:00:00 StartTime=2025-01-31T11:00:00 EndTime={} Deadline=N/A"


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """A PATH with commands of our own making."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def write(name: str, output: str = "", code: int = 0):
        script = tmp_path / name
        script.write_text(f'#!/bin/sh\necho "$0 $@" >> {tmp_path}/calls\necho "{output}"\nexit {code}\n')
        script.chmod(0o755)

    write.calls = lambda: [line.split("/")[-1] for line in (tmp_path / "calls").read_text().splitlines()]
    return write


def local(text: str) -> float:
    return datetime.strptime(text, "%Y-%m-%dT%H:%M:%S").astimezone().timestamp()


def test_the_id_of_an_array_task_names_the_task():
    assert job_id({"SLURM_JOB_ID": "42"}) == "42"
    assert job_id({"SLURM_JOB_ID": "44", "SLURM_ARRAY_JOB_ID": "42", "SLURM_ARRAY_TASK_ID": "2"}) == "42_2"
    assert job_id({}) is None


def test_the_end_from_the_environment_needs_no_command(clock, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    source = SlurmTimeLimit("42", end=clock.now() + 3600, clock=clock)
    (notice,) = source.poll()
    assert (notice.id, notice.kind) == ("slurm:42:time-limit", NoticeKind.TIME_LIMIT)
    assert notice.deadline == clock.now() + 3600
    assert source.state == "job 42 ends in 3600 s"


def test_the_end_from_scontrol_is_asked_for_rarely_and_may_move(commands, clock):
    commands("scontrol", SHOW.format("2025-01-31T12:00:00"))
    source = SlurmTimeLimit("42", clock=clock)
    assert [n.deadline for n in source.poll()] == [local("2025-01-31T12:00:00")]
    clock.advance(299)
    source.poll()
    assert commands.calls() == ["scontrol show job -o 42"]
    commands("scontrol", SHOW.format("2025-01-31T13:00:00"))
    clock.advance(1)
    assert source.poll()[-1].deadline == local("2025-01-31T13:00:00")


def test_squeue_serves_where_scontrol_does_not(commands, clock):
    commands("scontrol", code=1)
    commands("squeue", "2025-01-31T12:00:00")
    source = SlurmTimeLimit("42", clock=clock)
    assert [n.deadline for n in source.poll()] == [local("2025-01-31T12:00:00")]
    assert commands.calls()[-1] == "squeue -h -j 42 -o %e"


@pytest.mark.parametrize("text", ["Unknown", "NONE"])
def test_no_limit_is_no_notice(commands, clock, text):
    commands("scontrol", SHOW.format(text))
    source = SlurmTimeLimit("42", clock=clock)
    assert source.poll() == []
    assert source.state == "job 42, no time limit"


def test_a_limit_that_is_lifted_is_taken_back(commands, clock):
    commands("scontrol", SHOW.format("Unknown"))
    source = SlurmTimeLimit("42", end=clock.now() + 900, clock=clock)
    source.poll()
    clock.advance(300)
    assert source.poll()[-1].kind is NoticeKind.CANCELLED
    assert source.poll() == []


def test_a_controller_that_does_not_answer_is_waited_for(commands, clock):
    commands("scontrol", code=1)
    commands("squeue", code=1)
    source = SlurmTimeLimit("42", clock=clock)
    waits = []
    for _ in range(6):
        assert source.poll() == []
        waits.append(source.interval_s)
    assert source.state.startswith("failing (6 in a row)")
    assert waits == [15, 30, 60, 120, 240, 300]


def test_requeue_names_the_job_and_says_whether_it_worked(commands, caplog):
    commands("scontrol")
    assert requeue({"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "1"}) is True
    assert commands.calls() == ["scontrol requeue 7_1"]
    commands("scontrol", code=1)
    assert requeue({"SLURM_JOB_ID": "42"}) is False
    assert "submit it again by hand" in caplog.text
    assert requeue({}) is False
