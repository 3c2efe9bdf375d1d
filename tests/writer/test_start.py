"""The writer process starts light, and nothing secret shows on it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from spot_core.errors import ConfigError
from spot_core.store import Capabilities, LocalStore, open_store
from spot_core.writer import WriteJob, WriterClient

from ._snapshot import target


def test_the_writer_loads_nothing_heavy() -> None:
    """It starts again after a kill while training waits to save; torch alone takes seconds."""
    script = "import sys, spot_core.writer.serve; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert "xxhash" in loaded
    assert not loaded & {"torch", "numpy", "lightning", "pytorch_lightning", "accelerate", "httpx", "rich", "typer"}


class Remote(LocalStore):
    """A local store that says it was opened with a secret."""

    storage_options: dict[str, object]

    def __init__(self, root: Path, options: dict[str, object]) -> None:
        super().__init__(root)
        self.storage_options = options


def test_storage_options_are_not_on_the_command_line_or_in_the_environment(tmp_path: Path) -> None:
    client = WriterClient.start(Remote(tmp_path, {"secret": "hunter2"}))
    try:
        process = psutil.Process(client.pid)
        assert "hunter2" not in " ".join(process.cmdline())
        assert "hunter2" not in " ".join(process.environ().values())
    finally:
        client.close()


def test_options_that_cannot_travel_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\(token\).*writer='thread'") as caught:
        WriterClient.start(Remote(tmp_path, {"token": object()}))
    assert "object at" not in str(caught.value)


def test_the_writer_inherits_only_its_socket(tmp_path: Path) -> None:
    with (tmp_path / "held").open("w") as held:
        os.set_inheritable(held.fileno(), True)
        client = WriterClient.start(str(tmp_path / "run"))
        try:
            open_files = [file.path for file in psutil.Process(client.pid).open_files()]
            assert str(tmp_path / "held") not in open_files
        finally:
            client.close()


def test_the_writer_finds_its_store_from_another_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory may hold a file named like a module of the standard library."""
    (tmp_path / "json.py").write_text("raise ImportError('the wrong json')\n")
    monkeypatch.chdir(tmp_path)
    client = WriterClient.start("run")
    try:
        client.arm(0)
        client.submit(WriteJob(0, target(1), 0, {})).result(60)
        assert (tmp_path / "run" / target(1).index_key).exists()
    finally:
        client.close()


def test_a_store_that_no_process_can_reopen_gets_a_thread() -> None:
    store = open_store("memory://writer-thread")
    assert store.capabilities == Capabilities(put_if_absent=True, reopenable=False)
    client = WriterClient.start(store, mode="process")
    try:
        assert client.mode == "thread"
        slab = client.arm(3)
        slab.data[:3] = b"abc"
        future = client.submit(WriteJob(0, target(1), 3, {"tree": None}))
        client.advance(3)
        part = future.result(60)
        assert part.blob is not None
        assert store.get(part.blob.key) == b"abc"
    finally:
        client.close()


def test_an_unknown_mode_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'fork'"):
        WriterClient.start(str(tmp_path), mode="fork")  # type: ignore[arg-type]


class Elsewhere:
    """A local store that is none to whoever asks for its class."""

    def __init__(self, root: Path) -> None:
        self._inner = LocalStore(root)

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)


@pytest.mark.parametrize("kind", [LocalStore, Elsewhere])
def test_the_writer_steps_back_for_the_training(tmp_path: Path, kind: type) -> None:
    """With all that takes a core for a while: digests, and uploads. Not with writes to a disk, which take moments."""
    client = WriterClient.start(kind(tmp_path))
    try:
        client.arm(0)
        client.submit(WriteJob(0, target(1), 0, {})).result(60)
        mine = os.getpriority(os.PRIO_PROCESS, 0)
        back = min(mine + 10, 19)
        threads = [os.getpriority(os.PRIO_PROCESS, thread.id) for thread in psutil.Process(client.pid).threads()]
        assert set(threads) == ({mine, back} if kind is LocalStore else {back})
        assert threads.count(back) == (1 if kind is LocalStore else len(threads))
    finally:
        client.close()


def test_the_writer_has_a_process_group_but_no_session_of_its_own(tmp_path: Path) -> None:
    """The first keeps signals away; a session would have a share of the cores of its own, in which niceness is lost."""
    client = WriterClient.start(str(tmp_path))
    try:
        client.arm(0)
        client.submit(WriteJob(0, target(1), 0, {})).result(60)
        assert os.getpgid(client.pid) == client.pid
        assert os.getsid(client.pid) == os.getsid(0)
    finally:
        client.close()
