"""A Fabric loop, interrupted after any step and started again, against the loop that ran through."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric, seed_everything
from lightning.fabric.plugins.precision import MixedPrecision
from torch import nn

from lightning_spot.spot_fabric import SpotFabric
from spot_core.errors import ConfigError, ResumeMismatchError

from ._harness import SAMPLES, Killed, assert_equal, plain, stateful, stateful_stream, stream


class Loop:
    """One start of a script: dropout and BatchNorm, augmentation, a scheduler, two epochs."""

    def __init__(self, run: Path, *, loader: Any = None, seed: int = 7, kill: int | None = None) -> None:
        self.run, self.make, self.seed, self.kill = run, loader or (lambda: plain(augment=True)), seed, kill
        self.seen: list[tuple[list[int], float, float]] = []

    def start(self) -> dict[str, Any]:
        seed_everything(self.seed, verbose=False)
        fabric = Fabric(accelerator="cpu", devices=1)
        fabric.launch()
        model: Any = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.8)
        model, optimizer = fabric.setup(model, optimizer)
        every = f"{self.kill} steps" if self.kill else "1000 steps"
        with SpotFabric(fabric, self.run, interval=every, sources="none", writer="thread") as spot:
            loader = spot.loader(self.make())
            state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "epoch": 0, "step": 0}
            spot.resume(state)
            while state["epoch"] < 2:
                for x, ids in loader:
                    loss = (model(x) - ids.float().unsqueeze(1) / SAMPLES).square().mean()
                    fabric.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                    scheduler.step()
                    state["step"] += 1
                    self.seen.append((ids.tolist(), float(loss), optimizer.param_groups[0]["lr"]))
                    spot.step(state)
                    if state["step"] == self.kill:
                        spot._session.drain()
                        raise Killed
                state["epoch"] += 1
            spot.finish(state)
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "lr": scheduler.state_dict()}


LOADERS: dict[str, Any] = {
    "plain": lambda: plain(augment=True),
    "workers": lambda: plain(2, augment=True),
    "iterable": stream,
    "stateful": stateful,
    "stateful stream": stateful_stream,
}


@pytest.mark.parametrize("kill", [3, 8, 11])
@pytest.mark.parametrize("kind", ["plain", *(pytest.param(k, marks=pytest.mark.slow) for k in LOADERS if k != "plain")])
def test_continues(kind: str, kill: int, tmp_path: Path) -> None:
    control = Loop(tmp_path / "control", loader=LOADERS[kind])
    final = control.start()
    first = Loop(tmp_path / "run", loader=LOADERS[kind], kill=kill)
    with pytest.raises(Killed):
        first.start()
    second = Loop(tmp_path / "run", loader=LOADERS[kind], seed=99)
    assert_equal(second.start(), final, "state")
    assert_equal(first.seen + second.seen, control.seen, "steps")
    third = Loop(tmp_path / "run", loader=LOADERS[kind], seed=100)
    assert_equal(third.start(), final, "state")
    assert third.seen == []


def parts(width: int = 8) -> tuple[Fabric, dict[str, Any]]:
    fabric = Fabric(accelerator="cpu", devices=1)
    model = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Dropout(0.5), nn.Linear(width, 1))
    wrapped, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters(), lr=0.05))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.8)
    return fabric, {"model": wrapped, "optimizer": optimizer, "scheduler": schedule, "epoch": 0, "step": 0}


def refused(run: Path, kind: type[Exception], match: str, *, width: int = 8, loaders: int = 1, **changes: Any) -> None:
    fabric, state = parts(width)
    with SpotFabric(fabric, run, sources="none", writer="thread") as spot:
        for _ in range(loaders):
            spot.loader(plain())
        with pytest.raises(kind, match=match):
            spot.resume({key: value for key, value in {**state, **changes}.items() if value is not None})


def test_another_run_is_refused_and_left_alone(tmp_path: Path) -> None:
    run = tmp_path / "run"
    final = Loop(run).start()
    refused(run, ConfigError, 'entry "step"', step=None)
    refused(run, ResumeMismatchError, "has the entries .*'scheduler', 'step'.*and the state has", scheduler=None)
    refused(run, ResumeMismatchError, "the run of another model", width=9)
    refused(run, ResumeMismatchError, "places of 1 loaders, and the script made 2", loaders=2)
    again = Loop(run, seed=3)
    assert_equal(again.start(), final, "state")
    assert again.seen == []


def test_the_verbs_come_in_their_order(tmp_path: Path) -> None:
    fabric, state = parts()
    with SpotFabric(fabric, tmp_path / "run", sources="none", writer="thread") as spot:
        with pytest.raises(ConfigError, match="call resume"):
            spot.step(state)
        assert not spot.resume(state)
        with pytest.raises(ConfigError, match="after resume"):
            spot.loader(plain())
        with pytest.raises(ConfigError, match="once"):
            spot.resume(state)


def test_an_engine_is_refused_before_anything_is_touched(tmp_path: Path) -> None:
    class DeepSpeedStrategy:
        pass

    with pytest.raises(ConfigError, match="DeepSpeedStrategy"):
        SpotFabric(SimpleNamespace(strategy=DeepSpeedStrategy()), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_loss_scaler_goes_on(tmp_path: Path) -> None:
    """Its scale is the precision plugin's, which is in no entry of the state."""
    for number in range(2):
        fabric, state = parts()
        fabric.strategy.precision = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=8.0))
        with SpotFabric(fabric, tmp_path / "run", sources="none", writer="thread", interval="1 steps") as spot:
            assert spot.resume(state) == bool(number)
            scaler = fabric.strategy.precision.scaler
            assert scaler.state_dict()["scale"] == (8.0, 4.0)[number]
            scaler.load_state_dict({**scaler.state_dict(), "scale": 4.0})
            state["step"] += 1
            spot.step(state)
            spot._running().drain()
