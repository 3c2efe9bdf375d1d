"""A training script that knows nothing of spot_core, in the shape of accelerate's own examples.

Appends a line per batch to `<out>/rank<r>.jsonl` (a list for each start of the script), and at its end writes
`<out>/final-rank<r>.pt`. With `--signal` it signals itself, and so on, after so many batches of this start.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import threading
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, Dataset, Sampler, WeightedRandomSampler


class Samples(Dataset):
    """Augmented by all generators, so that a random state that was forgotten shows."""

    def __init__(self, count, reads=None):
        self.count, self.reads = count, reads

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if self.reads is not None:
            with self.reads.open("a") as file:
                file.write(f"{index}\n")
        noise = random.random() + float(np.random.rand())
        return {"x": torch.randn(4) * 0.1 + index / 10 + noise / 10, "id": index}


class Buckets(Sampler):
    """Batches of samples of like length, drawn in another order in each epoch."""

    batch_size, drop_last = 4, False

    def __init__(self, count):
        self.by_length = sorted(range(count), key=lambda index: (index % 7, index))
        self.generator = torch.Generator().manual_seed(3)

    def __len__(self):
        return len(self.by_length) // self.batch_size

    def __iter__(self):
        for number in torch.randperm(len(self), generator=self.generator).tolist():
            yield self.by_length[number * self.batch_size : (number + 1) * self.batch_size]


def loader_of(args):
    data = Samples(args.count, args.reads)
    if args.data == "buckets":
        return DataLoader(data, batch_sampler=Buckets(args.count), num_workers=args.workers)
    if args.data == "weighted":
        weighted = WeightedRandomSampler([1.0 + index % 5 for index in range(args.count)], args.count)
        return DataLoader(data, batch_size=4, sampler=weighted, num_workers=args.workers)
    return DataLoader(data, batch_size=4, shuffle=True, num_workers=args.workers)


class Evidence:
    def __init__(self, args, accelerator):
        self.args, self.accelerator = args, accelerator
        self.seen = self.evaluated = 0
        self.file = (args.out / f"rank{accelerator.process_index}.jsonl").open("a")
        self.write("start")

    def write(self, row):
        self.file.write(json.dumps(row) + "\n")
        self.file.flush()

    def batch(self, epoch, step, ids, loss, rate):
        self.write([epoch, step, ids.tolist(), loss.item(), rate])
        self.seen += 1
        if self.args.after is not None and self.seen == self.args.after and not self.args.in_evaluation:
            self.strike()

    def evaluation(self):
        self.evaluated += 1
        if self.args.in_evaluation and self.evaluated == self.args.after:
            self.strike()

    def strike(self):
        if self.args.ranks != "all" and str(self.accelerator.process_index) not in self.args.ranks.split(","):
            return
        os.kill(os.getppid() if self.args.launcher else os.getpid(), getattr(signal, self.args.signal))
        threading.Event().wait(self.args.pause)  # the notice takes its way, or the stop would come some batches later


def evaluate(accelerator, model, loader, evidence):
    model.eval()
    losses = []
    for batch in loader:
        evidence.evaluation()
        with torch.no_grad():
            loss = (model(batch["x"]) - torch.rand(())).square().mean()
        losses.append(accelerator.gather_for_metrics(loss.reshape(1)))
    return torch.cat(losses).mean().item()


def own_part(state):
    """Of a sharded tensor what this process has of it."""
    if isinstance(state, dict):
        return {key: own_part(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return [own_part(value) for value in state]
    return state.to_local() if hasattr(state, "to_local") else state


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--count", type=int, default=32)
    parser.add_argument("--data", default="shuffled")
    parser.add_argument("--seedable", action="store_true")
    parser.add_argument("--stateful", action="store_true")
    parser.add_argument("--dispatch", action="store_true")
    parser.add_argument("--split", action="store_true")
    parser.add_argument("--sharded", action="store_true")
    parser.add_argument("--reads", type=Path)
    parser.add_argument("--after", type=int)
    parser.add_argument("--signal", default="SIGKILL")
    parser.add_argument("--ranks", default="all")
    parser.add_argument("--launcher", action="store_true")
    parser.add_argument("--in-evaluation", action="store_true")
    parser.add_argument("--pause", type=float, default=0.5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    config = DataLoaderConfiguration(
        use_seedable_sampler=args.seedable,
        use_stateful_dataloader=args.stateful,
        dispatch_batches=args.dispatch or None,
        split_batches=args.split,
    )
    if args.sharded:
        import _shards_on_cpu  # noqa: F401 - FSDP itself is asked for by the launcher's configuration

    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=args.accumulate, dataloader_config=config
    )
    set_seed(5)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.97**step)
    train_loader = loader_of(args)
    eval_loader = DataLoader(Samples(16), batch_size=4)
    model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, eval_loader, scheduler
    )
    evidence = Evidence(args, accelerator)
    for epoch in range(args.epochs):
        model.train()
        for step, batch in enumerate(train_loader):
            with accelerator.accumulate(model):
                loss = (model(batch["x"]) - batch["id"].float().unsqueeze(1) / 64).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            evidence.batch(epoch, step, batch["id"], loss, scheduler.get_last_lr()[0])
        evidence.write(["eval", epoch, evaluate(accelerator, model, eval_loader, evidence)])
    final = {
        "model": accelerator.unwrap_model(model).state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
    }
    torch.save(own_part(final), args.out / f"final-rank{accelerator.process_index}.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main()
