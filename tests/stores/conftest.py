from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterator

import pytest

from tests.stores.servers import Missing, Server, serve


@pytest.fixture(scope="session")
def server_named(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Server]]:
    """Starts each server once per session, when it is first asked for."""
    started: dict[str, Server | Missing] = {}
    with contextlib.ExitStack() as stack:

        def get(name: str) -> Server:
            if name not in started:
                try:
                    started[name] = stack.enter_context(serve(name, tmp_path_factory.mktemp("server") / name))
                except Missing as missing:
                    started[name] = missing
            found = started[name]
            if isinstance(found, Missing):
                pytest.skip(str(found))
            return found

        yield get


@pytest.fixture
def run_name() -> str:
    """A prefix in the bucket that no other test uses."""
    return f"runs/{uuid.uuid4().hex}"
