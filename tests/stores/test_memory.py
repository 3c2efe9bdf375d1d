"""An upload takes no more memory than its parts under way, however big the object is."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from spot_core.store import open_store
from tests.stores.servers import Server

SIZE = 2_000_000_000
BOUND = 160 << 20  # six parts of 16 MiB under way, one being filled, and what the client itself takes

PROGRAM = """
import json, re, sys
from pathlib import Path
from spot_core.store import open_store

class Endless:
    size, chunk_size = int(sys.argv[2]), 8 << 20
    memory = memoryview(bytearray(8 << 20))
    def chunk(self, i):  # by several threads
        return self.memory[: self.size - i * self.chunk_size]

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) << 10

store = open_store(sys.argv[1], storage_options=json.loads(sys.stdin.read()))
store.list("")  # the client is there
before = peak()
store.put_blob("blob", Endless())
print(peak() - before)
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["seaweedfs", "azurite", "fake-gcs"])
def test_an_upload_of_two_gigabytes(server_named: Callable[[str], Server], run_name: str, name: str) -> None:
    server = server_named(name)
    size = SIZE if name == "seaweedfs" else SIZE // 5
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, server.uri(run_name), str(size)],
        input=json.dumps(dict(server.options)),
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    store = open_store(server.uri(run_name), storage_options=server.options)
    info = store.stat("blob")
    assert info is not None
    assert info.size == size
    store.delete("blob")
    assert int(done.stdout) < BOUND
