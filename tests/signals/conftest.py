from __future__ import annotations

import pytest

from spot_core.testing.clock import FakeClock


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()
