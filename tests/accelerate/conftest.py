"""Controls are run once: the same script uninterrupted, by its options."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ._starts import start


@pytest.fixture(autouse=True)
def _nobody_elses_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SPOT_RUN", "SPOT_INTERVAL", "SPOT_KEEP", "ACCELERATE_SPOT_CONFIG", "ACCELERATE_SPOT_RUN"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def control(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The folder of evidence of an uninterrupted start with these options."""
    done: dict[Any, Path] = {}

    def run(*options: Any, processes: int = 1) -> Path:
        key = (processes, *map(str, options))
        if key not in done:
            folder = tmp_path_factory.mktemp("control")
            codes = start(folder / "out", *options, run=folder / "run", processes=processes, interval="1000 steps")
            assert codes == [0] * processes
            done[key] = folder / "out"
        return done[key]

    return run
