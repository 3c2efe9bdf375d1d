"""The crash points of `tests/protocol`, on real servers: every operation of a life, with every fault."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from spot_core import TransientStoreError
from spot_core.store import CloudStore, Store, open_store
from spot_core.testing import CRASH_MODES, CrashingStore, FailingStore, LostReplyStore, SimulatedCrash, StoreWrapper
from tests.protocol._lives import check, live, settle
from tests.protocol.test_crash_points import SECOND, _prepared
from tests.stores.servers import Server

SERVERS = ["moto", "seaweedfs", "azurite", "fake-gcs"]


def faulty(store: Store, index: int, mode: str) -> StoreWrapper:
    if mode in CRASH_MODES:
        return CrashingStore(store, index, mode)
    if mode == "lost":
        return LostReplyStore(store, {index})
    return FailingStore(store, lambda i, verb, key: TransientStoreError("unavailable") if i == index else None)


def cases() -> list[object]:
    """All points on each server in the slow lane; a few on moto in the fast one."""
    fast = [pytest.param("moto", mode, 60, id=f"moto-{mode}-some") for mode in ("after", "lost")]
    slow = [
        # Where a point takes a second, every third; the modes begin at different ones.
        pytest.param(name, mode, 1 if name == "moto" else 3, id=f"{name}-{mode}", marks=pytest.mark.slow)
        for name in SERVERS
        for mode in (*CRASH_MODES, "lost", "fails")
    ]
    return [*fast, *slow]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("name", "mode", "stride"), cases())
def test_crash_points(
    server_named: Callable[[str], Server], run_name: str, name: str, mode: str, stride: int
) -> None:
    server = server_named(name)
    start = (*CRASH_MODES, "lost", "fails").index(mode) % stride
    points = [i for i in range(start, len(SECOND), stride) if mode != "torn" or SECOND[i][0] == "put_blob"]
    assert points
    for index in points:
        uri = server.uri(f"{run_name}/{index}")
        store, witness = _prepared(open_store(uri, storage_options=server.options))
        wrapper = faulty(store, index, mode)
        if mode in CRASH_MODES:
            with pytest.raises(SimulatedCrash):
                live(wrapper, witness)
        else:
            live(wrapper, witness)
        # A reader that shares nothing with the writer.
        other = open_store(uri, storage_options=server.options)
        check(other, witness)
        settle(other, witness)
        if isinstance(other, CloudStore):
            assert list(other.unfinished("")) == []
