"""The private names of accelerate that the adapter reads: this fails when one vanishes or means another thing."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from accelerate_spot import _compat
from accelerate_spot.launch import _compat as launcher
from accelerate_spot.resizing import SkipOnce
from spot_core.errors import ConfigError

from ._fresh import fresh  # noqa: F401 - of every test here


class Thing:
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def test_what_was_prepared() -> None:
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=2)
    thing = Thing()
    accelerator.register_for_checkpointing(thing)
    prepared = accelerator.prepare(model, optimizer, DataLoader([1, 2], shuffle=True), scheduler)
    assert _compat.models(accelerator) == [model]
    assert _compat.optimizers(accelerator) == [prepared[1]]
    assert _compat.wrapped(prepared[1]) is optimizer
    assert isinstance(prepared[1], _compat.optimizer_class())
    assert _compat.loaders(accelerator) == [prepared[2]]
    assert _compat.schedulers(accelerator) == [prepared[3]]
    assert _compat.wrapped(prepared[3]) is scheduler
    assert _compat.registered(accelerator) == [thing]
    assert _compat.supported_kind(accelerator)
    assert (prepared[3].split_batches, prepared[3].step_with_optimizer) == (False, True)
    assert not _compat.schedule_is_over(prepared[3])
    for _ in range(2):
        optimizer.step()
        scheduler.step()
    assert _compat.schedule_is_over(prepared[3])


@pytest.mark.parametrize("dispatch", [False, True])
def test_a_loader_reads_a_step_ahead_through_its_base(dispatch: bool) -> None:
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch))
    loader = accelerator.prepare(DataLoader(torch.arange(3), batch_size=1))
    assert isinstance(loader, _compat.loader_classes())
    assert _compat.dispatches(loader) is dispatch
    fetched: list[int] = []

    class Base:
        def __init__(self, base: Any) -> None:
            self.base = base

        def __getattr__(self, name: str) -> Any:
            return getattr(self.base, name)

        def __iter__(self) -> Iterator[Any]:
            for batch in self.base:
                fetched.append(int(batch))
                yield batch

    loader.base_dataloader = Base(loader.base_dataloader)
    seen = [(int(batch), len(fetched), bool(loader.end_of_dataloader)) for batch in loader]
    assert seen == [(0, 2, False), (1, 3, False), (2, 3, True)]
    assert loader.iteration == 1


def test_samplers_of_a_loader() -> None:
    config = DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    sampler = _compat.seedable_sampler(accelerator.prepare(DataLoader([1, 2], shuffle=True)))
    assert (sampler.initial_seed, sampler.epoch) == (torch.initial_seed(), 0)
    assert _compat.seedable_sampler(accelerator.prepare(DataLoader([1, 2]))) is None


def test_a_loader_of_several_processes() -> None:
    """The generator that `prepare` makes is found and taken away, and batches can be left out below the sharding."""
    Accelerator(cpu=True)
    from accelerate.data_loader import prepare_data_loader

    user = DataLoader(range(12), batch_size=2, shuffle=True)
    assert not _compat.own_generator(user)
    loader = prepare_data_loader(user, num_processes=2, process_index=1, rng_types=["generator"])
    sampler = loader.batch_sampler.batch_sampler.sampler
    assert sampler.generator is not None
    _compat.forget_generator(loader)
    assert sampler.generator is None
    assert loader.rng_types == []
    assert not _compat.splits_batches(loader)
    in_order = prepare_data_loader(DataLoader(range(12), batch_size=2), num_processes=2, process_index=1)
    _compat.skip_inside(in_order, SkipOnce).skip = 3
    assert _compat.skip_inside(in_order, SkipOnce).skip == 3, "it is there already"
    assert next(iter(in_order.base_dataloader)).tolist() == [8, 9]
    assert next(iter(in_order.base_dataloader)).tolist() == [2, 3], "of one pass only"
    assert _compat.own_generator(DataLoader([1], generator=torch.Generator(), shuffle=True))
    batches = BatchSampler(RandomSampler(range(4)), 2, False)
    assert not _compat.own_generator(DataLoader(range(4), batch_sampler=batches))


def test_versions() -> None:
    _compat.check_version()
    for wrong in ("1.9.0", "2.0.0"):
        with pytest.raises(ConfigError, match=wrong):
            _compat.check_version(wrong)


def test_the_launcher(tmp_path: Any) -> None:
    file = tmp_path / "cfg.yaml"
    file.write_text("distributed_type: MULTI_GPU\nnum_processes: 2\nuse_cpu: true\n")
    line = ["--config_file", str(file), "--mixed_precision", "bf16", "train.py", "--lr", "1"]
    args = launcher.parser().parse_args(line)
    args, defaults = launcher.with_defaults(args)
    assert defaults.num_processes == 2
    assert isinstance(args, argparse.Namespace)
    assert (args.multi_gpu, args.training_script, args.training_script_args) == (True, "train.py", ["--lr", "1"])
    many = launcher.many_processes_environment(args)
    assert (many["ACCELERATE_MIXED_PRECISION"], args.nproc_per_node) == ("bf16", "2")
    assert launcher.one_process_environment(args)["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert launcher.default_location().endswith("default_config.yaml")
