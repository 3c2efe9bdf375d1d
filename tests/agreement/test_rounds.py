"""Rounds of the freeze-and-publish agreement, with ranks as threads over one in-process store."""

import threading
import time

import pytest
import torch.distributed as dist

from spot_core.pytorch.agree import Agreed, FreezeAgreement, Request
from spot_core.pytorch.channel import Channel
from spot_core.pytorch.ranks import Ranks

WORLD = 3


@pytest.fixture
def ranks():
    store = dist.HashStore()
    channels = [Channel(store, rank=rank, world_size=WORLD) for rank in range(WORLD)]
    agreements = [FreezeAgreement(channel, poll_s=0.01, patient_s=1.5) for channel in channels]
    yield agreements
    for agreement in agreements:
        agreement.close()


def until_agreed(agreement, step, steps=10_000, pause=0.0005):
    """Call boundaries from `step` on; the step and what was agreed there."""
    for now in range(step, step + steps):
        agreed = agreement.boundary(now)
        if agreed is not None:
            return agreed
        time.sleep(pause)
    return None


def together(agreements, starts, **kw):
    """Let each rank run in a thread from its own step; what each one got."""
    got = [None] * len(agreements)

    def loop(i):
        got[i] = until_agreed(agreements[i], starts[i], **kw)

    threads = [threading.Thread(target=loop, args=(i,)) for i in range(len(agreements))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
        assert not thread.is_alive()
    return got


def test_nothing_asked_nothing_agreed(ranks):
    assert [ranks[0].boundary(step) for step in range(100)] == [None] * 100


def test_all_ranks_take_one_request_at_one_step_after_the_foremost(ranks):
    for agreement, step in zip(ranks, (5, 17, 11), strict=True):
        agreement.boundary(step)
    ranks[1].request(Request("save", {"why": "test"}))
    got = together(ranks, (6, 18, 12))
    assert {g.step for g in got} == {got[0].step}
    assert got[0].step >= 18
    assert all(g.requests == (Request("save", {"why": "test"}, None, 1),) for g in got)
    assert all(not g.aborted for g in got)


def test_boundary_stands_still_only_until_the_result(ranks):
    """With every loop stopped at a boundary, the result is max + 1 exactly."""
    for agreement, step in zip(ranks, (5, 17, 11), strict=True):
        agreement.boundary(step)
    ranks[2].request(Request("stop", deadline=time.time() + 30))
    deadline = time.time() + 10
    while any(agreement._quiet for agreement in ranks) and time.time() < deadline:
        time.sleep(0.01)  # all have frozen or have the result
    for agreement, step in zip(ranks, (5, 17, 11), strict=True):
        for now in range(step + 1, 18):
            assert agreement.boundary(now) is None
        agreed = agreement.boundary(18)
        assert agreed == Agreed(18, (Request("stop", {}, agreed.requests[0].deadline, 2),))
        assert agreement.boundary(19) is None


def test_two_requests_at_once_and_requests_after_a_round(ranks):
    ranks[0].request(Request("save", {"n": 1}))
    ranks[2].request(Request("stop", {"n": 2}))
    seen = [[], [], []]
    starts = [0, 0, 0]
    while len(seen[0]) < 2:
        got = together(ranks, starts)
        assert len({(g.step, g.requests) for g in map(hashable, got)}) == 1
        for rank, agreed in enumerate(got):
            seen[rank].extend(r.payload["n"] for r in agreed.requests)
        starts = [got[0].step + 1] * WORLD
    assert sorted(seen[0]) == [1, 2]
    assert seen[0] == seen[1] == seen[2]
    ranks[1].request(Request("save", {"n": 3}))
    got = together(ranks, starts)
    assert [r.payload["n"] for r in got[0].requests] == [3]
    assert {g.step for g in got} == {got[0].step}


def hashable(agreed):
    return Agreed(agreed.step, tuple(str(r) for r in agreed.requests))


def test_a_rank_that_left_its_loop_keeps_nobody_waiting(ranks):
    for agreement in ranks:
        agreement.boundary(9)
    ranks[2].close()
    ranks[1].request(Request("save"))
    got = together(ranks[:2], (10, 10), steps=300)
    # It stands at its last boundary, so the others agree among themselves on a step that it never sees.
    assert {g.step for g in got} == {got[0].step}
    assert not got[0].aborted


def test_nothing_is_agreed_once_rank_0_has_left(ranks):
    for agreement in ranks:
        agreement.boundary(9)
    ranks[0].close()
    ranks[1].request(Request("stop", deadline=time.time() + 30))
    assert together(ranks[1:], (10, 10), steps=300) == [None, None]


def test_a_silent_rank_ends_in_an_abort_that_names_it():
    store = dist.HashStore()
    alive = [FreezeAgreement(Channel(store, rank=rank, world_size=3), poll_s=0.01, patient_s=0.5) for rank in (0, 2)]
    try:
        alive[1].request(Request("stop", deadline=time.time() + 5))
        got = together(alive, (0, 0))
        for agreed in got:
            assert "rank 1" in agreed.aborted
            assert agreed.urgent
            assert not agreed.lost
        assert got[1].requests[0].kind == "stop"
    finally:
        for agreement in alive:
            agreement.close()


def test_a_silent_rank_0_ends_in_an_abort_too():
    store = dist.HashStore()
    alive = [FreezeAgreement(Channel(store, rank=r, world_size=3), poll_s=0.01, patient_s=0.2) for r in (1, 2)]
    try:
        alive[1].request(Request("save"))
        got = together(alive, (0, 0))
        assert all("rank 0" in agreed.aborted for agreed in got)
        assert not any(agreed.urgent for agreed in got)
    finally:
        for agreement in alive:
            agreement.close()


def test_one_rank_runs_the_same_code():
    agreement = FreezeAgreement(Channel.open(Ranks(0, 1, None)))
    try:
        assert agreement.boundary(1) is None
        agreement.request(Request("save"))
        agreed = until_agreed(agreement, 2)
        assert agreed.requests == (Request("save", {}, None, 0),)
        assert agreed.step >= 2
    finally:
        agreement.close()
        agreement.close()


def test_sub_steps_order_within_a_step(ranks):
    for agreement in ranks:
        agreement.boundary(4, 0)
    ranks[0].request(Request("stop"))
    got = [None] * WORLD

    def validate(rank):
        for batch in range(1, 5000):
            got[rank] = (batch, ranks[rank].boundary(4, batch))
            if got[rank][1] is not None:
                return
            time.sleep(0.001)

    threads = [threading.Thread(target=validate, args=(rank,)) for rank in range(WORLD)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert len({batch for batch, _ in got}) == 1
    assert [agreed.step for _, agreed in got] == [4, 4, 4]
