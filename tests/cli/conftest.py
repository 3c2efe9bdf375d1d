"""A small run with three generations in two lives, made through the public write side."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from spot_core.cli import app
from spot_core.run import Run


def commit(run: Run, steps: list[int], *, ranks: int = 1) -> None:
    writer = run.claim(info={"host": "test"})
    for step in steps:
        opened = writer.begin(step)
        parts = [opened.write(rank, {"weights": bytes([step % 251]) * 1000}) for rank in range(ranks)]
        opened.seal(parts, world_size=ranks).commit({"reason": "interval"})


@pytest.fixture
def run(tmp_path: Path) -> Run:
    made = Run.open(tmp_path / "run")
    commit(made, [10, 20])
    commit(made, [30], ranks=2)
    return made


@pytest.fixture
def spot() -> Callable[..., Result]:
    def call(*args: object) -> Result:
        return CliRunner().invoke(app, [str(arg) for arg in args])

    return call
