"""A script with everything that can be prepared and registered: `_script_parts.py --out OUT [--after N]`.

Two models with an optimizer and a schedule each, of which one steps at every third batch only, averaged weights, and
a gradient scaler, which skips the steps of batch 5.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import threading
from pathlib import Path

import torch
from _averaged import Averaged
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--after", type=int)
    args = parser.parse_args()
    accelerator = Accelerator(cpu=True)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=4)
    set_seed(5)
    one = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
    two = torch.nn.Linear(1, 1)
    often, seldom = torch.optim.Adam(one.parameters(), lr=0.02), torch.optim.SGD(two.parameters(), lr=0.1, momentum=0.9)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in (often, seldom)]
    loader = DataLoader(torch.arange(24.0).reshape(24, 1), batch_size=4, shuffle=True)
    one, two, often, seldom, loader, *schedules = accelerator.prepare(one, two, often, seldom, loader, *schedules)
    averaged = Averaged(one)
    accelerator.register_for_checkpointing(averaged)
    file = (args.out / "rank0.jsonl").open("a")
    file.write('"start"\n')
    seen = 0
    for epoch in range(2):
        for step, batch in enumerate(loader):
            loss = (one(batch) - two(batch) - batch / 24).square().mean()
            accelerator.backward(loss * float("inf") if step == 5 else loss)
            often.step()
            schedules[0].step()
            often.zero_grad()
            if step % 3 == 2:
                seldom.step()
                schedules[1].step()
                seldom.zero_grad()
            averaged.update(one)
            rates = [each.get_last_lr()[0] for each in schedules]
            row = [epoch, step, batch.flatten().tolist(), loss.item(), rates, accelerator.scaler.get_scale()]
            file.write(json.dumps(row) + "\n")
            file.flush()
            seen += 1
            if seen == args.after:
                os.kill(os.getpid(), signal.SIGTERM)
                threading.Event().wait(0.3)  # the notice takes its way
    final = {
        "models": [each.state_dict() for each in (one, two)],
        "optimizers": [each.state_dict() for each in (often, seldom)],
        "averaged": averaged.state_dict(),
        "scaler": accelerator.scaler.state_dict(),
    }
    torch.save(final, args.out / "final-rank0.pt")
    accelerator.end_training()


main()
