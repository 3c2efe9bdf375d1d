from __future__ import annotations

import pytest

from tests.stores.conftest import run_name, server_named

__all__ = ["run_name", "server_named"]


@pytest.fixture(autouse=True)
def _no_long_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """gcsfs tries six times by itself, with half a minute of waits in between: without them, here."""
    import gcsfs.retry

    monkeypatch.setattr(gcsfs.retry, "min", lambda *_: 0.01, raising=False)
