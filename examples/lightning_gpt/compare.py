"""Lays a run that was killed beside its control: samples, weights, optimizer, curves, bit for bit."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lives import Job
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

COMPARED = ("batch", "step", "epoch", "ids", "loss")


@dataclass(frozen=True)
class Row:
    """One batch that one rank trained on in one life."""

    life: int
    batch: int
    step: int
    epoch: int
    ids: tuple[int, ...]
    loss: float
    at: float

    @property
    def content(self) -> tuple[Any, ...]:
        return (self.batch, self.step, self.epoch, self.ids, self.loss)


def rows(job: Job, rank: int) -> list[list[Row]]:
    """The evidence of one rank, a list per life that took a step. A line torn by the kill is left out."""
    lives = []
    for number, path in enumerate(sorted(job.evidence.glob(f"rank{rank}-life*.jsonl"))):
        whole = path.read_text(encoding="utf-8").split("\n")[:-1]
        found = [json.loads(line) for line in whole]
        lives.append([Row(life=number, **{**row, "ids": tuple(row["ids"])}) for row in found])
    return lives


def merged(lives: list[list[Row]]) -> list[Row]:
    """What the run amounts to: from its first batch on, a life replaces what earlier ones did."""
    run: list[Row] = []
    for life in lives:
        if life:
            run = [row for row in run if row.batch < life[0].batch] + life
    return run


def differences(control: Job, main: Job) -> list[str]:
    """What differs, in words; empty when the two runs are the same run."""
    found: list[str] = []
    for rank in range(control.ranks):
        expected = merged(rows(control, rank))
        lives = rows(main, rank)
        found += _compare_rows(rank, expected, merged(lives))
        # What was thrown away by a kill and done again must have been the same as well.
        by_batch = {row.batch: row.content for row in expected}
        found += [
            f"rank {rank}: life {row.life} did batch {row.batch} otherwise than the control"
            for life in lives
            for row in life
            if by_batch.get(row.batch) != row.content
        ][:3]
    found += _epochs_are_whole(main)
    found += _compare_states(control.evidence / "final.pt", main.evidence / "final.pt")
    if curves(control.curves) != curves(main.curves):
        found.append("the TensorBoard curves differ")
    return found


def _compare_rows(rank: int, expected: list[Row], got: list[Row]) -> list[str]:
    if len(expected) != len(got):
        return [f"rank {rank}: {len(got)} batches, the control has {len(expected)}"]
    return [
        f"rank {rank}, batch {a.batch}: {name} is {getattr(b, name)}, the control has {getattr(a, name)}"
        for a, b in zip(expected, got, strict=True)
        for name in COMPARED
        if getattr(a, name) != getattr(b, name)
    ][:5]


def _epochs_are_whole(job: Job) -> list[str]:
    """In each epoch, all ranks together see each sample once."""
    found = []
    for epoch in range(job.epochs):
        ids = sorted(
            sample
            for rank in range(job.ranks)
            for row in merged(rows(job, rank))
            if row.epoch == epoch
            for sample in row.ids
        )
        if ids != list(range(job.windows)):
            twice, missed = len(ids) - len(set(ids)), job.windows - len(set(ids))
            found.append(f"epoch {epoch}: {twice} samples were seen twice, {missed} never")
    return found


def _compare_states(expected: Path, got: Path) -> list[str]:
    for path in (expected, got):
        if not path.exists():
            return [f"{path} is not there"]
    a = dict(_leaves(torch.load(expected, weights_only=True)))
    b = dict(_leaves(torch.load(got, weights_only=True)))
    if a.keys() != b.keys():
        return [f"the final states have other names: {sorted(a.keys() ^ b.keys())[:5]}"]
    return [f"the final states differ at {name}" for name in a if not _same(a[name], b[name])][:5]


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    return type(a) is type(b) and a == b


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, f"{name}.{key}")
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            yield from _leaves(inner, f"{name}.{index}")
    else:
        yield name, value


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """TensorBoard's own reading of the curves: a list of (step, value) a tag."""
    if not folder.is_dir():
        return {}
    # It warns of each purge, which is what is asked of it.
    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(item.step, item.value) for item in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
