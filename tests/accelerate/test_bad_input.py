"""What cannot work is refused before anything is trained, with the reason and the way out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import DistributedType, ProjectConfiguration
from torch.utils.data import DataLoader

from accelerate_spot import Accelerator as Attached
from accelerate_spot import activation, attach, refusals
from accelerate_spot.resizing import GlobalBatch
from spot_core.errors import ConfigError, TopologyError

from ._fresh import fresh  # noqa: F401 - of every test here


class Many:
    """An accelerator that says it is one of several processes."""

    def __init__(self, accelerator: Any, processes: int) -> None:
        self.__dict__.update(accelerator=accelerator, num_processes=processes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.accelerator, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.accelerator, name, value)


class Saying:
    """An accelerator that says of itself what no CPU can be."""

    def __init__(self, accelerator: Any, **said: Any) -> None:
        self.__dict__.update(accelerator=accelerator, **said)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.accelerator, name)


@pytest.mark.parametrize(
    ("said", "says"),
    [
        ({"distributed_type": DistributedType.FSDP}, "version 1 of FSDP"),
        ({"distributed_type": DistributedType.DEEPSPEED}, "does not support DistributedType.DEEPSPEED"),
        ({"parallelism_config": ParallelismConfig(tp_size=2)}, "tensor, context or sequence parallelism"),
    ],
)
def test_a_model_that_is_driven_otherwise(tmp_path: Path, said: dict[str, Any], says: str) -> None:
    accelerator = Accelerator(cpu=True)
    refusals.check_accelerator(Saying(accelerator, distributed_type=DistributedType.FSDP, is_fsdp2=True), str(tmp_path))
    with pytest.raises(ConfigError, match=says):
        refusals.check_accelerator(Saying(accelerator, **said), str(tmp_path))


def test_a_second_accelerator(tmp_path: Path) -> None:
    first = attach(Accelerator(cpu=True), tmp_path)
    assert attach(first, tmp_path) is first
    with pytest.raises(ConfigError, match="second Accelerator"):
        Attached(cpu=True, spot={"run": tmp_path})
    with activation.left_alone():
        Accelerator(cpu=True)


def test_total_limit(tmp_path: Path) -> None:
    config = ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True, total_limit=2)
    with pytest.raises(ConfigError, match="total_limit"):
        attach(Accelerator(cpu=True, project_config=config), tmp_path)


def test_uneven_batches(tmp_path: Path) -> None:
    config = DataLoaderConfiguration(even_batches=False)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    attach(accelerator, tmp_path)  # a single process has nobody to be uneven with
    with pytest.raises(ConfigError, match="even_batches"):
        refusals.check_accelerator(Many(accelerator, 2), str(tmp_path))


def test_processes_that_do_not_know_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Accelerator(cpu=True)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="ACCELERATE_USE_CPU"):
        attach(accelerator, tmp_path)


def test_nothing_attached() -> None:
    import accelerate_spot

    with pytest.raises(ConfigError, match="accelerate-spot launch"):
        next(iter(accelerate_spot.epochs(3)))


def test_no_model(tmp_path: Path) -> None:
    accelerator = attach(Accelerator(cpu=True), tmp_path)
    parameter = torch.nn.Parameter(torch.zeros(1))
    _, loader = accelerator.prepare(torch.optim.SGD([parameter], 0.1), DataLoader([1, 2]))
    with pytest.raises(ConfigError, match="no model was prepared"):
        next(iter(loader))


@pytest.mark.parametrize(
    ("saved_by", "accumulation", "world", "accumulates", "says"),
    [
        (2, 1, 3, True, "2 batches make an update, which 3 processes cannot share out"),
        (2, 3, 4, True, "6 batches make an update, which 4 processes cannot share out"),
        (2, 1, 1, False, "does not train inside `with accelerator.accumulate"),
    ],
)
def test_accumulation_that_cannot_keep_the_global_batch(
    saved_by: int, accumulation: int, world: int, accumulates: bool, says: str
) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    saved = GlobalBatch(saved_by, accumulation, accumulation)
    with pytest.raises(TopologyError, match=says):
        saved.taken_up(
            Many(accelerator, world), saved_by=saved_by, on_resize="keep_global_batch", accumulates=accumulates
        )
    with pytest.raises(TopologyError, match="on_resize is 'refuse'"):
        saved.taken_up(Many(accelerator, world), saved_by=saved_by, on_resize="refuse", accumulates=True)
    accepted = saved.taken_up(Many(accelerator, world), saved_by=saved_by, on_resize="accept", accumulates=accumulates)
    assert accepted == GlobalBatch(world, accumulation, accumulation)
    assert accelerator.gradient_accumulation_steps == accumulation


@pytest.mark.parametrize(
    ("saved_by", "accumulation", "world", "wanted"), [(2, 1, 1, 2), (2, 3, 3, 2), (4, 1, 2, 2), (1, 4, 2, 2)]
)
def test_the_global_batch_is_kept(saved_by: int, accumulation: int, world: int, wanted: int) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    saved = GlobalBatch(saved_by, accumulation, accumulation)
    kept = saved.taken_up(
        Many(accelerator, world), saved_by=saved_by, on_resize="keep_global_batch", accumulates=True
    )
    assert kept == saved
    assert accelerator.gradient_accumulation_steps == wanted
