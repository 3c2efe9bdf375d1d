"""SIGKILL in the middle of an upload: nothing torn is ever seen, and what is left behind is found and cleared away."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from spot_core import Depth, Run
from spot_core.cli import app
from spot_core.restore import ProblemKind
from spot_core.store import open_store
from tests.faults.proxy import Fault, Proxy, Request, Stall
from tests.stores.servers import BUCKET, KEY, SECRET, Server, s3_client

HARMLESS = {ProblemKind.ORPHAN, ProblemKind.EMPTY, ProblemKind.PRUNED}


@pytest.fixture(params=["moto", pytest.param("seaweedfs", marks=pytest.mark.slow)])
def server(request: pytest.FixtureRequest, server_named: Callable[[str], Server]) -> Server:
    return server_named(request.param)


def start(server: Server, uri: str, *saves: str) -> subprocess.Popen[str]:
    life = subprocess.Popen(
        [sys.executable, "-m", "tests.stores.uploader", uri, *saves],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert life.stdin is not None
    life.stdin.write(json.dumps(dict(server.options)) + "\n")
    life.stdin.flush()
    return life


def told(life: subprocess.Popen[str], word: str) -> int:
    assert life.stdout is not None
    for line in life.stdout:
        if line.startswith(word):
            return int(line.split()[1])
    raise AssertionError(f"the life ended with {life.wait()} before it said {word!r}")


def uploads(client: Any, prefix: str) -> list[str]:
    """Keys of unfinished uploads; one listing is enough for what a test leaves."""
    found = client.list_multipart_uploads(Bucket=BUCKET, Prefix=prefix).get("Uploads", [])
    return [item["Key"] for item in found if item["Key"].startswith(prefix)]


def kill_in_an_upload(server: Server, proxy: Proxy, uri: str, delay_s: float, whom: str) -> int:
    """Start a life, kill its trainer or its writer `delay_s` after a part began to move; the step committed before."""
    moving, saves = threading.Event(), threading.Event()

    def fault(request: Request) -> Fault | None:
        if request.is_part and saves.is_set():
            moving.set()
        return Stall(0.2) if request.is_part else None

    proxy.fault = fault
    life = start(server.behind(proxy.port), uri)
    try:
        writer = told(life, "writer")
        committed = told(life, "committed")
        saves.set()
        assert moving.wait(60)
        time.sleep(delay_s)
        os.kill(writer if whom == "writer" else life.pid, signal.SIGKILL)
        if whom == "trainer":
            while psutil.pid_exists(writer):
                time.sleep(0.01)
        else:
            assert life.wait(60) != 0  # its save failed
    finally:
        life.kill()
        life.wait()
        assert life.stdout is not None
        life.stdout.close()
    return committed


def prune(uri: str, *options: str) -> int:
    """By the command; the number of uploads that it says it aborted."""
    done = CliRunner().invoke(app, ["prune", uri, "--orphans", "--json", *options])
    assert done.exit_code == 0, done.output
    return int(json.loads(done.stdout)["uploads"])


def check(server: Server, uri: str, at_least: int) -> int:
    """Whatever is to be seen is whole; the newest step."""
    run = Run.open(open_store(uri, storage_options=server.options))
    found = run.discover()
    for committed in found.generations:
        run.verify(committed, Depth.DIGESTS)
    assert {problem.kind for problem in found.problems} <= HARMLESS
    assert found.generations[0].id.step >= at_least
    return found.generations[0].id.step


@pytest.mark.parametrize("kills", [pytest.param(1, id="1"), pytest.param(50, id="50", marks=pytest.mark.slow)])
@pytest.mark.timeout(900)
def test_kills_in_the_middle_of_an_upload(
    server: Server, run_name: str, kills: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(kills)
    uri, client = server.uri(run_name), s3_client(server)
    foreign = client.create_multipart_upload(Bucket=BUCKET, Key=f"{run_name}x/generations/000001-000000000001/a")
    newest = 0
    with Proxy(server.port) as proxy:
        for number in range(1, kills + 1):
            whom = "writer" if number % 5 == 2 else "trainer"
            delay_s = 0.05 if number == kills else chance.uniform(0, 0.25)
            newest = max(newest, kill_in_an_upload(server, proxy, uri, delay_s, whom))
            newest = check(server, uri, newest)
    left = uploads(client, f"{run_name}/")
    assert left, "no kill met an upload: the test is vacuous"
    assert all(f"/{kills:06d}-" in key for key in left), "each life clears away what earlier ones left"
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.options["client_kwargs"]["endpoint_url"])
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    assert prune(uri) == 0
    assert uploads(client, f"{run_name}/") == left, "the newest life may still be at it"
    Run.open(open_store(uri, storage_options=server.options)).claim()
    assert prune(uri, "--dry-run") == len(left)
    assert uploads(client, f"{run_name}/") == left, "a dry run has no effect"
    assert prune(uri) == len(left)
    assert uploads(client, f"{run_name}/") == []
    last = start(server, uri, "2")
    assert last.wait(120) == 0
    assert uploads(client, f"{run_name}x/") != [], "another job's upload was aborted"
    assert check(server, uri, newest + 2) == newest + 2
    client.abort_multipart_upload(
        Bucket=BUCKET, Key=f"{run_name}x/generations/000001-000000000001/a", UploadId=foreign["UploadId"]
    )
