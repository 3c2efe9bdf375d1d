"""A small training that the session tests run: in the test's process as one rank, or as a process per rank
(``python -m tests.session.job RANK WORLD PORT STORE``, the store being hosted by the test; STORE "own" hides it in one
of a class that cannot be cloned)."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from threading import Timer
from typing import Any

import torch
import torch.distributed as dist

from spot_core.config import Settings
from spot_core.errors import AccessError, ResumeMismatchError, SpotError
from spot_core.policy import Kind
from spot_core.pytorch.session import Patience, Resumed, Session
from spot_core.run import Run
from spot_core.signals import Notice, NoticeKind
from spot_core.store import Store, open_store
from spot_core.testing import FailingStore, SlowStore


class Training:
    """Adam, dropout, data by step number and rank, gradients averaged over the ranks."""

    def __init__(self, rank: int = 0, world: int = 1) -> None:
        self.rank, self.world = rank, world
        torch.manual_seed(5)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(32, 64), torch.nn.Dropout(0.2), torch.nn.ReLU(), torch.nn.Linear(64, 4)
        )
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        self.step = 0
        torch.manual_seed(100 + rank)

    def forward_backward(self) -> None:
        data = torch.Generator().manual_seed(1000 * (self.step + 1) + self.rank)
        x, y = torch.randn(16, 32, generator=data), torch.randn(16, 4, generator=data)
        self.optimizer.zero_grad()
        torch.nn.functional.mse_loss(self.model(x), y).backward()

    def update(self) -> None:
        if self.world > 1:
            for parameter in self.model.parameters():
                assert parameter.grad is not None
                dist.all_reduce(parameter.grad)
                parameter.grad /= self.world
        self.optimizer.step()
        self.step += 1

    def shared(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def local(self) -> dict[str, Any]:
        return {"step": self.step, "rng": torch.get_rng_state()}

    def stable(self) -> list[torch.Tensor]:
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        return [*self.model.parameters(), *moments]

    def take_up(self, resumed: Resumed | None) -> None:
        if resumed is None:
            return
        assert resumed.state.local is not None
        self.model.load_state_dict(resumed.state.shared["model"])
        self.optimizer.load_state_dict(resumed.state.shared["optimizer"])
        self.step = resumed.state.local["step"]
        torch.set_rng_state(resumed.state.local["rng"])

    def tensors(self) -> list[torch.Tensor]:
        """Everything that a resume has to bring back."""
        return [*self.model.state_dict().values(), *self.stable(), torch.get_rng_state()]


def control(steps: int) -> list[torch.Tensor]:
    """The same training on one rank, never interrupted."""
    training = Training()
    while training.step < steps:
        training.forward_backward()
        training.update()
    return training.tensors()


def save(session: Session, training: Training, **kw: Any) -> None:
    session.save(training.step, shared=training.shared(), local=training.local(), stable=training.stable(), **kw)


def rehearse(session: Session, training: Training) -> None:
    session.rehearse(shared=training.shared(), local=training.local(), stable=training.stable())


def train(session: Session, training: Training, steps: int, after: Any = None) -> int | None:
    """Up to `steps`; the exit code when a decision stops it, None at the end. `after(step)` follows each update."""
    while training.step < steps:
        training.forward_backward()
        session.wait_staged()
        training.update()
        if after is not None:
            after(training.step)
        decision = session.boundary(training.step)
        if decision.kind in (Kind.SAVE, Kind.STOP_SAVE):
            save(session, training, reason=decision.reason, wait=decision.kind is Kind.STOP_SAVE)
        elif session.untried:
            rehearse(session, training)
        if decision.kind.stops:
            return session.stop(training.step, decision.reason)
    return None


class OwnStore(dist.Store):
    """A user's own class of store: what process groups need, and no more."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def set(self, key: str, value: Any) -> None:
        self.inner.set(key, value)

    def get(self, key: str) -> bytes:
        value: bytes = self.inner.get(key)
        return value

    def add(self, key: str, amount: int) -> int:
        return int(self.inner.add(key, amount))

    def check(self, keys: list[str]) -> bool:
        return bool(self.inner.check(keys))

    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        self.inner.wait(keys, *timeout)


def main() -> None:
    """Runs one scenario after another, a line of JSON on stdin each, and answers each with a line."""
    rank, world, port = (int(word) for word in sys.argv[1:4])
    torch.set_num_threads(1)
    store: dist.Store = dist.TCPStore("127.0.0.1", port, world, False, timeout=timedelta(seconds=60))
    if sys.argv[4] == "own":
        store = OwnStore(store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=60))
    for line in sys.stdin:
        scenario: dict[str, Any] = json.loads(line)
        folder = Path(scenario["folder"])
        log = logging.FileHandler(folder / f"log{rank}")
        logging.basicConfig(handlers=[log], level=logging.INFO, format="%(levelname)s %(message)s", force=True)
        said: dict[str, Any] = {"errors": [], "committed": []}
        try:
            run(rank, world, group, scenario, said)
        except SpotError as error:
            said["errors"].append([type(error).__name__, str(error)])
        (folder / f"said{rank}.json").write_text(json.dumps(said))
        print("done", flush=True)
        if scenario.get("leaves"):
            os._exit(said["stopped"][1] or 0)
    os._exit(0)  # some rank may be dead: no teardown of process groups


def run(rank: int, world: int, group: dist.ProcessGroup, scenario: dict[str, Any], said: dict[str, Any]) -> None:
    inner = open_store(scenario["uri"])
    blobs = {"written": 0}

    def holds(verb: str, key: str) -> bool:
        return verb == "put_blob" and [rank, blobs["written"]] == scenario["hold"]

    def fails(index: int, verb: str, key: str) -> Exception | None:
        if verb != "put_blob":
            return None
        blobs["written"] += 1
        return AccessError("no entry (test)") if [rank, blobs["written"]] in scenario.get("fail", []) else None

    def check(manifest: Any) -> None:
        if rank == scenario.get("mismatch_on"):
            raise ResumeMismatchError("another model (test)")

    store: Store = inner
    local = None if "local" not in scenario else f"{scenario['local']}/m{rank}"
    if "fail" in scenario or "hold" in scenario:
        # The slow one within: writes are counted before one is held.
        store = FailingStore(SlowStore(inner, holds) if "hold" in scenario else inner, fails)
    training = Training(rank, world)
    session = Session(
        Run.open(store),
        Settings(**{"sources": "none", "preflight": False, "local": local, **scenario.get("settings", {})}),
        rank=rank,
        world_size=world,
        group=group,
        check=check,
        patience=Patience(report_s=3, joint_s=30, stop_s=5, close_s=scenario.get("close_s", 3), silent_s=3),
    )
    with session:
        resumed = session.resume()
        said["resumed"] = None if resumed is None else resumed.generation
        training.take_up(resumed)
        session.start()

        def after(step: int) -> None:
            if [rank, step] == scenario.get("notice_at"):
                session.notify(Notice("n1", NoticeKind.PREEMPTION, "test"))
            if [rank, step] == scenario.get("signal_at"):
                os.kill(os.getpid(), signal.SIGTERM)
            if [rank, step] == scenario.get("notice_soon_after"):
                Timer(1, session.notify, [Notice("n1", NoticeKind.PREEMPTION, "test")]).start()
            if [rank, step] == scenario.get("kill_soon_after"):
                Timer(1, os.kill, [os.getpid(), signal.SIGKILL]).start()
            if step in scenario.get("save_at", []):
                local = training.local() | ({"bad": object()} if [rank, step] == scenario.get("bad_at") else {})
                session.save(step, shared=training.shared(), local=local, stable=training.stable())
            if [rank, step] == scenario.get("kill_after"):
                os.kill(os.getpid(), signal.SIGKILL)
            if step in scenario.get("drain_at", []):
                try:
                    committed = session.drain()
                    said["committed"].append([step, None if committed is None else committed.id.name])
                except SpotError as error:
                    said["errors"].append([type(error).__name__, str(error)])

        code = train(session, training, scenario["steps"], after)
        said["stopped"] = [training.step, code]
    folder = Path(scenario["folder"])
    torch.save(training.tensors(), folder / f"final{rank}.pt")


if __name__ == "__main__":
    main()
