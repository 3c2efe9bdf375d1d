"""A script that shards its model itself and says so itself: `_script_sharded.py --out OUT [--after N]`.

Two optimizers of the one model, of which one steps at every eighth batch only, and averaged weights, in shards like the
model. Appends a row per batch to `<out>/rank<r>.jsonl`; writes `<out>/begun-<life>.pt` (what it had before its first
batch, whole) and `<out>/final-rank<r>.pt`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import threading
from pathlib import Path

import _shards_on_cpu  # noqa: F401
import torch
from _averaged import Averaged
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import ParallelismConfig, set_seed
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.utils.data import DataLoader

import accelerate_spot


def write_begun(out, model, often, seldom, averaged):
    """The state before the first batch, whole; an optimizer's only when it has one."""
    life = len(list(out.glob("begun-*.pt")))
    whole = StateDictOptions(full_state_dict=True)
    state = {
        "model": get_model_state_dict(model, options=whole),
        "averaged": [value.full_tensor() for value in averaged.values],
        **{
            name: get_optimizer_state_dict(model, each, options=whole)["state"] if each.state else {}
            for name, each in (("often", often), ("seldom", seldom))
        },
    }
    if torch.distributed.get_rank() == 0:
        torch.save(state, out / f"begun-{life}.pt")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--after", type=int)
    parser.add_argument("--kill", action="store_true", help="all of it, instead of telling rank 0")
    parser.add_argument("--seldom", type=int, default=8)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--replicate", type=int, default=1, help="groups of processes, each with all shards (HSDP)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    ranks = int(os.environ["WORLD_SIZE"])
    accelerator = Accelerator(
        cpu=True,
        parallelism_config=ParallelismConfig(
            dp_replicate_size=args.replicate, dp_shard_size=ranks // args.replicate
        ) if args.replicate > 1 else None,
        fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=True),
        gradient_accumulation_steps=args.accumulate,
    )
    accelerate_spot.attach(accelerator)
    set_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(1, 9), torch.nn.Tanh(), torch.nn.Linear(9, 1))
    often = torch.optim.Adam(model[0].parameters(), lr=0.02)
    seldom = torch.optim.SGD(model[2].parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.ExponentialLR(often, 0.9)
    loader = DataLoader(torch.arange(48.0).reshape(48, 1), batch_size=2, shuffle=True)
    model, often, seldom, loader, schedule = accelerator.prepare(model, often, seldom, loader, schedule)
    averaged = Averaged(model)
    accelerator.register_for_checkpointing(averaged)
    counters = accelerate_spot.state(step=0)
    rank = accelerator.process_index
    file = (args.out / f"rank{rank}.jsonl").open("a")
    file.write('"start"\n')
    seen = 0
    for epoch in accelerate_spot.epochs(2):
        for batch in loader:
            counters.step += 1
            if seen == 0:
                write_begun(args.out, model, often.optimizer, seldom.optimizer, averaged)
            update, rate = averaged.updates, schedule.get_last_lr()[0]
            with accelerator.accumulate(model):
                loss = (model(batch) - batch / 48).square().mean()
                accelerator.backward(loss)
                often.step()
                schedule.step()
                often.zero_grad()
                if counters.step % args.seldom == 0:
                    seldom.step()
                    seldom.zero_grad()
            if accelerator.sync_gradients:
                averaged.update(model)
            row = [epoch, counters.step, batch.flatten().tolist(), loss.item(), rate, update]
            file.write(json.dumps(row) + "\n")
            file.flush()
            seen += 1
            if seen == args.after and args.kill:
                os.kill(os.getpid(), signal.SIGKILL)
            if seen == args.after and rank == 0:
                os.kill(os.getpid(), signal.SIGTERM)
                threading.Event().wait(0.3)  # the notice takes its way
    final = {
        "model": [parameter.to_local() for parameter in model.parameters()],
        "averaged": [value.to_local() for value in averaged.values],
        "optimizers": [
            [state[name].to_local() for state in each.state.values() for name in sorted(state) if name != "step"]
            for each in (often.optimizer, seldom.optimizer)
        ],
        "updates": averaged.updates,
    }
    torch.save(final, args.out / f"final-rank{rank}.pt")
    accelerator.end_training()


main()
