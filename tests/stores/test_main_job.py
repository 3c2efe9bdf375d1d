"""The example, killed at random instants with its run in a bucket, ends as its control does, bit for bit."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.stores.servers import AZURE_KEY, KEY, SECRET, Server

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "lightning_gpt"
sys.path.insert(0, str(EXAMPLE))  # as tests/kill does


def environment(server: Server) -> Mapping[str, str]:
    """What a user would export."""
    url = f"http://{server.host}:{server.port}"
    if server.scheme == "az":
        name = server.options["account_name"]
        text = f"AccountName={name};AccountKey={AZURE_KEY};BlobEndpoint={url}/{name}"
        return {"AZURE_STORAGE_CONNECTION_STRING": text}
    if server.scheme == "gs":
        return {"STORAGE_EMULATOR_HOST": url, "FSSPEC_GCS_TOKEN": "anon", "FSSPEC_GCS_PROJECT": "spot"}
    return {
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_ENDPOINT_URL": url,
        "AWS_DEFAULT_REGION": "us-east-1",
    }


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["moto", "seaweedfs", "azurite", "fake-gcs", "rclone"])
def test_killed_and_the_same(
    server_named: Callable[[str], Server], run_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    server = server_named(name)
    for variable, value in environment(server).items():
        monkeypatch.setenv(variable, value)
    from lives import Job
    from prove import prove

    job = Job(tmp_path, windows=640, epochs=3, interval=8, keep=100, bucket=server.uri(run_name))
    proof = prove(tmp_path, job, 6, 17)
    assert proof.problems == []
    assert len(proof.kills) == 6
    assert any(life.resumed for life in proof.lives)
    assert proof.verified > 0
