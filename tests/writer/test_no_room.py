"""A store without room fails the save with the reason, leaves nothing that counts, and takes the next save again."""

from __future__ import annotations

import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from spot_core.errors import SaveError
from spot_core.store import open_store
from spot_core.writer import WriteJob, WriterClient

from ._snapshot import blob_bytes, target

WAIT = 60
ROOM = 8 << 20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB; only root can mount one."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={ROOM}", "tmpfs", str(place)], capture_output=True, check=False
    )
    if mount.returncode:
        pytest.skip(f"cannot mount a small file system: {mount.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def write(client: WriterClient, step: int, size: int) -> object:
    slab = client.arm(size)
    slab.data[:size] = bytes([step]) * size
    future = client.submit(WriteJob(0, target(step), size, {}))
    client.advance(size)
    return future.result(WAIT)


@pytest.mark.parametrize("mode", ["process", "thread"])
def test_a_full_disk(small_disk: Path, mode: str) -> None:
    store = open_store(small_disk / "run")
    client = WriterClient.start(store, mode=mode)  # type: ignore[arg-type]
    try:
        write(client, 1, 3 << 20)
        with pytest.raises(SaveError, match=r"generations/000001-000000000002/.*[Nn]o space"):
            write(client, 2, 12 << 20)
        assert {info.key for info in store.list("")} == {target(1).blob_key, target(1).index_key}
        part = write(client, 3, 3 << 20)  # the failed blob is not there to take the room
        assert blob_bytes(store, part) == bytes([3]) * (3 << 20)  # type: ignore[arg-type]
    finally:
        client.close()


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="sets another process's limit")
def test_a_file_size_limit_is_an_error_of_the_save(tmp_path: Path) -> None:
    client = WriterClient.start(str(tmp_path / "run"))
    try:
        assert client.pid is not None
        resource.prlimit(client.pid, resource.RLIMIT_FSIZE, (ROOM, ROOM))
        with pytest.raises(SaveError, match="too large"):
            write(client, 1, ROOM + 1)
        write(client, 2, ROOM)
    finally:
        client.close()


def test_memory_that_cannot_be_had_is_an_error_of_the_save(tmp_path: Path) -> None:
    client = WriterClient.start(str(tmp_path / "run"))
    try:
        with pytest.raises(SaveError, match="shared memory"):
            client.reserve(1 << 60)
        write(client, 1, 5)
    finally:
        client.close()
