from __future__ import annotations

from tests.stores.conftest import run_name, server_named

__all__ = ["run_name", "server_named"]
