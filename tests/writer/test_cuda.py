"""Snapshots of tensors on a device: on a real one (`-m gpu`), and the order of the calls with one that is played."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch

from spot_core.pytorch import stage
from spot_core.pytorch.pinning import Pinned
from spot_core.pytorch.stage import Stager, storage_ids
from spot_core.store import Store, open_store
from spot_core.writer import WriterClient

from ._snapshot import plan_of, save, saved

WAIT = 60
CALLS: list[str] = []


class Event:
    def __init__(self, name: str) -> None:
        self.name, self.device = name, "cuda:0"

    def synchronize(self) -> None:
        CALLS.append(f"host waits for {self.name}")


class Stream:
    """Plays a stream: notes what it is told."""

    def __init__(self, name: str) -> None:
        self.name, self.events = name, 0

    def wait_event(self, event: Event) -> None:
        CALLS.append(f"{self.name} waits for {event.name}")

    def record_event(self) -> Event:
        self.events += 1
        CALLS.append(f"{self.name} records {self.name}{self.events}")
        return Event(f"{self.name}{self.events}")


def test_the_order_of_waits_and_copies(
    store: Store, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """The side stream waits for the training's, the training's for the side stream before anything may change, and
    the writer hears of bytes only when the host has waited for them."""
    CALLS.clear()
    main, side = Stream("main"), Stream("side")
    copy, add = stage.foreach_copy, stage._Group.add

    def noted_copy(targets: list[torch.Tensor], sources: list[torch.Tensor], non_blocking: bool = False) -> None:
        CALLS.append(f"copies {len(sources)}{'' if non_blocking else ' and waits'}")
        copy(targets, sources)

    def on_device(self: Any, target: torch.Tensor, source: torch.Tensor) -> None:
        pair = self.cuda.setdefault("cuda:0", ([], []))
        add(self, target, source)
        for ours, theirs in zip(pair, self.host, strict=True):
            ours.append(theirs.pop())

    monkeypatch.setattr(stage._Group, "add", on_device)
    monkeypatch.setattr(stage, "_GROUP_BYTES", 1)
    monkeypatch.setattr(stage, "foreach_copy", noted_copy)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: main)
    monkeypatch.setattr(Stager, "_stream", lambda self, device: side)
    monkeypatch.setattr(Pinned, "pin", lambda self, device: CALLS.append(f"pins for {device}"))
    client = WriterClient.start(store, mode="thread")
    advance = client.advance
    monkeypatch.setattr(client, "advance", lambda n: (CALLS.append(f"tells {n}"), advance(n)))
    stager = Stager(client)
    tensors = [torch.randn(10), torch.randn(4096), torch.randn(4096)]
    plan = plan_of(tensors)
    future, _ = save(client, stager, plan, storage_ids(tensors[1:]), 1)
    assert CALLS[:2] == ["copies 1", "main records main1"]
    stager.staged.wait(WAIT)
    before_update = len(CALLS)
    stager.wait_staged()
    assert CALLS[2:before_update] == [
        "pins for cuda:0",
        "side waits for main1",
        "copies 1",
        "side records side1",
        "copies 1",
        "side records side2",
        "host waits for side1",
        f"tells {plan.items[1].offset + plan.items[1].nbytes}",
        "host waits for side2",
        f"tells {plan.size}",
    ]
    assert CALLS[before_update:] == ["main waits for side2"]
    assert saved(store, future.result(WAIT), plan) == [bytes(tensor.numpy()) for tensor in tensors]
    stager.close()
    client.close()


@pytest.mark.gpu
def test_a_device_state_is_taken_at_the_save_point(tmp_path: Path) -> None:
    """Parameters are overwritten by the next kernels on the training's stream, buffers right after the save call."""
    store = open_store(tmp_path)
    client = WriterClient.start(store)
    stager = Stager(client)
    parameters = [torch.full((5_000_000,), float(k), device="cuda") for k in range(20)]
    buffers = [torch.full((1000,), -1.0, device="cuda"), torch.full((3, 7), -2.0, device="cuda").t()]
    plan, stable = plan_of([*parameters, *buffers]), storage_ids(parameters)
    stager.reserve(plan.size)
    for step in range(3):
        torch.cuda._sleep(50_000_000)  # the kernels below are still queued when the save is called
        for tensor in (*parameters, *buffers):
            tensor.add_(1.0)
        future, _ = save(client, stager, plan, stable, step)
        for buffer in buffers:
            buffer.mul_(100.0)
        stager.wait_staged()
        wanted = [(float(k + step + 1), 5_000_000) for k in range(20)]
        for parameter in parameters:
            parameter.mul_(7.0)
        found = saved(store, future.result(WAIT), plan)
        for data, (value, count) in zip(found, wanted, strict=False):
            assert data == torch.full((count,), value).numpy().tobytes()
        for data, buffer in zip(found[20:], buffers, strict=True):
            assert set(torch.frombuffer(bytearray(data), dtype=torch.float32).tolist()) == {float(buffer.min()) / 100}
        for k, parameter in enumerate(parameters):
            parameter.fill_(float(k + step + 1))
        for value, buffer in zip((-1.0, -2.0), buffers, strict=True):
            buffer.fill_(value + step + 1)
    stager.close()
    client.close()
