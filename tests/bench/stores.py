"""Uploading to and restoring from an object store: `python -m tests.bench.stores`.

Each contestant runs in a process of its own, several times, against the sink, which throws uploads away. Uploads to S3
go to it by https, as to every real store of that name, and those that come near the wire's limit by plain http too. The
sink's processor time does not count, the client's does: on few cores a real server is slower than any client, so
seconds of the client's processor per GB are the figure, and MB/s only what came out here: median, lowest, highest.
``--server seaweedfs`` (or moto, fake-gcs, ...) takes a real server, by http.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import resource
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import httpx
import typer
from rich.console import Console
from rich.table import Table

from tests.stores.servers import BUCKET, KEY, SECRET, free_port, serve

ROOT = Path(__file__).resolve().parents[2]
ENDPOINT = "SPOT_BENCH_ENDPOINT"
AUTHORITY = "SPOT_BENCH_AUTHORITY"
"""Names a file with the certificate that an https endpoint's is signed by."""
TENSORS = 200
GCS = "gs:"
"""Begins the names of contestants that speak GCS's protocol; the others speak S3's."""

app = typer.Typer(add_completion=False)


def options() -> dict[str, Any]:
    verify = {"verify": os.environ[AUTHORITY]} if AUTHORITY in os.environ else {}
    return {
        "key": KEY,
        "secret": SECRET,
        "client_kwargs": {"endpoint_url": os.environ[ENDPOINT], "region_name": "us-east-1", **verify},
    }


def memory(nbytes: int) -> memoryview:
    """As a slab: an anonymous mapping, its pages taken."""
    import mmap

    mapped = mmap.mmap(-1, nbytes)
    block = os.urandom(1 << 20)
    for at in range(0, nbytes, len(block)):
        mapped[at : at + len(block)] = block[: min(len(block), nbytes - at)]
    return memoryview(mapped)


def s3fs_system(**more: Any) -> Any:
    import s3fs

    return s3fs.S3FileSystem(**options(), **more)


def raw_obstore(**more: Any) -> Any:
    """The client underneath, with the best settings known for it."""
    from obstore.store import S3Store

    client: dict[str, Any] = {"allow_http": True}
    if AUTHORITY in os.environ:
        client = {"root_certificate": Path(os.environ[AUTHORITY]).read_bytes()}
    return S3Store(
        BUCKET,
        config={
            "access_key_id": KEY,
            "secret_access_key": SECRET,
            "endpoint": os.environ[ENDPOINT],
            "region": "us-east-1",
            "unsigned_payload": True,
            **more,
        },
        client_options=client,
    )


def raw_boto() -> Any:
    import boto3

    return boto3.client(
        "s3",
        aws_access_key_id=KEY,
        aws_secret_access_key=SECRET,
        region_name="us-east-1",
        endpoint_url=os.environ[ENDPOINT],
        verify=os.environ.get(AUTHORITY),
    )


def gcsfs_options() -> dict[str, Any]:
    return {"endpoint_url": os.environ[ENDPOINT], "token": "anon", "project": "spot"}


def gcsfs_system() -> Any:
    from gcsfs.core import GCSFileSystem  # its default class asks a service that is not here

    return GCSFileSystem(**gcsfs_options())


def spot_store(scheme: str = "s3") -> Any:
    from spot_core.store import open_store

    given = gcsfs_options() if scheme == "gs" else options()
    return open_store(f"{scheme}://{BUCKET}/bench/spot", storage_options=given)


# -- uploads: each returns what is timed ------------------------------------------------------------------------------


def upload_spot(data: memoryview, scheme: str = "s3", *, digested: bool = True) -> Callable[[], None]:
    """With the digests, as a save has them; or without, to tell what they cost."""
    from spot_core.digest import chunk_digest
    from spot_core.store import BytesSource

    class Digested(BytesSource):
        def chunk(self, i: int) -> memoryview:
            view = super().chunk(i)
            chunk_digest(view)
            return view

    store = spot_store(scheme)
    store.list("")
    kind = Digested if digested else BytesSource
    return lambda: store.put_blob("blob", kind(data))


def upload_obstore(data: memoryview, n: int = 6, **more: Any) -> Callable[[], None]:
    import obstore

    client = raw_obstore(**more)
    list(obstore.list(client, "x"))
    return lambda: obstore.put(client, "bench/obstore", data, chunk_size=16 << 20, max_concurrency=n) and None


def upload_boto(data: memoryview) -> Callable[[], None]:
    client = raw_boto()
    return lambda: client.upload_fileobj(io.BytesIO(data), BUCKET, "bench/boto")


def upload_s3fs_pipe(data: memoryview) -> Callable[[], None]:
    system = s3fs_system()
    return lambda: system.pipe_file(f"{BUCKET}/bench/pipe", bytes(data)) and None


def upload_put_file(system: Any, data: memoryview) -> Callable[[], None]:
    with tempfile.NamedTemporaryFile(delete=False) as file:
        file.write(data)
    return lambda: system.put_file(file.name, f"{BUCKET}/bench/put") and None


def upload_dcp(data: memoryview) -> Callable[[], None]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

    state = tensors(len(data))
    places = (f"s3://{BUCKET}/bench/dcp{number}" for number in itertools.count())
    return lambda: dcp.save(state, storage_writer=FsspecWriter(next(places), sync_files=False, **options())) and None


# -- restores ---------------------------------------------------------------------------------------------------------


def tensors(nbytes: int) -> dict[str, Any]:
    import torch

    return {f"layer{i:03d}": torch.randn(nbytes // 4 // TENSORS) for i in range(TENSORS)}


def part_of(state: dict[str, Any], parts: int) -> dict[str, Any]:
    """Neighbours, as a shard or a submodule is."""
    names = sorted(state)
    return {name: state[name] for name in names[: len(names) // parts]}


def restore_spot(nbytes: int, parts: int, scheme: str = "s3") -> Callable[[], None]:
    import torch.distributed.checkpoint as dcp

    from spot_core import Run
    from spot_core.pytorch import SpotStorageReader
    from tests.pytorch.saving import save_one

    state = tensors(nbytes)
    run = Run.open(spot_store(scheme))
    save_one(run, state)
    target = part_of({name: value.clone().zero_() for name, value in state.items()}, parts)

    def load() -> None:
        dcp.load(target, storage_reader=SpotStorageReader(run))
        assert all((target[name] == state[name]).all() for name in list(target)[:3])

    return load


def restore_dcp(nbytes: int, parts: int) -> Callable[[], None]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

    state = tensors(nbytes)
    place = f"s3://{BUCKET}/bench/dcp"
    dcp.save(state, storage_writer=FsspecWriter(place, sync_files=False, **options()))
    target = part_of({name: value.clone().zero_() for name, value in state.items()}, parts)
    return lambda: dcp.load(target, storage_reader=FsspecReader(place, **options()))


def restore_obstore(nbytes: int, parts: int) -> Callable[[], None]:
    """The bytes alone, into nothing."""
    import obstore

    client = raw_obstore()
    obstore.put(client, "bench/raw", memory(nbytes), chunk_size=16 << 20)
    starts = list(range(0, nbytes // parts, 8 << 20))
    ends = [min(start + (8 << 20), nbytes // parts) for start in starts]
    return lambda: obstore.get_ranges(client, "bench/raw", starts=starts, ends=ends, coalesce=0) and None


def restore_get_file(system: Any, nbytes: int) -> Callable[[], None]:
    system.pipe_file(f"{BUCKET}/bench/get", bytes(memory(nbytes)))
    folder = tempfile.mkdtemp()
    return lambda: system.get_file(f"{BUCKET}/bench/get", f"{folder}/file")


UPLOADS: dict[str, Callable[[memoryview], Callable[[], None]]] = {
    "spot": upload_spot,
    "obstore put (raw)": upload_obstore,
    "obstore put, 12 parts at once (raw)": lambda data: upload_obstore(data, 12),
    "obstore put, crc64nvme (raw)": lambda data: upload_obstore(data, checksum_algorithm="crc64nvme"),
    "spot, no digests": lambda data: upload_spot(data, digested=False),
    "obstore put, sha256 (raw)": lambda data: upload_obstore(data, checksum_algorithm="sha256"),
    "boto3 upload (raw)": upload_boto,
    "s3fs pipe_file": upload_s3fs_pipe,
    "s3fs put_file": lambda data: upload_put_file(s3fs_system(), data),
    "dcp FsspecWriter": upload_dcp,
    f"{GCS} spot": lambda data: upload_spot(data, "gs"),
    f"{GCS} gcsfs put_file": lambda data: upload_put_file(gcsfs_system(), data),
}
NEAR_THE_LIMIT = tuple(UPLOADS)[:5]
"""Uploads that are measured by plain http as well."""
RESTORES: dict[str, Callable[[int, int], Callable[[], None]]] = {
    "spot": restore_spot,
    "obstore get_ranges (raw)": restore_obstore,
    "s3fs get_file": lambda nbytes, _: restore_get_file(s3fs_system(), nbytes),
    "dcp FsspecReader": restore_dcp,
    f"{GCS} spot": lambda nbytes, parts: restore_spot(nbytes, parts, "gs"),
    f"{GCS} gcsfs get_file": lambda nbytes, _: restore_get_file(gcsfs_system(), nbytes),
}


WHOLE = "get_file"  # cannot fetch a part
TIMES, MORE_TIMES, LONG_S = 3, 6, 6.0
"""Uploads are repeated at least and at most so often; those that take seconds are not repeated for longer than that."""


def measure(do: Callable[[], None], nbytes: int, most: int = TIMES) -> dict[str, Any]:
    """Each time, and what was downloaded each time."""
    stats()
    rates, costs = list[float](), list[float]()
    start = time.perf_counter()
    while len(rates) < TIMES or (len(rates) < most and time.perf_counter() < start + LONG_S):
        before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        do()
        seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        rates.append(nbytes / 1e6 / seconds)
        costs.append(cpu / nbytes * 1e9)
    return {"MB/s": rates, "cpu_s_per_GB": costs, "downloaded": stats().get("sent", 0) / len(rates)}


def stats() -> dict[str, int]:
    try:
        trusted = ssl.create_default_context(cafile=os.environ.get(AUTHORITY))
        found: dict[str, int] = httpx.get(f"{os.environ[ENDPOINT]}/?stats", timeout=60, verify=trusted).json()
    except ValueError:
        return {}  # a real server has no such thing
    return found


@contextlib.contextmanager
def endpoint(server: str, kind: str, *, tls: bool = False) -> Iterator[dict[str, str]]:
    """What the environment tells a contestant about its server."""
    if server != "sink":
        with serve(server, Path(tempfile.mkdtemp()) / server) as running:
            yield {ENDPOINT: f"http://{running.host}:{running.port}"}
        return
    with contextlib.ExitStack() as running_too:
        port = free_port()
        running_too.enter_context(_running("tests.bench.sink", port, *([] if kind == "restore" else ["discard"])))
        if not tls:
            yield {ENDPOINT: f"http://127.0.0.1:{port}"}
            return
        import trustme

        folder = Path(running_too.enter_context(tempfile.TemporaryDirectory()))
        authority = trustme.CA()
        authority.cert_pem.write_to_path(folder / "authority.pem")
        authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(folder / "server.pem")
        front = free_port()
        running_too.enter_context(_running("tests.bench.sink_tls", front, str(folder / "server.pem"), str(port)))
        yield {ENDPOINT: f"https://127.0.0.1:{front}", AUTHORITY: str(folder / "authority.pem")}


@contextlib.contextmanager
def _running(module: str, port: int, *more: str) -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-m", module, str(port), *more], cwd=ROOT)
    try:
        for _ in range(100):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.1)
        yield
    finally:
        process.kill()
        process.wait()


def worker(kind: str, name: str, nbytes: int, parts: int) -> None:
    if kind == "upload":
        found = measure(UPLOADS[name](memory(nbytes)), nbytes, MORE_TIMES)
    else:
        found = measure(RESTORES[name](nbytes, parts), nbytes // parts)
    print("result", json.dumps(found))


Job: TypeAlias = tuple[str, str, int, bool]
"""Upload or restore, contestant, how many parts of the tensors make a whole, whether by https."""


@app.command()
def main(
    mb: Annotated[int, typer.Option(help="Bytes per object, in millions.")] = 1000,
    turns: Annotated[int, typer.Option(help="Of the uploads near the wire's limit: machines have slow minutes.")] = 2,
    server: str = "sink",
    only: Annotated[str, typer.Option(help="Only contestants with this in their name.")] = "",
    json_out: Annotated[Path | None, typer.Option("--json", help="Also write every number there.")] = None,
) -> None:
    """Tables of client processor time, MB/s and bytes downloaded."""
    console = Console()
    rows: dict[Job, dict[str, Any]] = {}
    for job in _jobs(server, only, turns):
        kind, name, parts, tls = job
        with endpoint(server, kind, tls=tls) as told:
            call = f"from tests.bench.stores import worker; worker({kind!r}, {name!r}, {mb * 1_000_000}, {parts})"
            done = subprocess.run(
                [sys.executable, "-c", call],
                capture_output=True,
                text=True,
                check=False,
                cwd=ROOT,
                env={**os.environ, **told, "OMP_NUM_THREADS": "1"},
            )
        lines = [line for line in done.stdout.splitlines() if line.startswith("result ")]
        if not lines:
            console.print(f"{name} failed: {done.stderr[-1500:]}", markup=False)
            continue
        row = {"kind": kind, "name": name, "parts": parts, "tls": tls, **json.loads(lines[-1].removeprefix("result "))}
        print(json.dumps(row), file=sys.stderr)
        if job in rows:
            for column in ("MB/s", "cpu_s_per_GB"):
                rows[job][column] += row[column]
        else:
            rows[job] = row
    table = Table(title=f"{mb} MB against {server}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    for column in ("", "", "client CPU s/GB", "MB/s", "downloaded / needed"):
        table.add_column(column, justify="right" if column else "left")
    for row in rows.values():
        what = row["kind"] + (" by https" if row["tls"] else "")
        what += f", 1/{row['parts']} of the tensors" if row["parts"] > 1 else ""
        ratio = row["downloaded"] / (mb * 1e6 / row["parts"])
        more = f"{ratio:.2f}" if row["kind"] == "restore" and row["downloaded"] else ""
        table.add_row(what, row["name"], _spread(row["cpu_s_per_GB"], ".2f"), _spread(row["MB/s"], ".0f"), more)
    console.print(table)
    if json_out is not None:
        json_out.write_text(json.dumps(list(rows.values()), indent=2))


def _jobs(server: str, only: str, turns: int) -> list[Job]:
    if server == "sink":
        near = [("upload", name, 1, tls) for tls in (True, False) for name in NEAR_THE_LIMIT]
        slow = [("upload", name, 1, not name.startswith(GCS)) for name in UPLOADS if name not in NEAR_THE_LIMIT]
    else:
        near, slow = (
            [],
            [("upload", name, 1, False) for name in UPLOADS if name.startswith(GCS) is (server == "fake-gcs")],
        )
    restores = [
        ("restore", name, parts, False)
        for parts in (1, 8)
        for name in RESTORES
        if (server == "sink" or name.startswith(GCS) is (server == "fake-gcs")) and not (parts > 1 and WHOLE in name)
    ]
    return [job for job in near + slow + restores + near * (turns - 1) if only in job[1]]


def _spread(values: list[float], form: str) -> str:
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


if __name__ == "__main__":
    app()
