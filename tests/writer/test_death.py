"""The writer never outlives its trainer, survives what only the trainer should act on, and is replaced when it dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from spot_core.errors import SaveError
from spot_core.manifest import Part
from spot_core.store import Store, open_store
from spot_core.writer import WriteJob, WriterClient

from ._snapshot import blob_bytes, target

BOUND_S = 30
SIZE = 48 << 20
WAIT = 60


class Trainer:
    """`_trainer.py` in a process group of its own."""

    def __init__(self, run: Path, *options: str) -> None:
        self.store = open_store(run)
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("_trainer.py")), str(run), str(SIZE), *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.writer = psutil.Process(int(self.answer("writer")))

    def tell(self, command: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()

    def answer(self, word: str) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith(word), line
        return line[len(word) + 1 :].strip()

    def half(self) -> str:
        """Leave the writer in the middle of the blob; the blob's key."""
        self.tell("half")
        self.writer = psutil.Process(int(self.answer("half")))
        blob = target(1).blob_key
        wait_until(lambda: self.store.stat(blob) is not None)
        return blob

    def rest(self) -> Part:
        self.tell("rest")
        return Part.from_json(json.loads(self.answer("part")))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Trainer]:
    trainer = Trainer(tmp_path / "run")
    yield trainer
    trainer.kill()


def wait_until(condition: object) -> None:
    end = time.monotonic() + BOUND_S
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.01)


def gone(process: psutil.Process) -> bool:
    """Ended; a zombie that nobody has reaped yet (as in a container without an init) counts as ended."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def objects(store: Store) -> set[str]:
    return {info.key for info in store.list("")}


def test_a_killed_trainer_takes_its_writer_along_in_the_middle_of_a_write(trainer: Trainer) -> None:
    blob = trainer.half()
    trainer.kill()
    wait_until(lambda: gone(trainer.writer))
    assert objects(trainer.store) == {blob}  # no index, no marker: nothing that counts


def test_a_writer_started_by_a_thread_that_ended_lives_and_dies_with_the_process(tmp_path: Path) -> None:
    """PR_SET_PDEATHSIG alone would kill it with the thread."""
    trainer = Trainer(tmp_path / "run", "--in-thread")
    first = trainer.writer.pid
    try:
        trainer.half()
        assert trainer.writer.pid == first
        assert blob_bytes(trainer.store, trainer.rest()) == bytes([1]) * SIZE
    finally:
        trainer.kill()
    wait_until(lambda: gone(trainer.writer))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
def test_a_forked_child_that_outlives_the_trainer_does_not_keep_the_writer(tmp_path: Path) -> None:
    """It holds the socket open; and no parent-death signal is set, since a thread started the writer."""
    trainer = Trainer(tmp_path / "run", "--in-thread")
    trainer.tell("fork holding the socket")
    child = psutil.Process(int(trainer.answer("child")))
    try:
        trainer.half()
        trainer.kill()
        wait_until(lambda: gone(trainer.writer))
        assert not gone(child)
    finally:
        child.kill()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
def test_a_forked_child_lets_go_of_the_socket(trainer: Trainer) -> None:
    def sockets(pid: int) -> set[str]:
        links = (os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir())
        return {link for link in links if link.startswith("socket:")}

    trainer.tell("fork")
    child = psutil.Process(int(trainer.answer("child")))
    try:
        wait_until(lambda: not sockets(child.pid))
        assert sockets(trainer.process.pid)
        trainer.half()
        assert blob_bytes(trainer.store, trainer.rest()) == bytes([1]) * SIZE
    finally:
        child.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_signals_that_ask_to_stop_do_not_end_a_write(trainer: Trainer, number: signal.Signals) -> None:
    """Schedulers signal the process group (the writer is not in it) or every process of a control group."""
    trainer.half()
    if number in (signal.SIGTERM, signal.SIGINT):
        os.killpg(trainer.process.pid, number)
    trainer.writer.send_signal(number)
    assert blob_bytes(trainer.store, trainer.rest()) == bytes([1]) * SIZE


def test_a_signal_while_the_writer_starts_does_not_end_it(tmp_path: Path) -> None:
    for _ in range(3):
        client = WriterClient.start(str(tmp_path))
        try:
            assert client.pid is not None
            os.kill(client.pid, signal.SIGTERM)  # the interpreter is only just starting
            client.arm(0)
            store = open_store(tmp_path)
            where = target(len(objects(store)))
            assert client.submit(WriteJob(0, where, 0, {})).result(WAIT).index.key == where.index_key
        finally:
            client.close()


def test_a_killed_writer_fails_the_save_and_the_next_one_gets_another(store: Store) -> None:
    client = WriterClient.start(store)
    try:
        slab = client.arm(SIZE)
        future = client.submit(WriteJob(0, target(1), SIZE, {}))
        client.advance(SIZE // 2)
        first = client.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        with pytest.raises(SaveError, match=r"rank 0, generations/000001-000000000001/.*killed by signal 9"):
            future.result(WAIT)
        assert not any(key.endswith(".json") for key in objects(store))

        slab = client.arm(SIZE)
        assert client.pid != first
        slab.data[:SIZE] = bytes([7]) * SIZE
        future = client.submit(WriteJob(0, target(2), SIZE, {}))
        client.advance(SIZE)
        assert blob_bytes(store, future.result(WAIT)) == bytes([7]) * SIZE
    finally:
        client.close()


def test_a_writer_killed_between_saves_is_replaced_without_losing_one(store: Store) -> None:
    client = WriterClient.start(store)
    try:
        for step in range(1, 4):
            pid = client.pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda pid=pid: not psutil.pid_exists(pid))  # all of its threads, not only the first
            slab = client.arm(5)
            slab.data[:5] = b"hello"
            future = client.submit(WriteJob(0, target(step), 5, {}))
            client.advance(5)
            assert blob_bytes(store, future.result(WAIT)) == b"hello"
    finally:
        client.close()


def test_an_abandoned_save_fails_and_the_next_one_works(client: WriterClient, store: Store) -> None:
    client.arm(SIZE)
    future = client.submit(WriteJob(0, target(1), SIZE, {}))
    client.abandon()
    with pytest.raises(SaveError):
        future.result(WAIT)
    slab = client.arm(5)
    slab.data[:5] = b"hello"
    future = client.submit(WriteJob(0, target(2), 5, {}))
    client.advance(5)
    assert blob_bytes(store, future.result(WAIT)) == b"hello"


def test_closing_ends_the_process(trainer: Trainer) -> None:
    trainer.half()
    trainer.rest()
    trainer.tell("close")
    trainer.answer("closed")
    wait_until(lambda: gone(trainer.writer))


def test_closing_with_a_save_in_flight_fails_it(client: WriterClient) -> None:
    client.arm(SIZE)
    future = client.submit(WriteJob(0, target(1), SIZE, {}))
    client.close()
    with pytest.raises(SaveError):
        future.result(WAIT)
    with pytest.raises(SaveError, match="closed"):
        client.arm(1)
