"""A script that says itself where it is in its loops: `_script_own.py --out OUT epochs|counters [--after N]`.

With `--by attach` or `--by subclass` it also says itself that its training is kept.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import threading
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader

import accelerate_spot


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("how")
    parser.add_argument("--after", type=int)
    parser.add_argument("--by", default="flag")
    args = parser.parse_args()
    accelerator = (accelerate_spot.Accelerator if args.by == "subclass" else Accelerator)(cpu=True)
    if args.by == "attach":
        accelerate_spot.attach(accelerator)
    set_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    loader = DataLoader(torch.arange(24.0).reshape(24, 1), batch_size=4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    counters = accelerate_spot.state(step=0, losses=[])
    file = (args.out / f"rank{accelerator.process_index}.jsonl").open("a")
    file.write('"start"\n')
    seen = 0

    def train(epoch, batch):
        nonlocal seen
        loss = (model(batch) - batch / 24).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        counters.step += 1
        counters.losses.append(loss.item())
        row = [epoch, counters.step, batch.flatten().tolist(), loss.item(), sum(counters.losses)]
        file.write(json.dumps(row) + "\n")
        file.flush()
        seen += 1
        if seen == args.after and accelerator.is_main_process:
            os.kill(os.getpid(), signal.SIGTERM)
            threading.Event().wait(0.3)  # the notice takes its way

    if args.how == "epochs":
        for epoch in accelerate_spot.epochs(2, 5):
            for batch in loader:
                train(epoch, batch)
    else:
        while counters.step < 20:
            for batch in loader:
                train(None, batch)
                if counters.step == 20:
                    break
    final = {"model": accelerator.unwrap_model(model).state_dict(), "step": counters.step}
    torch.save(final, args.out / f"final-rank{accelerator.process_index}.pt")
    accelerator.end_training()


main()
