"""`spot watch` as a process that signals a process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from spot_core.cli import app
from spot_core.cli.watch import Target, Undelivered
from spot_core.signals import FlagFile, Notice, NoticeKind
from spot_core.testing.metadata import FakeAws

FAR = 4_000_000_000
"""A deadline in 2096: --lead has to let it through."""
LEAD = "1e12"

TRAINER = """
import signal, sys
got = []
for s in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(s, lambda signum, frame: (print(signal.Signals(signum).name, flush=True), got.append(signum)))
print("ready", flush=True)
while not got:
    signal.pause()
"""


@pytest.fixture
def aws() -> Iterator[FakeAws]:
    with FakeAws() as server:
        yield server


@pytest.fixture
def trainer() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, "-c", TRAINER], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


@pytest.fixture
def watch(aws):
    """Start `spot watch` against the fake; what is still running at the end is ended."""
    started = []

    def start(*args: object, source: str = "aws") -> subprocess.Popen[str]:
        env = {**os.environ, "AWS_EC2_METADATA_SERVICE_ENDPOINT": aws.url}
        command = [sys.executable, "-m", "spot_core.cli", "watch", "--source", source, "--lead", LEAD, *map(str, args)]
        process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_a_process_is_signalled_when_the_notice_comes(aws, watch, trainer):
    watching = watch("--pid", trainer.pid)
    assert aws.wait_for_requests(4, 60)
    assert trainer.poll() is None
    aws.interrupt("terminate", FAR)
    assert watching.wait(60) == 0
    assert trainer.wait(60) == 0
    assert trainer.stdout.read() == "SIGTERM\n"


def test_the_process_of_a_pid_file_with_another_signal(aws, watch, trainer, tmp_path):
    pid_file = tmp_path / "train.pid"
    pid_file.write_text(f"{trainer.pid}\n")
    aws.interrupt("terminate", FAR)
    assert watch("--pid-file", pid_file, "--signal", "usr1").wait(60) == 0
    assert trainer.stdout.read() == "SIGUSR1\n"


def test_the_flag_file_holds_the_notice_for_the_training(aws, watch, tmp_path):
    flag = tmp_path / "flag"
    source = FlagFile(flag)
    source.open()
    aws.recommend_rebalance(FAR)
    watching = watch("--flag-file", flag)
    assert aws.wait_for_requests(5, 60)
    aws.interrupt("terminate", FAR)
    assert watching.wait(60) == 0
    # A stopping notice goes before advice.
    (notice,) = source.poll()
    assert (notice.id, notice.kind, notice.deadline) == ("aws:spot-interruption", NoticeKind.PREEMPTION, FAR)
    assert json.loads(flag.read_text())["source"] == "aws"


def test_advice_is_written_but_sends_no_signal(aws, watch, trainer, tmp_path):
    flag = tmp_path / "flag"
    aws.recommend_rebalance(FAR)
    watching = watch("--flag-file", flag, "--pid", trainer.pid)
    assert aws.wait_for_requests(9, 60)
    assert json.loads(flag.read_text())["kind"] == "advisory"
    assert watching.poll() is None
    assert trainer.poll() is None


def test_with_follow_it_goes_on_and_a_cancelled_notice_removes_the_file(aws, watch, tmp_path):
    flag = tmp_path / "flag"
    aws.schedule("instance-stop", FAR)
    watching = watch("--flag-file", flag, "--pid", 2**22 + 1, "--follow")
    assert aws.wait_for_requests(9, 60)
    assert json.loads(flag.read_text())["kind"] == "maintenance"
    # The process was not there; with --follow that is no reason to stop.
    assert watching.poll() is None
    watching.send_signal(signal.SIGTERM)
    assert watching.wait(60) == -signal.SIGTERM
    assert "cannot be signalled" in watching.stderr.read()


def test_once_prints_what_holds(aws, watch):
    quiet = watch("--once")
    assert (quiet.wait(60), quiet.stdout.read()) == (3, "")
    aws.interrupt("stop", FAR)
    loud = watch("--once")
    assert loud.wait(60) == 0
    assert json.loads(loud.stdout.read()) == {
        "id": "aws:spot-interruption",
        "kind": "preemption",
        "source": "aws",
        "deadline": FAR,
        "detail": "spot stop",
    }


def test_once_says_when_it_could_not_look(aws, watch):
    aws.fail(503, times=99)
    failing = watch("--once")
    assert failing.wait(60) == 3
    assert "failing (1 in a row)" in failing.stderr.read()


@pytest.mark.parametrize("how", ["--pid", "--pid-file", "--process-name"])
def test_a_target_that_is_not_there_is_code_7(aws, watch, tmp_path, how):
    aws.interrupt("terminate", FAR)
    value = {"--pid": 2**22 + 1, "--pid-file": tmp_path / "none", "--process-name": "no-process-has-this-name"}[how]
    watching = watch(how, value)
    assert watching.wait(60) == 7
    assert "was not delivered" in watching.stderr.read()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "nobody to tell"),
        (["--once", "--source", "asw"], "Accepted, joined by commas"),
        (["--once", "--source", "sigterm"], "not the job"),
        (["--pid", "1", "--signal", "SIGNOTHING"], "Accepted: SIGTERM"),
        (["--pid", "-1"], "one process"),
    ],
)
def test_a_wrong_call_says_what_is_accepted(args, words):
    wrong = CliRunner().invoke(app, ["watch", *args])
    assert wrong.exit_code == 2
    assert words in wrong.stderr


@pytest.mark.parametrize("text", ["0", "-1", "soon", ""])
def test_a_pid_file_never_addresses_a_group(tmp_path, text):
    pid_file = tmp_path / "train.pid"
    pid_file.write_text(text)
    with pytest.raises(Undelivered, match="holds no process id"):
        Target(pid_file=pid_file).tell(Notice("a", NoticeKind.PREEMPTION, "aws"))
