"""What two gloo ranks do for test_ranks.py: `python -m tests.pytorch.rank_jobs RANK WORLD FOLDER`.

Each job saves under FOLDER/<job> and returns JSON that the test looks at; FOLDER/<rank>.json gets all of it.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._shard.sharded_tensor import Shard as OldShard
from torch.distributed._shard.sharded_tensor import ShardMetadata
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from spot_core.errors import SaveError
from spot_core.pytorch import SpotStorageReader
from spot_core.pytorch._private import sharded_tensor_class
from spot_core.pytorch.loader import load
from spot_core.pytorch.plan import Planner
from spot_core.run import Run

from .saving import Saver

LARGE = 40_000  # elements: above the size from which replicated tensors are spread


def replicated(saver: Saver, rank: int, mesh: DeviceMesh) -> Any:
    """Parameters alike on both ranks, a small buffer and a pinned large one that differ, local state."""
    torch.manual_seed(0)
    weights = {f"w{i}": torch.randn(LARGE + i) for i in range(6)}
    shared = {**weights, "buffer": torch.full((4,), float(rank)), "mask": torch.full((LARGE,), float(rank))}
    local = {"rng": torch.full((3,), float(rank)), "name": f"I am {rank}", "large": bytes([rank]) * 9000}
    _, plan = saver.save(1, shared, local, pinned={"mask"})
    return {"items": [item.fqn for item in plan.items], "size": plan.size}


def sharded(saver: Saver, rank: int, mesh: DeviceMesh) -> Any:
    """DTensors: even and uneven shards, columns, replicated, empty on one rank, 0-dim."""
    torch.manual_seed(1)
    whole = {
        "rows": torch.randn(6, 4),
        "uneven": torch.randn(5, 3),
        "columns": torch.randn(4, 7),
        "one_row": torch.randn(1, 3),
        "alike": torch.randn(LARGE),
        "scalar": torch.randn(()),
    }
    placements = {"columns": Shard(1), "alike": Replicate(), "scalar": Replicate()}
    state = {k: distribute_tensor(t, mesh, [placements.get(k, Shard(0))]) for k, t in whole.items()}
    tied = {"a": state["one_row"], "b": state["one_row"].detach()}  # empty on rank 1
    _, plan = saver.save(1, {"model": state, "tied": tied})
    return {"items": [item.fqn for item in plan.items]}


def read_back(saver: Saver, rank: int, mesh: DeviceMesh) -> Any:
    """What `sharded` saved, read into other shardings by our loader and by stock DCP."""
    run = Run.open(Path(saver.run.uri.removeprefix("file://")).with_name("sharded"))
    torch.manual_seed(1)
    rows, uneven, columns = torch.randn(6, 4), torch.randn(5, 3), torch.randn(4, 7)
    wanted = {"rows": (rows, Shard(1)), "uneven": (uneven, Replicate()), "columns": (columns, Shard(0))}
    template = {k: distribute_tensor(torch.zeros_like(t), mesh, [p]) for k, (t, p) in wanted.items()}
    verified = run.verify(run.discover().generations[0])
    loaded = load(run.store, verified, rank=rank, world=2, template={"model": template})
    ours = all(torch.equal(template[k].full_tensor(), t) for k, (t, _) in wanted.items())
    in_place = loaded.shared["model"]["rows"].to_local().data_ptr() == template["rows"].to_local().data_ptr()

    stock = {k: distribute_tensor(torch.zeros_like(t), mesh, [p]) for k, (t, p) in wanted.items()}
    dcp.load({"model": stock}, storage_reader=SpotStorageReader(run), process_group=saver.group)
    theirs = all(torch.equal(stock[k].full_tensor(), t) for k, (t, _) in wanted.items())
    return {"ours": ours, "in_place": in_place, "stock": theirs, "same_world": loaded.same_world}


def cached(saver: Saver, rank: int, mesh: DeviceMesh) -> Any:
    """The plan is kept while nothing changes form, and made anew on all ranks when one rank's state does."""
    planned: list[int] = []
    original = Planner._plan_together

    def counted(self: Planner, *arguments: Any) -> Any:
        planned.append(1)
        return original(self, *arguments)

    saver.planner._plan_together = counted.__get__(saver.planner)  # type: ignore[method-assign]
    module = nn.Linear(8, 8)
    dist.broadcast(module.weight.data, 0)
    optimizer = torch.optim.AdamW(module.parameters())

    def save(step: int, extra: dict[str, torch.Tensor] | None = None) -> Any:
        state = {"model": module.state_dict(), "optimizer": optimizer.state_dict(), **(extra or {})}
        return saver.save(step, state, {"rng": torch.get_rng_state()})[1]

    counts, plans = [], []
    for step in range(4):
        if step == 2:  # the optimizer's state appears
            module(torch.ones(2, 8)).sum().backward()
            optimizer.step()
        plans.append(save(step))
        counts.append(len(planned))
    plans.append(save(4))
    same_object = plans[4] is plans[3] or save(5) is plans[4]
    save(6, {"x": torch.zeros(3, dtype=torch.float32)} if rank == 1 else None)  # on one rank alone
    counts.append(len(planned))
    save(7, {"x": torch.zeros(3, dtype=torch.bfloat16)} if rank == 1 else None)  # another dtype
    counts.append(len(planned))
    optimizer_items = sum("exp_avg" in item.fqn for item in plans[3].items)
    return {"counts": counts, "same_object": same_object, "optimizer_items": optimizer_items}


def refused(saver: Saver, rank: int, mesh: DeviceMesh) -> Any:
    """A state that cannot be planned is an error on every rank, and the planner goes on working."""
    messages = []
    partial = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    for state in (
        {"x": torch.zeros(3 + rank)},  # shapes differ
        {"x": torch.zeros(3, dtype=torch.float32 if rank else torch.int32)},
        {"x": partial if rank else torch.zeros(2)},  # only one rank knows
    ):
        try:
            saver.planner.plan(state, {})
        except SaveError as error:
            messages.append(str(error))
    try:
        saver.planner.fail() if rank else saver.planner.plan({"x": torch.zeros(2)}, {})
    except SaveError as error:
        messages.append(str(error))
    saver.save(1, {"x": torch.ones(2)})
    return messages


def old_shards(saver: Saver, rank: int, mesh: DeviceMesh) -> Any:
    """ShardedTensors, in which FSDP1 hands out its state: saved, and filled in place."""

    def sharded(value: float) -> Any:
        metadata = ShardMetadata(shard_offsets=[2 * rank, 0], shard_sizes=[2, 3], placement=f"rank:{rank}/cpu")
        return cls._init_from_local_shards([OldShard(torch.full((2, 3), value), metadata)], (4, 3))

    cls: Any = sharded_tensor_class()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's own, for each touch of the type
        saver.save(1, {"w": sharded(1.0 + rank)})
        template = sharded(9.0)
        dist.barrier(saver.group)
        verified = saver.run.verify(saver.run.discover().generations[0])
        load(saver.run.store, verified, rank=rank, world=2, template={"w": template})
        return template.local_shards()[0].tensor.tolist()


JOBS: tuple[Callable[[Saver, int, DeviceMesh], Any], ...] = (
    replicated,
    sharded,
    read_back,
    cached,
    refused,
    old_shards,
)


def main() -> None:
    rank, world, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    mesh, group, results = init_device_mesh("cpu", (world,)), dist.new_group(backend="gloo"), {}
    for job in JOBS:
        saver = Saver(Run.open(folder / job.__name__), group)
        results[job.__name__] = job(saver, rank, mesh)
        saver.close()
    (folder / f"{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
