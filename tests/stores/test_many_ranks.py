"""Jobs of three ranks under torchrun, whose uploads are watched from the store's side (W8).

Mutants that these tests are there to catch: a setting that does not reach the relay or the writer; a turn that is
passed on before the whole part is there; turns where everybody may write at once.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from spot_core import Depth, Run
from spot_core.store import open_store
from tests.faults.proxy import Fault, Hold, Proxy, Request
from tests.stores.servers import Server, free_port
from tests.stores.test_main_job import environment

pytestmark = [pytest.mark.slow, pytest.mark.dist]

WORLD = 3
SCRIPT = Path(__file__).with_name("_ranks.py")
ROOT = Path(__file__).parents[2]
_PART = re.compile(r"generations/([^/]+)/[^/]*-r(\d+)\.")


@contextlib.contextmanager
def job(server: Server, run: str, steps: int, **settings: str) -> Iterator[subprocess.Popen[str]]:
    """Nothing of it is left at the end of the block."""
    variables: Mapping[str, str] = {
        **{name: value for name, value in os.environ.items() if not name.startswith("SPOT_")},
        **environment(server),
        "PYTHONPATH": str(ROOT),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "SPOT_RUN": server.uri(run),
        "SPOT_INTERVAL": "2 steps",
        "SPOT_SOURCES": "none",
        "SPOT_PREFLIGHT": "false",
        **settings,
    }
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(WORLD), "--master-port", str(free_port())]
    process = subprocess.Popen(
        [sys.executable, *launcher, str(SCRIPT), str(steps)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=variables,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            launcher = psutil.Process(process.pid)
            for left in [*launcher.children(recursive=True), launcher]:  # torchrun's workers have sessions of their own
                with contextlib.suppress(psutil.NoSuchProcess):
                    left.kill()
        process.communicate()


class Watch:
    """The uploads of parts, from the first request that writes something of one to the answer of the last.

    The first request of each is held until `width` of them are under way, and for a moment more, in which one that
    should not be under way would show.
    """

    def __init__(self, width: int) -> None:
        self.width = width
        self.log: dict[str, list[int]] = {}
        """By generation: the rank of each request that began or was answered, in order."""
        self._begun: dict[str, list[int]] = {}
        self._complete: dict[tuple[str, int], threading.Event] = {}

    def begins(self, request: Request) -> Fault | None:
        found = self._noted(request)
        if found is None:
            return None
        name, rank = found
        begun = self._begun.setdefault(name, [])
        if rank in begun:
            return None
        begun.append(rank)
        group = (len(begun) - 1) // self.width
        complete = self._complete.setdefault((name, group), threading.Event())
        if len(begun) == min(WORLD, (group + 1) * self.width):
            threading.Timer(1.0, complete.set).start()
        return Hold(complete)

    def answered(self, request: Request) -> None:
        self._noted(request)

    def _noted(self, request: Request) -> tuple[str, int] | None:
        found = _PART.search(request.key) if request.writes else None
        if found is None:
            return None
        self.log.setdefault(found[1], []).append(int(found[2]))
        return found[1], int(found[2])

    def most(self, name: str) -> int:
        """How many parts of a generation were under way together."""
        log = self.log[name]
        spans = [(log.index(rank), len(log) - 1 - log[::-1].index(rank)) for rank in set(log)]
        assert len(spans) == WORLD
        return max(sum(start <= at <= end for start, end in spans) for at in range(len(log)))


@pytest.fixture(params=["moto", "seaweedfs"])
def server(request: pytest.FixtureRequest, server_named: Callable[[str], Server]) -> Server:
    return server_named(request.param)


@pytest.mark.parametrize("writers", [0, 1, 2])
def test_so_many_ranks_write_at_a_time(server: Server, run_name: str, writers: int) -> None:
    watch = Watch(writers or WORLD)
    with Proxy(server.port) as proxy:
        proxy.fault, proxy.answered = watch.begins, watch.answered
        behind = replace(server, port=proxy.port)
        with job(behind, run_name, 4, SPOT_WRITERS_AT_ONCE=str(writers)) as process:
            output, _ = process.communicate(timeout=240)
            assert process.returncode == 0, output[-3000:]
    assert "failed" not in output
    run = Run.open(open_store(server.uri(run_name), storage_options=server.options))
    found = run.discover().generations
    assert [committed.id.step for committed in found] == [4, 2]
    for committed in found:
        run.verify(committed, Depth.DIGESTS)
        assert [part.rank for part in committed.manifest.parts] == list(range(WORLD))
        assert all(part.blob is not None and part.blob.size > 20_000_000 for part in committed.manifest.parts)
        assert watch.most(committed.id.name) == watch.width


def test_the_bound_of_a_ranks_rate_holds_its_upload_back(server: Server, run_name: str) -> None:
    """At 0.01 MB/s the second chunk of 8 MB passes after a quarter of an hour: nothing is sent until then."""
    begun, parts = set[str](), threading.Event()
    all_begun = threading.Event()

    def seen(request: Request) -> None:
        if request.is_part:
            parts.set()
        elif request.method == "POST" and ".blob" in request.key:
            begun.add(request.key)
            if len(begun) == WORLD:
                all_begun.set()

    with Proxy(server.port) as proxy:
        proxy.answered = seen
        with job(replace(server, port=proxy.port), run_name, 1000, SPOT_MAX_UPLOAD_MB_S="0.01") as process:
            assert all_begun.wait(120), process.poll()
            assert not parts.wait(5)
            assert process.poll() is None
