"""The crash points of `tests/protocol`, on real servers: every operation of a life, with every fault.

On rclone without conditional puts: it accepts the condition and ignores it, which the claim of each life finds out.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from spot_core import TransientStoreError
from spot_core.store import CloudStore, MemoryStore, Store, open_store
from spot_core.testing import CRASH_MODES, CrashingStore, FailingStore, LostReplyStore, SimulatedCrash, StoreWrapper
from tests.protocol._lives import Witness, check, live, settle
from tests.protocol.test_crash_points import SECOND, _prepared
from tests.stores.servers import Server

SERVERS = ["moto", "seaweedfs", "azurite", "fake-gcs", "rclone"]


def faulty(store: Store, index: int, mode: str) -> StoreWrapper:
    if mode in CRASH_MODES:
        return CrashingStore(store, index, mode)
    if mode == "lost":
        return LostReplyStore(store, {index})
    return FailingStore(store, lambda i, verb, key: TransientStoreError("unavailable") if i == index else None)


WRITES = ("put", "put_if_absent", "put_blob", "delete")


def points(mode: str) -> list[int]:
    """Which operations. What a crash leaves depends on the writes before it alone, so that a crash before one leaves
    what a crash after the one before left: some are tried all the same. A lost reply to a read is a failed read."""
    writes = [i for i, (verb, _) in enumerate(SECOND) if verb in WRITES]
    if mode == "torn":
        return [i for i in writes if SECOND[i][0] == "put_blob"]
    return {"before": writes[::4], "after": writes, "lost": writes, "fails": list(range(0, len(SECOND), 4))}[mode]


def prepared(store: Store) -> tuple[Store, Witness]:
    """As in `tests/protocol`, its objects brought here."""
    source, witness = _prepared(MemoryStore())
    for info in source.list(""):
        store.put(info.key, source.get(info.key))
    return store, witness


def cases() -> list[object]:
    """All on each server in the slow lane; two or three on moto in the fast one."""
    fast = [pytest.param("moto", mode, 20, id=f"moto-{mode}-some") for mode in ("after", "lost")]
    slow = [
        pytest.param(name, mode, 1, id=f"{name}-{mode}", marks=pytest.mark.slow)
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
    assert points(mode)
    for index in points(mode)[::stride]:
        uri = server.uri(f"{run_name}/{index}")
        store, witness = prepared(open_store(uri, storage_options=server.options))
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
        if isinstance(other, CloudStore) and name != "rclone":  # which has them, but cannot list them
            assert list(other.unfinished("")) == []
