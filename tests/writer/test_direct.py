"""Blob files: whole or absent, at whatever the file system allows; ranges read into the caller's memory."""

from __future__ import annotations

import errno
import itertools
import mmap
import multiprocessing
import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from spot_core.store import BytesSource, _direct
from spot_core.store._direct import read_ranges, write_file

CHUNK = 64 << 10


class PageSource(BytesSource):
    """Bytes in page-aligned memory, with rubbish behind them, as in a slab."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data, CHUNK)
        self._pages = mmap.mmap(-1, (len(data) // 4096 + 1) * 4096)
        self._pages[:] = b"\xff" * len(self._pages)
        self._pages[: len(data)] = data
        self.padded = 0

    def padded_chunk(self, i: int) -> memoryview | None:
        self.padded += 1
        end = -(-min((i + 1) * CHUNK, self.size) // 4096) * 4096
        return memoryview(self._pages)[i * CHUNK : end]


@pytest.mark.parametrize("size", [0, 1, 4096, CHUNK - 1, CHUNK, 7 * CHUNK + 5000])
def test_a_file_holds_exactly_the_bytes(tmp_path: Path, size: int) -> None:
    data = os.urandom(size)
    write_file(tmp_path / "a", PageSource(data))
    write_file(tmp_path / "b", BytesSource(data, CHUNK))
    assert (tmp_path / "a").read_bytes() == data
    assert (tmp_path / "b").read_bytes() == data


@pytest.mark.parametrize("where", ["at the open", "at the write"])
def test_a_file_system_that_refuses_o_direct_gets_plain_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    refused, open_, pwrite = [], os.open, os.pwrite
    direct: set[int] = set()

    def opening(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT and where == "at the open":
            refused.append(path)
            raise OSError(errno.EINVAL, "no O_DIRECT here")
        fd = open_(path, flags, mode)
        if flags & os.O_DIRECT:
            direct.add(fd)
        return fd

    def writing(fd: int, data: memoryview, offset: int) -> int:
        if fd in direct:
            refused.append(offset)
            raise OSError(errno.EINVAL, "larger blocks here")
        return pwrite(fd, data, offset)

    monkeypatch.setattr(_direct.os, "open", opening)
    monkeypatch.setattr(_direct.os, "pwrite", writing)
    data = os.urandom(3 * CHUNK + 17)
    write_file(tmp_path / "a", PageSource(data))
    monkeypatch.undo()
    assert refused
    assert (tmp_path / "a").read_bytes() == data


def test_writes_that_stop_short_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite = os.pwrite
    monkeypatch.setattr(_direct.os, "pwrite", lambda fd, data, offset: pwrite(fd, data[:4096], offset))
    data = os.urandom(2 * CHUNK + 17)
    write_file(tmp_path / "a", PageSource(data))
    monkeypatch.undo()
    assert (tmp_path / "a").read_bytes() == data


def test_a_name_that_is_taken_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        write_file(tmp_path / "a", PageSource(b"yours"))
    assert (tmp_path / "a").read_bytes() == b"mine"


def test_a_file_that_cannot_be_finished_is_removed(tmp_path: Path) -> None:
    class Broken(PageSource):
        def padded_chunk(self, i: int) -> memoryview | None:
            if i == 3:
                raise RuntimeError("no such chunk")
            return super().padded_chunk(i)

    source = Broken(os.urandom(40 * CHUNK))
    with pytest.raises(RuntimeError, match="no such chunk"):
        write_file(tmp_path / "a", source)
    assert not list(tmp_path.iterdir())
    assert source.padded < 20  # the first error ended the other threads too


def test_data_is_synced_after_the_last_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    fsync, pwrite, ftruncate = os.fsync, os.pwrite, os.ftruncate
    monkeypatch.setattr(_direct.os, "fsync", lambda fd: (events.append("fsync"), fsync(fd))[1])
    monkeypatch.setattr(_direct.os, "pwrite", lambda *a: (events.append("write"), pwrite(*a))[1])
    monkeypatch.setattr(_direct.os, "ftruncate", lambda *a: (events.append("cut"), ftruncate(*a))[1])
    write_file(tmp_path / "a", PageSource(os.urandom(3 * CHUNK + 17)))
    assert events == ["write"] * 4 + ["cut", "fsync"]


class Noted(PageSource):
    """Knows which threads asked for its chunks; `held` holds them up at the first one."""

    def __init__(self, data: bytes, held: threading.Event | None = None) -> None:
        super().__init__(data)
        self.held, self.reached, self.threads = held, threading.Event(), set[threading.Thread]()

    def padded_chunk(self, i: int) -> memoryview | None:
        self.threads.add(threading.current_thread())
        self.reached.set()
        if self.held is not None:
            assert self.held.wait(30)
        return super().padded_chunk(i)


def test_the_next_file_is_written_by_the_threads_that_are_there(tmp_path: Path) -> None:
    """To start them is to wait for cores that are busy."""
    seen = set[threading.Thread]()
    for step in range(5):
        source = Noted(os.urandom(9 * CHUNK))
        write_file(tmp_path / str(step), source, threads=3)
        assert source.threads
        seen |= source.threads
    assert len(seen) <= 3  # without any that is kept, at least one per file


def test_a_file_that_hangs_holds_up_no_other(tmp_path: Path) -> None:
    go = threading.Event()
    slow, quick = Noted(os.urandom(9 * CHUNK), held=go), Noted(os.urandom(9 * CHUNK))
    write_file(tmp_path / "before", PageSource(b"leaves threads behind"))
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write_file, tmp_path / "slow", slow)
        assert slow.reached.wait(30)
        write_file(tmp_path / "quick", quick)
        go.set()
        writing.result(30)
    assert not slow.threads & quick.threads
    assert (tmp_path / "slow").stat().st_size == (tmp_path / "quick").stat().st_size == 9 * CHUNK


def test_no_thread_of_a_file_that_failed_goes_on(tmp_path: Path) -> None:
    class Broken(Noted):
        def padded_chunk(self, i: int) -> memoryview | None:
            super().padded_chunk(i)
            raise RuntimeError("no such chunk")

    source = Broken(os.urandom(9 * CHUNK))
    with pytest.raises(RuntimeError, match="no such chunk"):
        write_file(tmp_path / "a", source)
    assert not any(thread.is_alive() for thread in source.threads)


def test_a_forked_process_has_threads_of_its_own(tmp_path: Path) -> None:
    """Those of its parent do not run in it."""
    data = os.urandom(9 * CHUNK)
    write_file(tmp_path / "parent", PageSource(data))
    child = multiprocessing.get_context("fork").Process(target=write_file, args=(tmp_path / "child", PageSource(data)))
    child.start()
    child.join(30)
    assert child.exitcode == 0
    assert (tmp_path / "child").read_bytes() == data


@pytest.mark.parametrize("piece", [4096, 8 << 20])
def test_ranges_fill_the_given_buffers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    monkeypatch.setattr(_direct, "_READ_BYTES", piece)
    data = os.urandom(300_000)
    (tmp_path / "a").write_bytes(data)
    rng = random.Random(1)
    cuts = sorted({0, len(data), *(rng.randrange(len(data)) for _ in range(1500))})
    found = bytearray(len(data))
    buffers = [memoryview(found)[a:b] for a, b in itertools.pairwise(cuts)]
    half = len(buffers) // 2
    read_ranges(tmp_path / "a", [(0, buffers[:half]), (cuts[half], [*buffers[half:], memoryview(b"")])])
    assert found == data


def test_buffers_of_other_element_types_are_filled(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(range(64)))
    buffer = memoryview(bytearray(32)).cast("d")
    read_ranges(tmp_path / "a", [(16, [buffer])])
    assert buffer.tobytes() == bytes(range(16, 48))


def test_reads_that_stop_short_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = os.urandom(10_000)
    (tmp_path / "a").write_bytes(data)
    preadv = os.preadv
    monkeypatch.setattr(_direct.os, "preadv", lambda fd, buffers, offset: preadv(fd, [buffers[0][:777]], offset))
    found = bytearray(10_000)
    read_ranges(tmp_path / "a", [(0, [memoryview(found)[:3000], memoryview(found)[3000:]])])
    assert found == data


def test_a_file_that_ends_early_is_an_end_of_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    with pytest.raises(EOFError, match="before byte 8"):
        read_ranges(tmp_path / "a", [(2, [memoryview(bytearray(6))])])
