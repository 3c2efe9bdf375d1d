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
from functools import partial
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
SIZE = 40_000_000
"""Three parts; on GCS one stream."""


@pytest.fixture(params=["moto", pytest.param("seaweedfs", marks=pytest.mark.slow)])
def server(request: pytest.FixtureRequest, server_named: Callable[[str], Server]) -> Server:
    return server_named(request.param)


def start(server: Server, uri: str, *saves: str, size: int = SIZE) -> subprocess.Popen[str]:
    life = subprocess.Popen(
        [sys.executable, "-m", "tests.stores.uploader", uri, str(size), *saves],
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


def kill_in_an_upload(
    server: Server, proxy: Proxy, uri: str, whom: str, ripens: Callable[[], object], *, size: int = SIZE
) -> int:
    """Start a life, kill its trainer or its writer after a part began to move, and `ripens` returned; the step
    committed before."""
    moving, saves = threading.Event(), threading.Event()

    def fault(request: Request) -> Fault | None:
        if request.is_part and saves.is_set():
            moving.set()
        return Stall(0.2) if request.is_part else None

    proxy.fault = fault
    life = start(server.behind(proxy.port), uri, size=size)
    try:
        writer = told(life, "writer")
        committed = told(life, "committed")
        saves.set()
        assert moving.wait(60)
        ripens()
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
    return int(pruned(uri, *options)["uploads"])


def pruned(uri: str, *options: str) -> dict[str, Any]:
    done = CliRunner().invoke(app, ["prune", uri, "--orphans", "--json", *options])
    assert done.exit_code == 0, done.output
    told: dict[str, Any] = json.loads(done.stdout)
    return told


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
            after = partial(time.sleep, delay_s)
            newest = max(newest, kill_in_an_upload(server, proxy, uri, whom, after))
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


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["fake-gcs", "azurite"])
def test_kills_in_the_middle_of_an_upload_elsewhere(
    server_named: Callable[[str], Server], run_name: str, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """GCS: streams that nobody sees, and parts side by side, which are objects of their own in their generation's
    folder. Azure: blocks that nobody sees. What nobody sees these stores drop by themselves after a week."""
    server = server_named(name)
    uri, chance = server.uri(run_name), random.Random(5)
    monkeypatch.setenv("SPOT_STORAGE_OPTIONS", json.dumps(dict(server.options)))
    store = open_store(uri, storage_options=server.options)
    foreign = open_store(f"{uri}x", storage_options=server.options)
    foreign.put("generations/000001-000000000001/a0-r00000.blob.part-00", b"another job's")
    size = 3 * (48 << 20) if name == "fake-gcs" else SIZE  # GCS: a part of 64 MiB, another one, and one of 16

    def left() -> list[str]:
        """What a killed save left that is to be seen."""
        live = {str(committed.id) for committed in Run.open(store).discover().generations}
        return [info.key for info in store.list("generations/") if info.key.split("/")[1] not in live]

    def a_part_is_there() -> None:
        end = time.monotonic() + 20
        while not any(".part-" in key for key in left()) and time.monotonic() < end:
            time.sleep(0.02)

    newest, met = 0, 0
    with Proxy(server.port) as proxy:
        for number in range(1, 9):
            whom = "writer" if number % 4 == 2 else "trainer"
            in_parts = name == "fake-gcs" and number % 2 == 0
            ripens = a_part_is_there if in_parts else partial(time.sleep, chance.uniform(0, 0.6))
            newest = max(newest, kill_in_an_upload(server, proxy, uri, whom, ripens, size=size if in_parts else SIZE))
            met += any(".part-" in key for key in left())
            newest = check(server, uri, newest)
    Run.open(store).claim()
    if name == "fake-gcs":
        assert met, "no kill met the parts: the test is vacuous"
        before = left()
        assert bool(pruned(uri, "--dry-run")["leftovers"]) is bool(before)
        assert left() == before, "a dry run has no effect"
    pruned(uri)
    assert left() == []
    assert not [info.key for info in store.list("") if ".part-" in info.key]
    assert [info.key for info in foreign.list("")] == ["generations/000001-000000000001/a0-r00000.blob.part-00"]
    last = start(server, uri, "2")
    assert last.wait(120) == 0
    assert check(server, uri, newest + 2) == newest + 2
