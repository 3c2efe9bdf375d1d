"""Loading a state back into a model and optimizer that exist: this package, digests verified, against torch.load."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.bench.contestants import CONTESTANTS, torch_save
from tests.bench.disk import forget_cached
from tests.bench.model import tensor_bytes


def restore_times(training: Any, parent: Path, repeats: int) -> dict[str, Any]:
    """Seconds per load, in turns, from the disk (`cold`) and from the page cache (`warm`)."""
    training.step()
    folder = Path(tempfile.mkdtemp(prefix="spot-bench-", dir=parent))
    try:
        _write(training, folder)
        loads: dict[str, Callable[[], None]] = {
            "spot": lambda: _spot(folder / "run", training),
            "torch.load(mmap) + copy": lambda: _torch_load(folder / "stock" / "state.pt", training),
        }
        _check(loads, training)
        found: dict[str, dict[str, list[float]]] = {name: {"cold": [], "warm": []} for name in loads}
        for _ in range(repeats):
            for heat in ("cold", "warm"):
                for name, load in loads.items():
                    if heat == "cold":
                        forget_cached(folder)
                    else:
                        load()
                    began = time.perf_counter()
                    load()
                    found[name][heat].append(time.perf_counter() - began)
        return {"restore": found, "bytes": tensor_bytes(training.state())}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _write(training: Any, folder: Path) -> None:
    stock = torch_save(training)
    stock.save(training.state(), folder / "stock")
    spot = CONTESTANTS["spot"](training)
    spot.start(folder / "run", tensor_bytes(training.state()))
    spot.save(training.state(), folder)
    while spot.ended() is None:
        time.sleep(0.01)
    spot.close()


def _targets(training: Any) -> dict[str, Any]:
    return {"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()}


def _spot(folder: Path, training: Any) -> None:
    from spot_core.pytorch.loader import load
    from spot_core.run import Depth, Run

    run = Run.open(folder)
    newest = run.discover().generations[0]
    verified = run.verify(newest, Depth.SIZES)
    load(run.store, verified, rank=0, world=1, template=_targets(training))


def _torch_load(path: Path, training: Any) -> None:
    state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    with torch.no_grad():
        _copy(state, _targets(training))


def _copy(source: Any, target: Any) -> None:
    if isinstance(target, torch.Tensor):
        target.copy_(source)
    elif isinstance(target, dict):
        for key, value in target.items():
            _copy(source[key], value)
    elif isinstance(target, list):
        for one, other in zip(source, target, strict=True):
            _copy(one, other)


def _check(loads: dict[str, Callable[[], None]], training: Any) -> None:
    """Both must bring the saved values back, or their times mean nothing."""
    wanted = [tensor.clone() for tensor in training.stable()]
    for name, load in loads.items():
        with torch.no_grad():
            for tensor in training.stable():
                tensor.zero_()
        load()
        if not all(torch.equal(a, b) for a, b in zip(training.stable(), wanted, strict=True)):
            raise AssertionError(f"{name} did not restore the state")
