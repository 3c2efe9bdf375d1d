"""Streams of other libraries: taken up in any pass they give what an uninterrupted training would have been given."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from spot_core.pytorch.hf_streams import states_are_not_whole
from spot_core.pytorch.position import ResumableView, resumable

datasets = pytest.importorskip("datasets")
SAMPLES, BATCH = 32, 4


def ids(rows: list[dict[str, Any]]) -> list[int]:
    return [int(row["i"]) for row in rows]


def stream(*, buffer: bool = False, shuffled: bool = True) -> Any:
    data = datasets.Dataset.from_dict({"i": list(range(SAMPLES))}).to_iterable_dataset(num_shards=4)
    data = data.map(lambda row: row)
    if buffer:
        data = data.shuffle(seed=3, buffer_size=8)
    elif shuffled:
        data = data.shuffle(seed=3, buffer_size=1)
    return data.with_format("torch")


def assert_taken_up_anywhere(make: Callable[[], Any]) -> None:
    """In the first pass, at its end, and in the second of three: the third shows what the resume left behind."""

    def fresh() -> ResumableView:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        return resumable(make(), seed=5, read_ahead=False)

    def read(view: ResumableView, count: int) -> list[Any]:
        got: list[Any] = []
        while len(got) < count:
            for batch in view:
                got.append(torch.as_tensor(batch["i"] if isinstance(batch, dict) else batch).tolist())
                if len(got) == count:
                    break
        return got

    whole = 3 * SAMPLES // BATCH
    control = read(fresh(), whole)
    assert sorted(i for batch in control[: SAMPLES // BATCH] for i in batch) == list(range(SAMPLES))
    for stop in (3, 8, 11):
        first = fresh()
        head = read(first, stop)
        second = fresh()
        second.load_state_dict(first.state_dict())
        assert head + read(second, whole - stop) == control


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("loader", [DataLoader, StatefulDataLoader])
@pytest.mark.parametrize("buffer", [False, True])
def test_a_hugging_face_stream(buffer: bool, loader: Any, workers: int) -> None:
    assert_taken_up_anywhere(lambda: loader(stream(buffer=buffer), BATCH, num_workers=workers, collate_fn=ids))


@pytest.mark.slow
def test_a_hugging_face_stream_with_kept_workers() -> None:
    def make() -> Any:
        return StatefulDataLoader(
            stream(shuffled=False), BATCH, num_workers=2, collate_fn=ids, persistent_workers=True
        )

    assert_taken_up_anywhere(make)


def test_what_its_state_leaves_out_is_read_again_and_the_log_says_why(caplog: pytest.LogCaptureFixture) -> None:
    first = resumable(StatefulDataLoader(stream(buffer=True), BATCH, collate_fn=ids), seed=5)
    next(iter(first))
    second = resumable(StatefulDataLoader(stream(buffer=True), BATCH, collate_fn=ids), seed=5)
    second.load_state_dict(first.state_dict())
    with caplog.at_level(logging.WARNING):
        next(iter(second))
    assert "1 batches are read again" in caplog.text
    assert "leaves out what is in a shuffle buffer" in caplog.text


@pytest.mark.parametrize(
    ("data", "options", "expected"),
    [
        (lambda: stream(buffer=True), {}, True),
        (lambda: stream(shuffled=False), {}, False),
        (lambda: stream(shuffled=False), {"num_workers": 2, "persistent_workers": True}, True),
        (lambda: datasets.interleave_datasets([stream(shuffled=False), stream(buffer=True)]), {}, True),
        (lambda: list(range(4)), {}, False),
    ],
    ids=["buffer", "none", "kept workers", "a buffer deep inside", "no stream"],
)
def test_which_states_are_not_whole(data: Callable[[], Any], options: dict[str, Any], expected: bool) -> None:
    assert states_are_not_whole(StatefulDataLoader(data(), **options)) is expected


# litdata and mosaicml-streaming are not among the test dependencies: the one brings a whole SDK, the other wants a
# torchvision of exactly this torch. Where they are installed these run.
def _same(index: int) -> int:
    return index


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_litdata_stream(workers: int, tmp_path: Path) -> None:
    litdata = pytest.importorskip("litdata")
    where = str(tmp_path / "data")
    litdata.optimize(fn=_same, inputs=list(range(SAMPLES)), output_dir=where, chunk_bytes="64B", num_workers=1)

    def make() -> Any:
        data = litdata.StreamingDataset(where, shuffle=True, seed=3)
        return litdata.StreamingDataLoader(data, batch_size=BATCH, num_workers=workers)

    assert_taken_up_anywhere(make)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_a_mosaicml_stream(workers: int, tmp_path: Path) -> None:
    streaming = pytest.importorskip("streaming")
    where = str(tmp_path / "data")
    with streaming.MDSWriter(out=where, columns={"i": "int"}) as out:
        for index in range(SAMPLES):
            out.write({"i": index})

    def make() -> Any:
        streaming.base.util.clean_stale_shared_memory()
        data = streaming.StreamingDataset(local=where, shuffle=True, shuffle_seed=3, batch_size=BATCH)
        return streaming.StreamingDataLoader(data, batch_size=BATCH, num_workers=workers)

    assert_taken_up_anywhere(make)
