"""A server whose certificate a private authority signed: trusted where the options or the environment say so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import trustme

from spot_core.errors import StoreError
from spot_core.store import BytesSource, CloudStore, open_store
from tests.bench.stores import AUTHORITY, ENDPOINT, endpoint
from tests.stores.servers import BUCKET, KEY, SECRET

URI = f"s3://{BUCKET}/run"


@pytest.fixture(scope="module")
def server() -> Iterator[Mapping[str, str]]:
    with endpoint("sink", "upload", tls=True) as told:
        yield told


def options(server: Mapping[str, str], **more: Any) -> dict[str, Any]:
    return {"key": KEY, "secret": SECRET, "client_kwargs": {"endpoint_url": server[ENDPOINT], **more}}


def test_objects_and_uploads_of_a_server_that_the_options_trust(server: Mapping[str, str]) -> None:
    store = open_store(URI, storage_options=options(server, verify=server[AUTHORITY]))
    store.put_if_absent("small", b"small")
    assert store.get("small") == b"small"
    size = (20 << 20) + 1  # two parts
    store.put_blob("large", BytesSource(bytes(size)))
    assert {item.key: item.size for item in store.list("")} == {"large": size, "small": 5}
    assert not store.unfinished("")


def test_the_environment_trusts_as_elsewhere(server: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_CA_BUNDLE", server[AUTHORITY])
    store = open_store(URI, storage_options=options(server))
    store.put("pointer", b"one")
    assert store.get("pointer") == b"one"
    assert not store.unfinished("")


def test_a_server_that_nobody_vouches_for_is_not_talked_to(server: Mapping[str, str], tmp_path: Path) -> None:
    another = tmp_path / "another.pem"
    trustme.CA().cert_pem.write_to_path(another)
    for more in ({}, {"verify": str(another)}):
        store = CloudStore(URI, storage_options=options(server, **more), retry_s=0.2)
        with pytest.raises(StoreError, match="Cannot read small at s3://"):
            store.get("small")
