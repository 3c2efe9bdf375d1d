"""A script started with any number of ranks: `python _resize_script.py --folder DIR --out DIR --devices N [...]`.

Appends a line per batch to `<out>/<start>-rank<r>.jsonl`, and writes `<out>/loaded-<start>.pt` (what was loaded) and
`<out>/final.pt`. Without dropout and the like, so that only the samples of a step decide what it does.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, Dataset, Sampler, WeightedRandomSampler

from lightning_spot import ResumableDataModule, SpotCallback
from spot_core.run import Run

SAMPLES = 70


class Items(Dataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return torch.sin(torch.arange(1.0, 5.0) * index), index


class Buckets(Sampler[list[int]]):
    """Batches of samples of like length, another order in each epoch, shared out to the ranks: in nobody's list of
    samplers. With `draws` by torch's global generator, for one rank."""

    def __init__(self, rank: int, ranks: int, size: int = 4, *, draws: bool = False) -> None:
        self.rank, self.ranks, self.size, self.draws, self.epoch = rank, ranks, size, draws, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return SAMPLES // self.size // self.ranks

    def __iter__(self) -> Iterator[list[int]]:
        generator = None if self.draws else torch.Generator().manual_seed(self.epoch)
        by_length = sorted(range(SAMPLES), key=lambda index: (index % 7, index))  # the "length" of a sample
        batches = [by_length[at : at + self.size] for at in range(0, SAMPLES, self.size)]
        order = torch.randperm(len(self) * self.ranks, generator=generator).tolist()
        yield from (batches[number] for number in order[self.rank :: self.ranks])


def loader(data: str, rank: int, ranks: int) -> DataLoader[Any]:
    if data in ("buckets", "drawn buckets"):
        return DataLoader(Items(), batch_sampler=Buckets(rank, ranks, draws=data != "buckets"))
    if data == "weighted":
        generator = torch.Generator().manual_seed(rank)
        weighted = WeightedRandomSampler([1.0 + i % 5 for i in range(SAMPLES)], SAMPLES // ranks, generator=generator)
        return DataLoader(Items(), batch_size=4, sampler=weighted)
    if data == "drawn weighted":
        weighted = WeightedRandomSampler([1.0 + i % 5 for i in range(SAMPLES)], SAMPLES // ranks)
        return DataLoader(Items(), batch_size=4, sampler=weighted)
    return DataLoader(Items(), batch_size=4, shuffle=True)


class Global(ResumableDataModule):
    def train_dataset(self) -> Any:
        return Items()


class Model(pl.LightningModule):
    def __init__(self, strategy: str) -> None:
        super().__init__()
        self.kind = strategy
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))

    def configure_model(self) -> None:
        """As ModelParallelStrategy wants it: the model takes its shape on the strategy's mesh."""
        if self.kind not in ("fsdp2", "tp", "2d") or self.device_mesh is None:
            return
        if self.kind in ("tp", "2d"):
            plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
            parallelize_module(self.net, self.device_mesh["tensor_parallel"], plan)
        if self.kind in ("fsdp2", "2d"):
            mesh = self.device_mesh["data_parallel"]
            for layer in (self.net[0], self.net[2], self.net):
                fully_shard(layer, mesh=mesh)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, ids = batch
        loss = (self.net(x) - ids.float().unsqueeze(1) / SAMPLES).square().mean()
        return {"loss": loss}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.net(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=int(steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class CpuFsdp(FSDPStrategy):
    """FSDP asks for a device index otherwise, which a CPU has not."""

    def _setup_model(self, model: Any) -> Any:
        return FullyShardedDataParallel(module=model, device_id=torch.device("cpu"), **self.kwargs)


def strategy(kind: str, ranks: int) -> Any:
    if kind.startswith("fsdp1"):
        state: Any = "full" if kind == "fsdp1-full" else "sharded"
        return CpuFsdp(state_dict_type=state, auto_wrap_policy={torch.nn.Linear}, process_group_backend="gloo")
    if kind in ("fsdp2", "tp", "2d"):
        tensor = {"fsdp2": 1, "tp": ranks, "2d": 2}[kind]
        return ModelParallelStrategy(ranks // tensor, tensor)
    return "ddp" if ranks > 1 else "auto"


def whole(trainer: Any, module: Any) -> dict[str, Any]:
    """Model and optimizer state, put together from all ranks (collective)."""
    optimizer = trainer.optimizers[0]
    if not trainer.strategy.restore_checkpoint_after_setup:
        return {"model": module.state_dict(), "optimizer": optimizer.state_dict()["state"]}
    options = StateDictOptions(full_state_dict=True)
    model = trainer.strategy.model
    return {
        "model": get_model_state_dict(model, options=options),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options)["state"] if optimizer.state else {},
    }


class Evidence(pl.Callback):
    def __init__(self, out: Path, start: str, folder: str, term: int | None, kill: int | None, pace: float) -> None:
        self.out, self.start, self.folder, self.term, self.kill, self.pace = out, start, folder, term, kill, pace
        self.begun = False

    def _write(self, trainer: Any, row: dict[str, Any]) -> None:
        with (self.out / f"{self.start}-rank{trainer.global_rank}.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.row = {
            "step": trainer.global_step,
            "epoch": trainer.current_epoch,
            "ids": batch[1].tolist(),
            "lr": trainer.optimizers[0].param_groups[0]["lr"],
        }
        if not self.begun:
            self.begun = True
            state = whole(trainer, module)
            if trainer.is_global_zero:
                torch.save(state, self.out / f"loaded-{self.start}.pt")
        if self.term is not None and trainer.global_step >= self.term:
            os.kill(os.getpid(), signal.SIGTERM)
        if trainer.global_step == self.kill:
            while not Run.open(self.folder).discover().generations:  # written in the background
                threading.Event().wait(0.05)
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._write(trainer, {**self.row, "loss": float(outputs["loss"]), "ranks": trainer.world_size})
        threading.Event().wait(self.pace)

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self._write(trainer, {"validated": trainer.global_step, "epoch": trainer.current_epoch})

    def on_train_end(self, trainer: Any, module: Any) -> None:
        state = whole(trainer, module)
        if trainer.is_global_zero:
            torch.save(state, self.out / "final.pt")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--start", default="0")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--validate-every", type=float, default=1.0)
    parser.add_argument("--term", type=int)
    parser.add_argument("--kill", type=int)
    parser.add_argument("--every", default="1000 steps")
    parser.add_argument("--strategy", default="ddp")
    parser.add_argument("--max-steps", type=int, default=-1)
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--resumable", action="store_true")
    parser.add_argument("--on-resize")
    parser.add_argument("--data", default="shuffled")
    parser.add_argument("--pace", type=float, default=0.0, help="seconds for each batch")
    args = parser.parse_args()
    nodes = 1
    if "TORCHELASTIC_RUN_ID" in os.environ:  # as many ranks as there are agents of torchrun, each a node
        args.devices, nodes = 1, int(os.environ["WORLD_SIZE"])
        args.start = f"{time.time_ns()}"
    logging.basicConfig(level=logging.INFO)
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    pl.seed_everything(5, verbose=False)
    model = Model(args.strategy)
    pl.seed_everything(args.seed, verbose=False)
    every: Any = int(args.validate_every) if args.validate_every > 1 else args.validate_every
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=args.devices,
        num_nodes=nodes,
        strategy=strategy(args.strategy, args.devices * nodes),
        max_epochs=3 if args.max_steps < 0 else None,
        max_steps=args.max_steps,
        accumulate_grad_batches=args.accumulate,
        val_check_interval=every,
        callbacks=[
            Evidence(args.out, args.start, args.folder, args.term, args.kill, args.pace),
            SpotCallback(args.folder, args.every, sources="signals", on_resize=args.on_resize),
        ],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        use_distributed_sampler=args.data == "shuffled",
    )
    if args.resumable:
        data = Global(batch_size=4, seed=args.seed)
        data.val_dataset = Items  # type: ignore[method-assign]
        trainer.fit(model, datamodule=data)
    else:
        train = loader(args.data, trainer.global_rank, args.devices * nodes)
        trainer.fit(model, train, DataLoader(Items(), batch_size=16))


if __name__ == "__main__":
    main()
