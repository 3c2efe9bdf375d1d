"""A Fabric loop on ranks of torchrun: `torchrun --nproc-per-node=N _fabric_script.py RUN OUT START STRATEGY [...]`.

Appends a line per optimizer step to `<out>/<start>-rank<r>.jsonl` and writes `<out>/final-rank<r>.pt`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.fabric import Fabric, seed_everything
from lightning.fabric.strategies import FSDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lightning_spot.spot_fabric import SpotFabric
from tests.lightning._harness import plain

EPOCHS = 4


class CpuFsdp(FSDPStrategy):
    """FSDP asks for a device index otherwise, which a CPU has not."""

    def setup_module(self, module: nn.Module) -> nn.Module:
        kwargs = {key: value for key, value in self._fsdp_kwargs.items() if key != "auto_wrap_policy"}
        return FullyShardedDataParallel(module, device_id=torch.device("cpu"), **kwargs)


def shard(model: nn.Module, mesh: Any) -> nn.Module:
    if mesh["tensor_parallel"].size() > 1:
        parallelize_module(model, mesh["tensor_parallel"], {"0": ColwiseParallel(), "3": RowwiseParallel()})
    if mesh["data_parallel"].size() > 1 or mesh["tensor_parallel"].size() == 1:
        for layer in (model[0], model[-1], model):  # type: ignore[index]
            fully_shard(layer, mesh=mesh["data_parallel"])
    return model


def strategy(kind: str, ranks: int) -> Any:
    if kind == "fsdp1":
        return CpuFsdp(process_group_backend="gloo", use_orig_params=True)
    if kind in ("fsdp2", "tp", "2d"):
        tensor = tensor_parallel(kind, ranks)
        return ModelParallelStrategy(shard, data_parallel_size=ranks // tensor, tensor_parallel_size=tensor)
    return "ddp" if ranks > 1 else "auto"


def tensor_parallel(kind: str, ranks: int) -> int:
    """How many ranks share each tensor, and so each batch."""
    return {"tp": ranks, "2d": 2}.get(kind, 1)


def mine(value: Any) -> Any:
    """A state with this rank's shards, as plain tensors."""
    if isinstance(value, DTensor):
        return value.to_local().detach().clone()
    if isinstance(value, dict):
        return {key: mine(item) for key, item in value.items()}
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("run", "out", "start", "strategy"):
        parser.add_argument(name)
    parser.add_argument("--every", default="1000 steps")
    parser.add_argument("--kill", type=int)
    parser.add_argument("--term", type=int)
    parser.add_argument("--on-resize")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    seed_everything(7 + 10 * int(args.start), verbose=False)
    fabric = Fabric(accelerator="cpu", devices=ranks, strategy=strategy(args.strategy, ranks))
    fabric.launch()
    torch.manual_seed(7)  # the same weights on every start: a resume must not depend on them, but a control does
    layers = [nn.Linear(4, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 1)]
    model: Any = nn.Sequential(*layers)
    optimizer: Any
    if args.strategy == "ddp":
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        model, optimizer = fabric.setup(model, optimizer)
    else:
        model = fabric.setup_module(model)
        optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.02))
    group = rank // tensor_parallel(args.strategy, ranks)
    for seed in (random.seed, np.random.seed, torch.manual_seed):  # ranks with data of their own draw their own
        seed(7 + group + 10 * int(args.start))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 3, 0.9)
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    with SpotFabric(fabric, args.run, interval=args.every, sources="signals", on_resize=args.on_resize) as spot:
        loader = spot.loader(plain(augment=True))
        state: dict[str, Any] = {
            "model": model, "optimizer": optimizer, "scheduler": scheduler, "epoch": 0, "step": 0,
        }  # fmt: skip
        spot.resume(state)
        while state["epoch"] < EPOCHS:
            for x, ids in loader:
                loss = (model(x) - ids.float().unsqueeze(1) / 32).square().mean()
                fabric.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                state["step"] += 1
                model.eval()
                with torch.no_grad():
                    model(x)  # after which a sharded model has gathered parameters, which its optimizer does not know
                model.train()
                with (out / f"{args.start}-rank{rank}.jsonl").open("a") as file:
                    row = {"step": state["step"], "ids": ids.tolist(), "x": x.tolist(), "loss": float(loss.detach())}
                    file.write(json.dumps({**row, "lr": optimizer.param_groups[0]["lr"]}) + "\n")
                if args.term is not None and state["step"] >= args.term:
                    if state["step"] == args.term and rank == ranks - 1:
                        os.kill(os.getpid(), signal.SIGTERM)
                    threading.Event().wait(2)  # the ranks agree beside the loop, which would be over by then
                spot.step(state)
                if state["step"] == args.kill:
                    spot._running().drain()  # so that there is a generation, whatever the machine's pace
                    os.kill(os.getpid(), signal.SIGKILL)
            state["epoch"] += 1
        spot.finish(state)
    torch.save(mine({"model": model.state_dict(), "optimizer": optimizer.optimizer.state_dict()["state"]}),
               out / f"final-rank{rank}.pt")


if __name__ == "__main__":
    main()
