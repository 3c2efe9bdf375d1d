"""Uploading to and restoring from an object store: `python -m tests.bench.stores`.

Each contestant runs in a process of its own, several times, against the sink, which throws uploads away. Its processor
time does not count, the client's does: on few cores a real server is slower than any client, so seconds of the client's
processor per GB are the figure, and MB/s only what came out here: the median, the lowest and the highest.
``--server seaweedfs`` (or moto, fake-gcs, ...) takes a real server.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.table import Table

from tests.stores.servers import BUCKET, KEY, SECRET, free_port, serve

ROOT = Path(__file__).resolve().parents[2]
ENDPOINT = "SPOT_BENCH_ENDPOINT"
TENSORS = 200
GCS = "gs:"
"""Begins the names of contestants that speak GCS's protocol; the others speak S3's."""

app = typer.Typer(add_completion=False)


def options() -> dict[str, Any]:
    return {
        "key": KEY,
        "secret": SECRET,
        "client_kwargs": {"endpoint_url": os.environ[ENDPOINT], "region_name": "us-east-1"},
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
        client_options={"allow_http": True},
    )


def raw_boto() -> Any:
    import boto3

    return boto3.client(
        "s3",
        aws_access_key_id=KEY,
        aws_secret_access_key=SECRET,
        region_name="us-east-1",
        endpoint_url=os.environ[ENDPOINT],
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
    "obstore put, sha256 (raw)": lambda data: upload_obstore(data, checksum_algorithm="sha256"),
    "spot, no digests": lambda data: upload_spot(data, digested=False),
    "boto3 upload (raw)": upload_boto,
    "s3fs pipe_file": upload_s3fs_pipe,
    "s3fs put_file": lambda data: upload_put_file(s3fs_system(), data),
    "dcp FsspecWriter": upload_dcp,
    f"{GCS} spot": lambda data: upload_spot(data, "gs"),
    f"{GCS} gcsfs put_file": lambda data: upload_put_file(gcsfs_system(), data),
}
RESTORES: dict[str, Callable[[int, int], Callable[[], None]]] = {
    "spot": restore_spot,
    "obstore get_ranges (raw)": restore_obstore,
    "s3fs get_file": lambda nbytes, _: restore_get_file(s3fs_system(), nbytes),
    "dcp FsspecReader": restore_dcp,
    f"{GCS} spot": lambda nbytes, parts: restore_spot(nbytes, parts, "gs"),
    f"{GCS} gcsfs get_file": lambda nbytes, _: restore_get_file(gcsfs_system(), nbytes),
}


WHOLE = "get_file"  # cannot fetch a part
TIMES = 3


def measure(do: Callable[[], None], nbytes: int, times: int = 1) -> dict[str, Any]:
    """Each of so many times, and what was downloaded in all of them."""
    stats()
    rates, costs = [], []
    for _ in range(times):
        before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        do()
        seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        rates.append(nbytes / 1e6 / seconds)
        costs.append(cpu / nbytes * 1e9)
    return {"MB/s": rates, "cpu_s_per_GB": costs, "downloaded": stats().get("sent", 0) / times}


def stats() -> dict[str, int]:
    try:
        found: dict[str, int] = httpx.get(f"{os.environ[ENDPOINT]}/?stats", timeout=60).json()
    except ValueError:
        return {}  # a real server has no such thing
    return found


@contextlib.contextmanager
def endpoint(server: str, kind: str) -> Iterator[str]:
    if server != "sink":
        with serve(server, Path(tempfile.mkdtemp()) / server) as running:
            yield f"http://{running.host}:{running.port}"
        return
    port = free_port()
    keeps = [] if kind == "restore" else ["discard"]
    process = subprocess.Popen([sys.executable, "-m", "tests.bench.sink", str(port), *keeps], cwd=ROOT)
    try:
        url = f"http://127.0.0.1:{port}"
        for _ in range(100):
            with contextlib.suppress(httpx.HTTPError):
                httpx.get(f"{url}/?stats")
                break
            time.sleep(0.1)
        yield url
    finally:
        process.kill()
        process.wait()


def worker(kind: str, name: str, nbytes: int, parts: int) -> None:
    if kind == "upload":
        found = measure(UPLOADS[name](memory(nbytes)), nbytes, TIMES)
    else:
        found = measure(RESTORES[name](nbytes, parts), nbytes // parts, TIMES)
    print("result", json.dumps(found))


@app.command()
def main(
    mb: Annotated[int, typer.Option(help="Bytes per object, in millions.")] = 1000,
    repeats: int = 1,
    server: str = "sink",
    only: Annotated[str, typer.Option(help="Only contestants with this in their name.")] = "",
    json_out: Annotated[Path | None, typer.Option("--json", help="Also write every number there.")] = None,
) -> None:
    """Tables of client processor time, MB/s and bytes downloaded."""
    console = Console()
    rows: list[dict[str, Any]] = []
    for _ in range(repeats):
        jobs = [("upload", name, 1) for name in UPLOADS]
        jobs += [("restore", name, parts) for parts in (1, 8) for name in RESTORES]
        for kind, name, parts in jobs:
            if only not in name or (parts > 1 and WHOLE in name):
                continue
            if server != "sink" and name.startswith(GCS) is not (server == "fake-gcs"):
                continue
            with endpoint(server, kind) as url:
                call = f"from tests.bench.stores import worker; worker({kind!r}, {name!r}, {mb * 1_000_000}, {parts})"
                done = subprocess.run(
                    [sys.executable, "-c", call],
                    capture_output=True,
                    text=True,
                    check=False,
                    cwd=ROOT,
                    env={**os.environ, ENDPOINT: url, "OMP_NUM_THREADS": "1"},
                )
            lines = [line for line in done.stdout.splitlines() if line.startswith("result ")]
            if not lines:
                console.print(f"{name} failed: {done.stderr[-1500:]}", markup=False)
                continue
            rows.append({"kind": kind, "name": name, "parts": parts, **json.loads(lines[-1].removeprefix("result "))})
            print(json.dumps(rows[-1]), file=sys.stderr)
    table = Table(title=f"{mb} MB against {server}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    for column in ("", "", "client CPU s/GB", "MB/s", "downloaded / needed"):
        table.add_column(column, justify="right" if column else "left")
    for row in rows:
        what = row["kind"] + (f", 1/{row['parts']} of the tensors" if row["parts"] > 1 else "")
        ratio = row["downloaded"] / (mb * 1e6 / row["parts"])
        told = f"{ratio:.2f}" if row["kind"] == "restore" and row["downloaded"] else ""
        table.add_row(what, row["name"], _spread(row["cpu_s_per_GB"], ".2f"), _spread(row["MB/s"], ".0f"), told)
    console.print(table)
    if json_out is not None:
        json_out.write_text(json.dumps(rows, indent=2))


def _spread(values: list[float], form: str) -> str:
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


if __name__ == "__main__":
    app()
