"""Orders as values, and the global batches of some ranks dealt to others: the same samples and gradient per step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from spot_core.errors import ResumeMismatchError, TopologyError
from spot_core.pytorch.deal import Deal, origin_of
from spot_core.pytorch.order import Order
from spot_core.pytorch.position import deal_of, resumable
from spot_core.pytorch.sampling import GlobalSampler
from spot_core.pytorch.streams import StreamIterator

N, BATCH = 53, 3
DATA = list(range(N))


def loader(sampler: Any, batch: int = BATCH, **keyword: Any) -> DataLoader[Any]:
    return DataLoader(DATA, batch_size=batch, sampler=sampler, **keyword)


def distributed(rank: int, world: int, *, shuffle: bool = True, seed: int = 5) -> Any:
    return DistributedSampler(DATA, world, rank, shuffle=shuffle, seed=seed)


def global_order(rank: int, world: int, *, shuffle: bool = True, seed: int = 5) -> Any:
    return GlobalSampler(DATA, num_replicas=world, rank=rank, shuffle=shuffle, seed=seed)


def as_lightning_does(rank: int, world: int, *, shuffle: bool = True, seed: int = 5) -> Any:
    """One rank keeps the loader's own sampler; more get a DistributedSampler."""
    if world > 1:
        return distributed(rank, world, shuffle=shuffle, seed=seed)
    return RandomSampler(DATA) if shuffle else SequentialSampler(DATA)


# -- orders -----------------------------------------------------------------------------------------------------------


def test_an_order_is_that_of_torchs_sampler() -> None:
    torch.manual_seed(77)
    random = Order.of(loader(RandomSampler(DATA)), seed=3)
    assert random is not None
    drawn = list(StreamIterator(BatchSampler(RandomSampler(DATA), 1, False), 3, torch_only=True))
    assert random.indices().tolist() == [index for (index,) in drawn]
    generator = torch.Generator().manual_seed(8)
    own = Order.of(loader(RandomSampler(DATA, generator=generator)), seed=3)
    assert own is not None
    assert own.indices().tolist() == list(RandomSampler(DATA, generator=generator))
    for make in (distributed, global_order):
        for epoch in (0, 1):
            sampler = make(0, 1)
            sampler.set_epoch(epoch)
            order = Order.of(loader(sampler), seed=3)
            assert order is not None
            assert order.indices().tolist() == list(sampler)
            assert Order.from_state(order.to_state()).next().epoch == epoch + 1
    assert Order.of(loader(SequentialSampler(DATA)), seed=3).indices().tolist() == DATA  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "sampler",
    [
        WeightedRandomSampler([1.0] * N, N),
        SubsetRandomSampler(DATA),
        RandomSampler(DATA, replacement=True),
        RandomSampler(DATA, num_samples=7),
    ],
)
def test_an_order_that_cannot_be_told_is_not_guessed(sampler: Any) -> None:
    assert Order.of(loader(sampler), seed=3) is None
    assert Order.of(DataLoader(DATA, batch_sampler=[[1], [2]]), seed=3) is None


# -- dealing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("count", [N, 48, 4, 2])
@pytest.mark.parametrize("drop_last", [False, True])
def test_blocks_are_dealt_whole_and_weighted_by_samples(world: int, count: int, drop_last: bool) -> None:
    deal = Deal(4, BATCH)
    end = deal.end(count, 0, truncate=False, drop_last=drop_last)
    hands = [list(deal.hands(0, end, rank=rank, world=world, batch=BATCH)) for rank in range(world)]
    assert {len(mine) for mine in hands} == {deal.blocks(0, end) * deal.splits(world, BATCH)}
    seen: dict[int, float] = {}
    for mine in hands:
        for hand in mine:
            assert len(hand.places) <= BATCH
            for place in hand.places:
                # What the trainer's means make of it: over the ranks and over the micro-batches of a block.
                share = hand.weight / len(hand.places) / world / deal.splits(world, BATCH)
                seen[place] = seen.get(place, 0.0) + share
    assert sorted(seen) == list(range(end))
    for place, share in seen.items():
        block = place // deal.block * deal.block
        assert share == pytest.approx(1 / (min(block + deal.block, end) - block))


def test_as_many_ranks_as_before_get_what_they_had() -> None:
    deal = Deal(2, BATCH)
    for rank in (0, 1):
        order = list(distributed(0, 1, shuffle=False))
        order += order[: -N % 2]
        hands = deal.hands(0, deal.end(N, 0, truncate=False, drop_last=False), rank=rank, world=2, batch=BATCH)
        got = [[order[place] for place in hand.places] for hand in hands]
        assert got == list(BatchSampler(distributed(rank, 2, shuffle=False), BATCH, drop_last=False))


# -- views ------------------------------------------------------------------------------------------------------------


def world_of(make: Any, world: int, places: Any = None, *, keep: bool = False, **keyword: Any) -> list[Any]:
    """The views of `world` ranks, at the places saved."""
    views = []
    for rank in range(world):
        place = None if places is None else places[min(rank, len(places) - 1)]
        deal = None
        if place is not None:
            on_resize = "keep_global_batch" if keep else "accept"
            deal = deal_of(place, on_resize=on_resize, saved=len(places), world=world)
        view = resumable(loader(make(rank, world), **keyword), seed=9, rank=rank, world_size=world, deal=deal)
        if place is not None:
            view.load_state_dict(place)
        views.append(view)
    return views


def read(views: list[Any], blocks: int | None, epoch: int) -> tuple[list[tuple[list[int], float]], list[Any]]:
    """Blocks of the pass as (samples, sum of weighted shares), and the places after the last of them."""
    for view in views:
        if hasattr(view.sampler, "set_epoch"):
            view.sampler.set_epoch(epoch)
    items, splits, seen = [iter(view) for view in views], views[0].splits, []
    while blocks is None or len(seen) < blocks:
        samples: list[int] = []
        total = 0.0
        for _ in range(splits):
            batches = [next(item, None) for item in items]
            if batches[0] is None:
                assert batches == [None] * len(views)
                return seen, [view.state_dict() for view in views]
            for view, batch in zip(views, batches, strict=True):
                samples += batch.tolist() if view.weight else []
                total += view.weight / len(views) / splits
        seen.append((sorted(samples), total))
    return seen, [view.state_dict() for view in views]


WORLDS = [4, 2, 3, 1, 4]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("make", [as_lightning_does, distributed, global_order])
@pytest.mark.parametrize("shuffle", [False, True])
def test_the_global_batches_stay_the_same_through_any_worlds(make: Any, shuffle: bool, workers: int) -> None:
    """4 -> 2 -> 3 -> 1 -> 4 ranks in the middle of two epochs: every step has the samples of the uninterrupted run."""

    def sampler(rank: int, world: int) -> Any:
        # Each start has a seed of its own; the run's is the first one's.
        return make(rank, world, shuffle=shuffle, seed=5 if world == 4 else world)

    control = []
    views = world_of(sampler, 4)
    for epoch in range(3):
        control += read(views, None, epoch)[0]
    per_pass = len(control) // 3
    assert per_pass == 5
    places, got, epoch = None, [], 0
    for world, blocks in zip(WORLDS, [2, 1, 3, 2, None], strict=True):
        views = world_of(sampler, world, places, keep=True, num_workers=workers)
        while blocks is None or blocks > 0:
            left = per_pass - len(got) % per_pass
            now = left if blocks is None else min(left, blocks)
            # To the very end of the pass, where it ends: then the next one follows in this life.
            seen, places = read(views, None if now == left else now, epoch)
            got += seen
            blocks = None if blocks is None else blocks - now
            epoch += len(got) % per_pass == 0
            if epoch == 3:
                break
    assert [samples for samples, _ in got] == [samples for samples, _ in control]
    assert [total for _, total in got] == pytest.approx([1.0] * len(got))


@pytest.mark.parametrize("make", [as_lightning_does, distributed, global_order])
def test_an_accepted_change_has_its_own_batches_and_every_sample_once(make: Any) -> None:
    places, got = None, []
    for world in (4, 2, 3, 1):
        views = world_of(make, world, places)
        left = views[0].batches_left
        seen, places = read(views, 1, 0)
        assert left is None  # nothing was opened yet
        assert len(seen[0][0]) == world * BATCH
        got += seen[0][0]
    views = world_of(make, 4, places)
    rest, _ = read(views, None, 0)
    got += [index for samples, _ in rest for index in samples]
    assert sorted(set(got)) == DATA
    assert len(got) - N == -(N - 10 * BATCH) % 4  # the padding of the last world


def test_another_batch_size_goes_on_at_the_offset() -> None:
    views = world_of(distributed, 2)
    seen, places = read(views, 2, 0)
    views = world_of(distributed, 2, places, batch=5)
    rest, _ = read(views, None, 0)
    got = [index for samples, _ in seen + rest for index in samples]
    assert sorted(set(got)) == DATA
    assert len(rest[0][0]) == 10
    assert [view.batches_left for view in views] == [0, 0]


def test_an_order_that_is_not_known_holds_for_its_own_number_of_ranks_only() -> None:
    weighted = lambda rank, world: WeightedRandomSampler([1.0] * N, N)  # noqa: E731
    _, places = read(world_of(weighted, 1), 2, 0)
    assert read(world_of(weighted, 1, places), None, 0)
    with pytest.raises(TopologyError, match="WeightedRandomSampler does not say what that order is"):
        read(world_of(weighted, 2, places), None, 0)
    _, places = read(world_of(distributed, 2), 2, 0)
    with pytest.raises(ResumeMismatchError, match=r"shuffled.*in order now"):
        read(world_of(lambda r, w: distributed(r, w, shuffle=False), 3, places), None, 0)


def test_a_loader_without_an_index_is_not_taken_over_by_other_ranks() -> None:
    view = resumable([[1], [2], [3]], seed=9, rank=0, world_size=2)
    next(iter(view))
    place = view.state_dict()
    with pytest.raises(TopologyError, match="2 ranks"):
        resumable([[1], [2], [3]], seed=9, rank=0, world_size=1).load_state_dict(place)
    again = resumable([[1], [2], [3]], seed=9, rank=0, world_size=1)
    again.load_state_dict({**place, "ended": True})
    assert list(again) == [[1], [2], [3]]


def test_the_user_chooses_what_a_change_does(caplog: pytest.LogCaptureFixture) -> None:
    assert origin_of("refuse", saved=2, world=2, origin=4) == 4
    with pytest.raises(TopologyError, match=r"saved by 4 ranks and is resumed by 2.*SPOT_ON_RESIZE"):
        origin_of("refuse", saved=4, world=2, origin=4)
    assert caplog.text == ""
    assert origin_of("accept", saved=4, world=2, origin=4) == 2
    assert origin_of("keep_global_batch", saved=2, world=3, origin=4) == 4
    assert "saved by 2 ranks, resumed by 3: the global batch is that of 4 ranks" in caplog.text
