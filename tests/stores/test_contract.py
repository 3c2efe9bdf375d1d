"""The store contract against real servers: each behind the URI and the options that a user would write."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from spot_core.store import Store, open_store
from spot_core.testing import StoreContract
from tests.stores.servers import Server


class OnServer(StoreContract):
    name: str

    @pytest.fixture
    def server(self, server_named: Callable[[str], Server]) -> Server:
        return server_named(self.name)

    @pytest.fixture
    def store(self, server: Server, run_name: str) -> Store:
        return open_store(server.uri(run_name), storage_options=server.options)

    @pytest.fixture
    def reopen(self, server: Server, store: Store) -> Callable[[], Store]:
        return lambda: open_store(store.uri, storage_options=server.options)

    def test_the_probe_tells_whether_the_server_heeds_the_condition(self, server: Server, store: Store) -> None:
        assert store.capabilities.put_if_absent is server.conditional
        assert store.capabilities.reopenable
        assert list(store.list("")) == [], "the probe cleans up"


class TestMoto(OnServer):
    name = "moto"


@pytest.mark.slow
class TestSeaweedFS(OnServer):
    name = "seaweedfs"


@pytest.mark.slow
class TestRclone(OnServer):
    name = "rclone"


@pytest.mark.slow
class TestFakeGcs(OnServer):
    name = "fake-gcs"


@pytest.mark.slow
class TestAzurite(OnServer):
    name = "azurite"
