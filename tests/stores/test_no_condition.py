"""A real server that accepts the condition of a put and ignores it: of two claimants of one life one goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from spot_core import Depth, FencedError, Retention, Run
from spot_core.store import CloudStore
from tests.protocol.test_no_condition import fenced
from tests.stores.servers import Server


@pytest.mark.slow
def test_of_two_claimants_of_one_life_exactly_one_goes_on(
    server_named: Callable[[str], Server], run_name: str
) -> None:
    server = server_named("rclone")
    uri, options = server.uri(run_name), server.options
    first = Run.open(CloudStore(uri, storage_options=options)).claim()
    together = threading.Barrier(2)

    class Racing(CloudStore):
        def _create(self, key: str, data: bytes, *, mode: str = "create") -> None:
            if key == "lives/000002.json":
                together.wait(30)  # both have looked whether it is taken; none has put it
            super()._create(key, data, mode=mode)

    with ThreadPoolExecutor(2) as pool:
        writers = list(pool.map(lambda _: Run.open(Racing(uri, storage_options=options)).claim(), range(2)))
    assert [writer.life for writer in writers] == [2, 2], "the store could not keep them apart: that is what is tested"
    (loser,) = (writer for n, writer in enumerate(writers) if fenced(writer, 10 + n))
    with pytest.raises(FencedError, match="claimed by another process at the same moment"):
        loser.prune(Retention(keep=1))
    assert fenced(first, 30), "and older lives are fenced as everywhere"
    verified = Run.open(CloudStore(uri, storage_options=options)).select(Depth.DIGESTS).verified
    assert verified is not None
    assert verified.committed.id.life == 2
