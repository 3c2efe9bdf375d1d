"""A loader's place: saved after any batch and taken up in a new process, the rest is what it would have been."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    WeightedRandomSampler,
    get_worker_info,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from spot_core.errors import ResumeMismatchError
from spot_core.pytorch._private import iterates_plainly, kept_iterator
from spot_core.pytorch.position import resumable
from spot_core.pytorch.sampling import GlobalSampler
from spot_core.pytorch.streams import CpuRng, mix

COUNT, PASSES = 23, 3


class Noisy(Dataset[Any]):
    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        return index, random.random(), float(np.random.rand()), float(torch.rand(()))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, stride = (info.id, info.num_workers) if info else (0, 1)
        for index in range(first, COUNT, stride):
            yield index, random.random(), float(np.random.rand()), float(torch.rand(()))


class PythonShuffle(Sampler[int]):
    """Draws from python's global generator, lazily: nothing about it can be seen from outside."""

    def __init__(self) -> None:
        pass

    def __len__(self) -> int:
        return COUNT

    def __iter__(self) -> Iterator[int]:
        left = list(range(COUNT))
        while left:
            yield left.pop(random.randrange(len(left)))


class Counting(Sampler[int]):
    """Keeps the number of passes in itself, and has a state."""

    def __init__(self) -> None:
        self.passes = 0

    def __len__(self) -> int:
        return COUNT

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        return iter([(index * self.passes) % COUNT for index in range(COUNT)])

    def state_dict(self) -> dict[str, int]:
        return {"passes": self.passes}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.passes = state["passes"]


class Wrapping(Sampler[list[int]]):
    """Puts itself around a batch sampler, as trainers do that cut the data for ranks."""

    def __init__(self, batch_sampler: Any) -> None:
        self.batch_sampler = batch_sampler

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batch_sampler)


def loader(workers: int = 0, **keyword: Any) -> DataLoader[Any]:
    return DataLoader(Noisy(), **{"batch_size": 4, "num_workers": workers, **keyword})


LOADERS: dict[str, Callable[[int], Any]] = {
    "in order": loader,
    "shuffled": lambda workers: loader(workers, shuffle=True),
    "own generator": lambda workers: loader(workers, shuffle=True, generator=torch.Generator().manual_seed(5)),
    "no batches": lambda workers: loader(workers, batch_size=None, shuffle=True),
    "python's generator": lambda workers: loader(workers, sampler=PythonShuffle()),
    "weighted": lambda workers: loader(workers, sampler=WeightedRandomSampler([1.0] * COUNT, 40)),
    "sampler with a state": lambda workers: loader(workers, sampler=Counting()),
    "kept workers": lambda workers: loader(workers, shuffle=True, persistent_workers=workers > 0),
    "batches by hand": lambda workers: DataLoader(Noisy(), batch_sampler=[[1, 2], [3], [5, 4, 0]], num_workers=workers),
    "iterable": lambda workers: DataLoader(Stream(), batch_size=4, num_workers=workers),
    "list": lambda workers: [torch.tensor([index]) for index in range(7)],
}


def seed(value: int) -> None:
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)


def plain(batch: Any) -> Any:
    return [part.tolist() if isinstance(part, torch.Tensor) else part for part in batch]


def model_draws() -> None:
    """The training draws too, between the batches."""
    random.random()
    np.random.rand()
    torch.rand(3)


def run(view: Any, passes: int, upto: int | None = None) -> tuple[list[Any], Any]:
    seen: list[Any] = []
    for _ in range(passes):
        for batch in view:
            seen.append(plain(batch))
            model_draws()
            if len(seen) == upto:
                return seen, view.state_dict()
    return seen, view.state_dict()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", LOADERS)
def test_the_rest_is_the_same(kind: str, workers: int) -> None:
    if workers and kind == "list":
        pytest.skip("a list has no workers")
    seed(1)
    control, _ = run(resumable(LOADERS[kind](workers), seed=9), PASSES)
    per_pass = len(control) // PASSES
    for upto in (1, per_pass, per_pass + 1, 2 * per_pass - 1):
        seed(1)
        first, place = run(resumable(LOADERS[kind](workers), seed=9), PASSES, upto)
        rng = CpuRng.capture()
        seed(77)
        view = resumable(LOADERS[kind](workers), seed=123)
        view.load_state_dict(place)
        rest = iter(view)
        CpuRng.from_state(rng.to_state()).apply()
        second = []
        for batch in rest:
            second.append(plain(batch))
            model_draws()
        third, _ = run(view, PASSES - 1 - (upto - 1) // per_pass)
        assert first + second + third == control, upto


def test_a_batch_fetched_ahead_is_not_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer holds one batch more than it trained on; its augmentation is drawn again as the first time."""
    seed(1)
    view = resumable(loader(shuffle=True), seed=9)
    view.look_ahead = True
    items = iter(view)
    batches = []
    for _ in range(4):
        batches.append(plain(next(items)))
        model_draws()
    view.behind = 1
    place = view.state_dict()
    assert place["batches"] == 3
    again = resumable(loader(shuffle=True), seed=1)
    again.load_state_dict(place)
    before = CpuRng.capture()
    assert plain(next(iter(again))) == batches[3]
    assert torch.equal(CpuRng.capture().torch, before.torch)


def test_several_batches_fetched_ahead_are_drawn_again_in_a_row() -> None:
    seed(1)
    view = resumable(loader(batch_size=1, shuffle=True), seed=9)
    view.look_ahead = True
    view.remember(7)
    items = iter(view)
    plain(next(items))
    model_draws()
    batches = [plain(next(items)) for _ in range(7)]
    model_draws()
    assert view.fetched == 8
    view.behind = 7
    place = view.state_dict()
    again = resumable(loader(batch_size=1, shuffle=True), seed=1)
    again.load_state_dict(place)
    items = iter(again)
    for batch in batches:
        assert plain(next(items)) == batch


@pytest.mark.parametrize("kind", ["own generator", "sampler with a state", "wrapped"])
def test_the_pass_after_an_ended_one_is_the_one_that_would_have_come(kind: str) -> None:
    """What draws by itself has to be where the ended pass had left it."""

    def make() -> Any:
        if kind != "wrapped":
            return LOADERS[kind](0)
        inner = loader(shuffle=True, generator=torch.Generator().manual_seed(5))
        return DataLoader(Noisy(), batch_sampler=Wrapping(inner.batch_sampler))

    control, place = run(resumable(make(), seed=9), 2)
    _, place = run(resumable(make(), seed=9), 1)
    view = resumable(make(), seed=9)
    view.load_state_dict({**place, "ended": True})
    second, _ = run(view, 1)
    assert [batch[0] for batch in second] == [batch[0] for batch in control[len(control) // 2 :]]


def test_a_stateful_loader_is_taken_up_by_index_when_asked() -> None:
    def make(start: int = 1) -> Any:
        seed(start)
        return resumable(StatefulDataLoader(Noisy(), batch_size=4, shuffle=True, num_workers=2), seed=9, by_index=True)

    control, _ = run(make(), 2)
    first, place = run(make(), 2, 3)
    view = make(2)
    view.load_state_dict(place)
    rest, _ = run(view, 2)
    assert first + rest == control  # the workers' draws too, which its own state does not keep


def test_a_stateful_loader_that_is_read_ahead_tells_the_place_of_the_batch_before() -> None:
    def make() -> Any:
        return resumable(StatefulDataLoader(Noisy(), batch_size=4), seed=9, read_ahead=True)

    view = make()
    items = iter(view)
    ids = [next(items)[0].tolist() for _ in range(3)]
    view.behind = 1
    place = view.state_dict()
    again = make()
    again.load_state_dict(place)
    assert next(iter(again))[0].tolist() == ids[2]


def test_passes_differ_and_ranks_agree_on_the_order() -> None:
    orders = []
    for rank in (0, 1):
        seed(rank)
        orders.append([batch[0] for batch in run(resumable(loader(shuffle=True), seed=9, rank=rank), 2)[0]])
    assert orders[0] == orders[1]
    assert orders[0][:6] != orders[0][6:]


def test_workers_of_different_ranks_draw_differently() -> None:
    noise = [
        [batch[1:] for batch in run(resumable(loader(2), seed=9, rank=rank), 1)[0]] for rank in (0, 1)
    ]
    assert noise[0] != noise[1]


def test_order_depends_on_nothing_but_the_seed() -> None:
    orders = []
    for start, other in ((1, 9), (2, 9), (1, 10)):
        seed(start)
        orders.append([batch[0] for batch in run(resumable(loader(shuffle=True), seed=other), 1)[0]])
    assert orders[0] == orders[1] != orders[2]


def test_a_finished_pass_is_followed_by_the_next() -> None:
    control, _ = run(resumable(loader(shuffle=True), seed=9), 2)
    _, place = run(resumable(loader(shuffle=True), seed=9), 1)
    view = resumable(loader(shuffle=True), seed=1)
    view.load_state_dict({**place, "ended": True})
    assert [batch[0] for batch in run(view, 1)[0]] == [batch[0] for batch in control[6:]]


def test_nothing_is_read_to_be_thrown_away() -> None:
    """Going back to a place skips indices; the data set is asked only for what comes after it."""
    asked: list[int] = []

    class Watched(Noisy):
        def __getitem__(self, index: int) -> Any:
            asked.append(index)
            return super().__getitem__(index)

    view = resumable(DataLoader(Watched(), batch_size=4), seed=9)
    _, place = run(view, 1, 3)
    asked.clear()
    again = resumable(DataLoader(Watched(), batch_size=4), seed=9)
    again.load_state_dict(place)
    run(again, 1)
    assert asked == list(range(12, COUNT))


def test_a_view_looks_like_its_loader() -> None:
    user = loader(shuffle=True)
    view = resumable(user, seed=9)
    assert isinstance(view, DataLoader)
    assert (len(view), view.dataset, view.batch_size, view.sampler) == (6, user.dataset, 4, user.sampler)
    view.worker_init_fn = print
    assert user.worker_init_fn is print
    with pytest.raises(AttributeError, match="no_such"):
        _ = view.no_such


def test_the_place_counts_samples() -> None:
    view = resumable(loader(), seed=9, world_size=2)
    _, place = run(view, 1)
    assert (place["pass"], place["batches"], place["samples"], place["offset"]) == (0, 6, COUNT, 2 * COUNT)


class Own:
    """A loader with a state of its own, with or without a length."""

    def __init__(self, length: int | None) -> None:
        self.at = 0
        if length is not None:
            self.__class__ = type("Sized", (Own,), {"__len__": lambda self: length})

    def __iter__(self) -> Iterator[Any]:
        while self.at < 7:
            self.at += 1
            yield torch.tensor([self.at])

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


KINDS: dict[str, Callable[[], Any]] = {
    "IndexedView": lambda: loader(shuffle=True),
    "ReplayView": lambda: DataLoader(Stream(), batch_size=4),
    "DirectView": lambda: Own(7),
    "StatefulView": lambda: Own(None),
}


@pytest.mark.parametrize("now", KINDS)
@pytest.mark.parametrize("saved", KINDS)
def test_a_place_inside_a_pass_of_another_kind_is_refused(saved: str, now: str) -> None:
    """Starting the data over would show samples of the epoch twice."""
    _, place = run(resumable(KINDS[saved](), seed=9), 1, 2)
    assert place["kind"] == saved
    view = resumable(KINDS[now](), seed=9)
    if saved == now:
        view.load_state_dict(place)
        return
    with pytest.raises(ResumeMismatchError, match=r"cannot be put at that place.*run was started with"):
        view.load_state_dict(place)
    view.load_state_dict({**place, "ended": True})  # between passes nothing is seen twice
    assert len(run(view, 1)[0]) == len(run(resumable(KINDS[now](), seed=9), 1)[0])


@pytest.mark.parametrize("length", [7, None])
def test_a_loaders_own_state_is_taken_as_it_is(length: int | None) -> None:
    """Of a checkpoint made before there was a view."""
    view = resumable(Own(length), seed=9)
    view.load_state_dict({"at": 5})
    assert [batch.tolist() for batch in view] == [[6], [7]]


def test_another_kind_goes_on_with_the_next_pass() -> None:
    control, _ = run(resumable(loader(shuffle=True), seed=9), 2)
    _, place = run(resumable(DataLoader(Stream(), batch_size=4), seed=9), 1)
    view = resumable(loader(shuffle=True), seed=1)
    view.load_state_dict({**place, "ended": True})
    assert [batch[0] for batch in run(view, 1)[0]] == [batch[0] for batch in control[6:]]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 1), (1, 4), (4, 2)])
def test_a_global_offset_holds_at_any_number_of_ranks(before: int, after: int, shuffle: bool) -> None:
    """Each sample of the epoch is seen once, however many ranks there were before and after the interruption."""

    def ranks(count: int) -> list[GlobalSampler]:
        return [GlobalSampler(range(24), num_replicas=count, rank=r, shuffle=shuffle, seed=3) for r in range(count)]

    first = [list(sampler)[: 8 // before] for sampler in ranks(before)]
    second = []
    for sampler in ranks(after):
        sampler.seek(8)
        second.append(list(sampler))
    seen = [index for part in (*first, *second) for index in part]
    assert sorted(seen) == list(range(24))
    (whole,) = (list(sampler) for sampler in ranks(1))
    assert sorted(index for part in first for index in part) == sorted(whole[:8])


def test_epochs_of_the_global_order_differ() -> None:
    sampler = GlobalSampler(range(24), seed=3)
    orders = []
    for epoch in (0, 1, 0):
        sampler.set_epoch(epoch)
        orders.append(list(sampler))
    assert orders[0] == orders[2] != orders[1]
    with pytest.raises(ValueError, match="negative"):
        sampler.seek(-1)


def test_mixed_seeds_are_fixed() -> None:
    """They are part of the format: a new release must continue the order of an old one."""
    assert [mix(0), mix(1, 2), mix(9, 0, 1)] == [
        919140953729665066,
        7365565284316262044,
        6048452876940062980,
    ]


class Twice(DataLoader[Any]):
    """Iterates in a way of its own, which a loader rebuilt from its parts would not."""

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield batch
            yield batch


def test_a_loader_that_iterates_in_its_own_way_is_read_again() -> None:
    seed(1)
    control, _ = run(resumable(Twice(Noisy(), batch_size=4), seed=9), 1)
    assert len(control) == 12
    _, place = run(resumable(Twice(Noisy(), batch_size=4), seed=9), 1, 5)
    view = resumable(Twice(Noisy(), batch_size=4), seed=9)
    view.load_state_dict(place)
    rest, _ = run(view, 1)
    assert [batch[0] for batch in rest] == [batch[0] for batch in control[5:]]


def test_private_names_of_the_loader_exist() -> None:
    kept = loader(2, persistent_workers=True)
    assert iterates_plainly(kept)
    assert not iterates_plainly(Twice(Noisy()))
    assert kept_iterator(kept) is None
    view = resumable(kept, seed=9)
    next(iter(view))
    assert type(view._iterator).__name__ == "_MultiProcessingDataLoaderIter"
    view._iterator = None
    assert view._iterator is None


def test_reading_forward_tells_what_it_costs(caplog: pytest.LogCaptureFixture) -> None:
    _, place = run(resumable(DataLoader(Stream(), batch_size=4), seed=9), 1, 3)
    assert place["read_s"] > 0
    view = resumable(DataLoader(Stream(), batch_size=4), seed=9)
    view.load_state_dict({**place, "read_s": 77.4})
    run(view, 1)
    assert "3 batches are read again" in caplog.text
    assert "took 77 s the first time" in caplog.text


def test_data_that_end_before_the_place_are_other_data() -> None:
    _, place = run(resumable([[1], [2], [3]], seed=9), 1, 2)
    view = resumable([[1]], seed=9)
    view.load_state_dict(place)
    with pytest.raises(ResumeMismatchError, match="ended after 1 batches, and the place was behind 2"):
        iter(view)
