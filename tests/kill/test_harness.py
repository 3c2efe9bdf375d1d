"""The proof can fail: each kind of difference is told, and the plan of kills is what it says."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from aim import Kind, Tail, open_generations, plan
from compare import differences, merged, rows
from lives import Job
from torch.utils.tensorboard import SummaryWriter

WINDOWS, BATCH, EPOCHS = 8, 2, 2


def write_rows(job: Job, life: int, batches: range, *, torn: bool = False) -> None:
    job.evidence.mkdir(parents=True, exist_ok=True)
    lines = []
    for batch in batches:
        per_epoch = WINDOWS // BATCH
        first = batch % per_epoch * BATCH
        row = {
            "batch": batch, "step": batch + 1, "epoch": batch // per_epoch, "ids": [first, first + 1],
            "loss": 1 / (batch + 1), "at": float(batch),
        }  # fmt: skip
        lines.append(json.dumps(row) + "\n")
    text = "".join(lines) + ('{"batch": 99' if torn else "")
    (job.evidence / f"rank0-life{life:03d}.jsonl").write_text(text)


def write_curve(job: Job, steps: range, purge: int | None = None) -> None:
    with SummaryWriter(str(job.curves), purge_step=purge, filename_suffix=f".{purge}") as writer:
        for step in steps:
            writer.add_scalar("train/loss", 1 / step, step)


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Job, Job]:
    """A control, and a run of two lives that repeated three batches."""
    control = Job(tmp_path / "control", windows=WINDOWS, epochs=EPOCHS)
    main = Job(tmp_path / "main", windows=WINDOWS, epochs=EPOCHS)
    write_rows(control, 0, range(8))
    write_rows(main, 0, range(6), torn=True)
    write_rows(main, 1, range(3, 8))
    write_curve(control, range(1, 9))
    write_curve(main, range(1, 7))
    write_curve(main, range(4, 9), purge=4)
    for job in (control, main):
        torch.save({"model": {"w": torch.ones(3)}, "optimizer": [1, 2.0]}, job.evidence / "final.pt")
    return control, main


def test_equal_runs_have_no_difference(pair: tuple[Job, Job]) -> None:
    assert differences(*pair) == []
    assert [row.batch for row in merged(rows(pair[1], 0))] == list(range(8))


def edit_last_row(job: Job, **change: object) -> None:
    path = job.evidence / "rank0-life001.jsonl"
    lines = path.read_text().splitlines()
    lines[-1] = json.dumps({**json.loads(lines[-1]), **change})
    path.write_text("".join(f"{line}\n" for line in lines))


def edit_replaced_row(job: Job) -> None:
    path = job.evidence / "rank0-life000.jsonl"
    path.write_text(path.read_text().replace("0.2,", "0.25,"))


def save_final(job: Job, **change: object) -> None:
    final = {"model": {"w": torch.ones(3)}, "optimizer": [1, 2.0]}
    torch.save({**final, **change}, job.evidence / "final.pt")


def add_to_curve(job: Job) -> None:
    write_curve(job, range(9, 10))


FAULTS: list[tuple[Callable[[Job], object], str]] = [
    (lambda job: edit_last_row(job, loss=0.1250001), "batch 7: loss"),
    (lambda job: edit_last_row(job, ids=[6, 5]), "1 samples were seen twice, 1 never"),
    (lambda job: edit_last_row(job, step=9), "batch 7: step"),
    (edit_replaced_row, "life 0 did batch 4 otherwise"),
    (lambda job: write_rows(job, 1, range(3, 7)), "7 batches, the control has 8"),
    (lambda job: write_rows(job, 1, range(7, 8)), "7 batches, the control has 8"),
    (lambda job: save_final(job, model={"w": torch.tensor([1, 1, 1 + 2**-23])}), "differ at .model.w"),
    (lambda job: save_final(job, model={"w": torch.ones(3, dtype=torch.float64)}), "differ at .model.w"),
    (lambda job: save_final(job, optimizer=[1, 2]), "differ at .optimizer.1"),
    (lambda job: save_final(job, more=1), "other names: ['.more']"),
    (lambda job: (job.evidence / "final.pt").unlink(), "final.pt is not there"),
    (add_to_curve, "the TensorBoard curves differ"),
    (lambda job: shutil.rmtree(job.curves), "the TensorBoard curves differ"),
]


@pytest.mark.parametrize("number", range(len(FAULTS)))
def test_each_difference_is_told(pair: tuple[Job, Job], number: int) -> None:
    damage, told = FAULTS[number]
    damage(pair[1])
    assert told in "\n".join(differences(*pair))


def test_plan_is_seeded_ordered_and_mixed() -> None:
    shots = plan(20, 200, seed=5)
    assert shots == plan(20, 200, seed=5)
    assert shots != plan(20, 200, seed=6)
    assert [shot.batch for shot in shots] == sorted(shot.batch for shot in shots)
    assert all(1 <= shot.batch <= 180 for shot in shots)
    kinds = [shot.kind for shot in shots]
    assert (kinds.count(Kind.SAVE), kinds.count(Kind.START)) == (7, 3)
    assert Kind.SAVE in [shot.kind for shot in plan(3, 200, seed=1)]


def test_tail_follows_the_new_life_only(tmp_path: Path) -> None:
    job = Job(tmp_path)
    write_rows(job, 0, range(5))
    tail = Tail(job.evidence)
    assert tail.update() == -1
    write_rows(job, 1, range(2, 4), torn=True)
    assert tail.update() == 3


def test_open_generations_are_those_without_a_marker(tmp_path: Path) -> None:
    assert open_generations(tmp_path) == set()
    for name in ("000001-000000000010", "000001-000000000020"):
        (tmp_path / "generations" / name).mkdir(parents=True)
    (tmp_path / "generations" / "000001-000000000010" / "COMMIT.json").touch()
    assert open_generations(tmp_path) == {"000001-000000000020"}
