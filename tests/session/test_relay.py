"""Writers in turns (W8): so many at a time, by the world size or by setting; nobody waits for ever."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import pytest

from spot_core.errors import SaveError
from spot_core.layout import GenerationId, part_target
from spot_core.manifest import ObjectRef, Part
from spot_core.pytorch.channel import Channel, _hash_store
from spot_core.pytorch.relay import MOST_AT_ONCE, Relay
from spot_core.writer import WriteJob


def part(rank: int) -> Part:
    return Part(rank, None, ObjectRef(f"generations/x-r{rank}", 1, "xxh3_128:0"))


class Client:
    """A writer that ends a job when the test says so."""

    def __init__(self) -> None:
        self.given = threading.Event()
        self.future: Future[Part] = Future()

    def submit(self, job: WriteJob) -> Future[Part]:
        self.given.set()
        return self.future


class World:
    def __init__(self, size: int, at_once: int, wait_s: float = 20.0) -> None:
        store = _hash_store()
        self.clients = [Client() for _ in range(size)]
        self.relays = [
            Relay(client, Channel(store, rank=rank, world_size=size), tiered=False, at_once=at_once, wait_s=wait_s)  # type: ignore[arg-type]
            for rank, client in enumerate(self.clients)
        ]

    def send(self) -> list[Future[Part]]:
        gen = GenerationId(1, 1)
        return [
            relay.send(0, WriteJob(rank, part_target(gen, "a0", rank), 0, {}), drains=True).landed
            for rank, relay in enumerate(self.relays)
        ]

    def begun(self) -> list[bool]:
        return [client.given.is_set() for client in self.clients]


def test_so_many_write_at_a_time_and_all_come_to_it() -> None:
    world = World(5, at_once=2)
    landed = world.send()
    assert world.begun() == [True, True, False, False, False]
    for rank in (1, 0, 3, 2, 4):
        assert world.clients[rank].given.wait(10), f"rank {rank} did not get its turn"
        if rank == 1:
            assert world.clients[3].given.wait(0.05) is False
        world.clients[rank].future.set_result(part(rank))
        assert landed[rank].result(10) == part(rank)


def test_a_rank_that_fails_passes_its_turn_on() -> None:
    world = World(2, at_once=1)
    landed = world.send()
    world.clients[0].future.set_exception(SaveError("no"))
    assert world.clients[1].given.wait(10)
    world.clients[1].future.set_result(part(1))
    assert landed[1].result(10) == part(1)


def test_a_rank_whose_turn_never_comes_says_whom_it_waited_for() -> None:
    landed = World(2, at_once=1, wait_s=0.1).send()
    with pytest.raises(SaveError, match="rank 1 did not get its turn after rank 0"):
        landed[1].result(10)


def test_the_next_snapshot_gives_up_a_write_that_still_waits() -> None:
    world = World(2, at_once=1)
    landed = world.send()
    world.relays[1].clear()
    with pytest.raises(SaveError):
        landed[1].result(10)
    world.clients[0].future.set_result(part(0))
    assert not world.clients[1].given.is_set()


def test_small_worlds_write_all_at_once() -> None:
    world = World(8, at_once=0)
    world.send()
    assert all(world.begun())
    big: Any = World(MOST_AT_ONCE + 1, at_once=0)
    big.send()
    assert big.begun() == [True] * MOST_AT_ONCE + [False]
    for relay in big.relays:
        relay.clear()
