"""The only file that imports Lightning, and with `_compat_metrics` the only one that uses its private names.

Lightning exists twice, as `lightning.pytorch` and as `pytorch_lightning`, with separate classes. A trainer's package is
found by its class; base classes are taken from whichever packages the program has loaded.

Private names are read through functions here, each of which says what for. Supported: 2.5.0 to 2.6.x; other versions
are refused, because the loops' meaning of "restarting" changed before and may change again.
tests/lightning/test_compat.py fails when one of the names vanishes.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from spot_core.errors import ConfigError

PACKAGES = ("lightning.pytorch", "pytorch_lightning")
FABRIC = {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}
SUPPORTED = ((2, 5), (2, 7))


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False


def loaded_packages() -> tuple[ModuleType, ...]:
    """The Lightning packages this program has imported; if none, the one that is installed is imported.

    Raises ConfigError when none is installed or the version is not supported.
    """
    loaded = [sys.modules[name] for name in PACKAGES if name in sys.modules]
    if not loaded:
        name = next((name for name in PACKAGES if _installed(name)), None)
        if name is None:
            raise ConfigError("lightning_spot needs Lightning.", hint="Install lightning-spot[lightning].")
        loaded = [importlib.import_module(name)]
    for package in loaded:
        check_version(package.__name__, str(package.__version__))
    return tuple(loaded)


def check_version(name: str, version: str) -> None:
    """Raises ConfigError outside of 2.5.0 to 2.6.x."""
    numbers = tuple(int(part) for part in version.split(".")[:2])
    if not SUPPORTED[0] <= numbers < SUPPORTED[1]:
        raise ConfigError(
            f"{name} {version} is not supported: lightning_spot knows the training loops of 2.5.0 to 2.6.x.",
            hint="Install a version in this range (2.6.2 and 2.6.3 were withdrawn).",
        )


def callback_bases() -> tuple[type, ...]:
    """`Callback` of every loaded package, so that `isinstance` holds in each."""
    return tuple(package.Callback for package in loaded_packages())


def datamodule_base() -> type[Any]:
    base: type[Any] = loaded_packages()[0].LightningDataModule
    return base


def register_checkpoint_io(cls: Any) -> None:
    """Make `cls` a CheckpointIO for every loaded package; a Trainer refuses a plugin of the other one's class."""
    for package in loaded_packages():
        base = importlib.import_module(f"{FABRIC[package.__name__]}.plugins").CheckpointIO
        if not issubclass(cls, base):
            base.register(cls)


def package_of(trainer: Any) -> str:
    """`lightning.pytorch` or `pytorch_lightning`: whose Trainer this is."""
    for cls in type(trainer).__mro__:
        for name in PACKAGES:
            if cls.__module__ == name or cls.__module__.startswith(f"{name}."):
                return name
    raise ConfigError(f"{type(trainer).__name__} is no Trainer of Lightning")


def version_of(trainer: Any) -> str:
    return str(sys.modules[package_of(trainer)].__version__)


def module_of(trainer: Any, name: str) -> ModuleType:
    """A module of the trainer's package."""
    return importlib.import_module(f"{package_of(trainer)}.{name}")


def stop_exception(trainer: Any, code: int) -> SystemExit:
    """What ends the fit: a SIGTERMException of the trainer's package, which it treats as an orderly end, with `code`.

    A subclass with its own constructor: in 2.6.6 the class is a bare SystemExit (exit code 0), later ones take no
    argument.
    """
    base = module_of(trainer, "utilities.exceptions").SIGTERMException

    class SpotStop(base):  # type: ignore[misc]
        def __init__(self, code: int) -> None:
            SystemExit.__init__(self, code)

    return SpotStop(code)


def is_instance(trainer: Any, value: Any, *names: str) -> bool:
    """Whether `value` is one of these callback classes of the trainer's package, as far as this version has them."""
    callbacks = module_of(trainer, "callbacks")
    classes = tuple(cls for name in names if (cls := getattr(callbacks, name, None)) is not None)
    return isinstance(value, classes)


def overridden(trainer: Any, name: str, module: Any) -> bool:
    """Whether the user's module replaces this hook."""
    return bool(module_of(trainer, "utilities.model_helpers").is_overridden(name, module))


def attribute_owners(trainer: Any, module: Any) -> list[Any]:
    """Where a tuner may have put the value it found: module, data module, and their hyperparameters."""
    owners = [owner for owner in (module, trainer.datamodule) if owner is not None]
    return owners + [owner.hparams for owner in owners if getattr(owner, "hparams", None)]


# -- resuming and saving ----------------------------------------------------------------------------------------------

Restore = Callable[..., None]


def restore_owner(trainer: Any) -> tuple[Any, str]:
    """Where Lightning chooses and loads a checkpoint, as (object, method).

    The one place after the process group and the configured model exist and before optimizers, callbacks and loops
    are set up; no public hook lies there. (`resume_start` would also be met by the tuner's own restore.)
    """
    return trainer._checkpoint_connector, "_restore_modules_and_callbacks"


def boundary_owner(trainer: Any) -> tuple[Any, str]:
    """What is called once per training batch after every callback's and the module's own `on_train_batch_end`.

    No public hook runs after the module's, which may still change the state (a target network, an average).
    It also comes after the batch's row was logged, so a stop there loses no row.
    """
    return trainer._logger_connector, "update_train_step_metrics"


def validation_due_owner(trainer: Any) -> tuple[Any, str]:
    """What decides after a batch whether validation runs."""
    return trainer.fit_loop.epoch_loop, "_should_check_val_fx"


def dump_checkpoint(trainer: Any) -> dict[str, Any]:
    """The whole checkpoint, as `trainer.save_checkpoint` would write it, without its barrier and on every rank."""
    state: dict[str, Any] = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    return state


def shards_model(trainer: Any) -> bool:
    """Whether this is FSDP or ModelParallelStrategy, whose state torch's own state-dict functions can take."""
    strategies = module_of(trainer, "strategies")
    return isinstance(trainer.strategy, (strategies.FSDPStrategy, strategies.ModelParallelStrategy))


def data_ranks(owner: Any) -> tuple[int, int]:
    """(rank, number of ranks) that the data of this trainer or Fabric are shared out to.

    Ranks of one tensor-parallel group read the same.
    """
    places = getattr(owner.strategy, "distributed_sampler_kwargs", None) or {}
    return int(places.get("rank", owner.global_rank)), int(places.get("num_replicas", owner.world_size))


def launches_workers(trainer: Any) -> bool:
    """Whether the fit runs in processes that the strategy starts in the middle of the script (spawn, fork)."""
    return type(trainer.strategy.launcher).__name__ == "_MultiProcessingLauncher"


def early_exit(callback: Any) -> bool:
    """Whether this tuner callback ends the fit when it has tuned (`Tuner.lr_find`): then nothing is trained."""
    return bool(getattr(callback, "_early_exit", False))


def tuned_name(callback: Any) -> str | None:
    """Name of the attribute that a tuner callback sets."""
    for name in ("_batch_arg_name", "_attr_name"):
        value = getattr(callback, name, None)
        if value:
            return str(value)
    return None


# -- loops ------------------------------------------------------------------------------------------------------------


def validation_due(trainer: Any) -> bool:
    """Whether a validation follows this batch: skipped for good by an unrepaired resume."""
    epoch_loop = trainer.fit_loop.epoch_loop
    return bool(trainer.enable_validation and epoch_loop._should_check_val_fx(trainer.fit_loop._data_fetcher))


def last_batch(trainer: Any) -> bool:
    """Whether this batch ends the epoch."""
    epoch_loop = trainer.fit_loop.epoch_loop
    return bool(epoch_loop.batch_progress.is_last_batch or epoch_loop._num_ready_batches_reached())


def accumulating(trainer: Any) -> bool:
    """Whether gradients of this batch wait for more batches."""
    return bool(trainer.fit_loop._should_accumulate())


def finishing(trainer: Any) -> bool:
    """Whether the fit ends after this batch whatever comes: Lightning cannot be resumed into its last moments."""
    loop = trainer.fit_loop
    return bool(trainer.global_step >= trainer.max_steps >= 0 or (trainer.should_stop and loop._can_stop_early))


def batches_ready(trainer: Any) -> int:
    """Batches of the present epoch that were fetched, as the loops count."""
    return int(trainer.fit_loop.epoch_loop.batch_progress.current.ready)


def set_batches_ready(trainer: Any, ready: int, *, scale: tuple[int, int] | None, stepped: bool) -> None:
    """Count in other batches: `ready` of this epoch; of the run by the ratio `scale`, else as many more or less.

    `stepped`: the last batch stepped the optimizer although its number does not say so; Lightning tells by the number
    whether the logger's step has to go on.
    """
    loop = trainer.fit_loop.epoch_loop
    current, total = loop.batch_progress.current, loop.batch_progress.total
    by = ready - current.ready
    runs = total.ready // scale[1] * scale[0] - total.ready if scale else by
    for progress, more in ((current, by), (total, runs)):
        for name in ("ready", "started", "processed", "completed"):
            setattr(progress, name, getattr(progress, name) + more)
    if stepped:
        loop._batches_that_stepped += 1


def forget_restart(trainer: Any) -> None:
    """Let the rest of the resumed epoch end as any other: Lightning skips plateau schedulers in it otherwise."""
    trainer.fit_loop._restarting = False


def step_plateau_schedulers(trainer: Any) -> None:
    """Step the plateau schedulers of the saved batch, which Lightning does after the hooks of the batch."""
    trainer.fit_loop.epoch_loop.update_lr_schedulers("step", update_plateau_schedulers=True)


def settle_validation_progress(trainer: Any) -> None:
    """After a repaired resume: the pending validation was marked as begun; later saves must not see that."""
    total = trainer.fit_loop.epoch_loop.val_loop.batch_progress.total
    total.ready = total.started = total.processed


def prepare_validation(trainer: Any) -> None:
    """Make the validation loaders now, as the interrupted life had made them before it trained."""
    if trainer.val_dataloaders is None and trainer.enable_validation:
        trainer.validating = True
        trainer.fit_loop.epoch_loop.val_loop.setup_data()
        trainer.training = True


def clocks(trainer: Any, now: float) -> dict[str, Any]:
    """Counters that Lightning keeps out of its checkpoints; `now` as of `Clock.monotonic` (seconds)."""
    since = getattr(trainer, "_last_val_time", None)
    reload = trainer.fit_loop._last_train_dl_reload_epoch
    return {
        "since_validation": None if since is None else now - since,
        "train_reload_epoch": None if reload == float("-inf") else reload,
        "val_reload_epoch": _finite(getattr(trainer.fit_loop.epoch_loop.val_loop, "_last_val_dl_reload_epoch", None)),
    }


def set_clocks(trainer: Any, saved: Mapping[str, Any], now: float) -> None:
    if saved["since_validation"] is not None and getattr(trainer, "_val_check_time_interval", None) is not None:
        trainer._last_val_time = now - saved["since_validation"]
    if saved["train_reload_epoch"] is not None:
        trainer.fit_loop._last_train_dl_reload_epoch = saved["train_reload_epoch"]
    if saved["val_reload_epoch"] is not None:
        trainer.fit_loop.epoch_loop.val_loop._last_val_dl_reload_epoch = saved["val_reload_epoch"]


def _finite(value: Any) -> Any:
    return value if isinstance(value, int) else None


# -- data -------------------------------------------------------------------------------------------------------------


def looks_ahead(trainer: Any) -> bool:
    """Whether batches are fetched before they are needed (loaders without a length)."""
    fetcher = trainer.fit_loop._data_fetcher
    return fetcher is not None and fetcher.length is None


def fetched_ahead(trainer: Any) -> int:
    """How many batches were fetched and not trained on yet."""
    return len(getattr(trainer.fit_loop._data_fetcher, "batches", ()))


def hands_out_iterator(trainer: Any) -> bool:
    """Whether `training_step(dataloader_iter)` fetches for itself."""
    return type(trainer.fit_loop._data_fetcher).__name__ == "_DataLoaderIterDataFetcher"


def cycle_flags(trainer: Any) -> list[bool] | None:
    """Which loaders of a cycling combination have run out once; they decide when the epoch ends."""
    combined = trainer.fit_loop._combined_loader
    return list(flags) if (flags := getattr(combined._iterator, "_consumed", None)) is not None else None


def set_cycle_flags(trainer: Any, flags: list[bool] | None) -> None:
    iterator = trainer.fit_loop._combined_loader._iterator
    if flags is not None and hasattr(iterator, "_consumed"):
        iterator._consumed = list(flags)


def end_epoch_data(trainer: Any, places: list[Any]) -> None:
    """The saved batch was the last of its epoch: let the next fetch say so, and the next epoch begin its own pass.

    The loaders need not be exhausted (`limit_train_batches`), and those of a cycling combination begin again when the
    fetcher looks ahead.
    """
    loop = trainer.fit_loop
    loop._data_fetcher.done = True
    if hasattr(loop._data_fetcher, "batches"):
        loop._data_fetcher.batches = []
    for loader, place in zip(loop._combined_loader.flattened, places, strict=False):
        if "kind" in place:
            loader.load_state_dict({**place, "ended": True})


def take_up_loaders(trainer: Any) -> None:
    """Load loader states that Lightning left aside: it skips them when the loaders were made before the loops were
    restored, e.g. by `trainer.estimated_stepping_batches` in `configure_optimizers`."""
    loop = trainer.fit_loop
    if loop._combined_loader_states_to_load:
        loop._combined_loader._load_state_dicts(loop._combined_loader_states_to_load)
        loop._combined_loader_states_to_load = []
        iter(loop._data_fetcher)


def seed_workers(trainer: Any, loader: Any) -> None:
    """Give the loader Lightning's `worker_init_fn` now, if it is to have one (`seed_everything(workers=True)`).

    Lightning does it later, and only to a loader that has none; the protection from signals is one.
    """
    data = importlib.import_module(f"{FABRIC[package_of(trainer)]}.utilities.data")
    data._auto_add_worker_init_fn(loader, trainer.global_rank)


# -- signals ----------------------------------------------------------------------------------------------------------


def signal_owner(trainer: Any) -> tuple[Any, str]:
    """Lightning's part of the SIGTERM handler; it runs a broadcast there, which hangs when one rank gets the signal."""
    return trainer._signal_connector, "_sigterm_notifier_fn"


def signal_poll_owner(trainer: Any) -> tuple[Any, str]:
    """A broadcast at each batch start that asks whether rank 0 got SIGTERM (not in every supported version)."""
    return trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor"


# -- Fabric -----------------------------------------------------------------------------------------------------------


def fabric_has_engine(fabric: Any) -> bool:
    """Whether the strategy of this Fabric keeps the training's state in an engine of its own."""
    return _is_named(fabric.strategy, "DeepSpeedStrategy", "XLAFSDPStrategy", "XLAStrategy")


def fabric_shards(fabric: Any) -> bool:
    """Whether the strategy of this Fabric keeps the model in shards."""
    return _is_named(fabric.strategy, "FSDPStrategy", "ModelParallelStrategy")


def _is_named(value: Any, *names: str) -> bool:
    """By name: a class of either package, or one that the user derived from it."""
    return any(kind.__name__ in names for kind in type(value).__mro__)


def inside_fabric_module(value: Any, *, sharded: bool) -> Any:
    """The user's module in Fabric's wrapper; of a sharded one what the strategy made of it."""
    if not hasattr(value, "_forward_module"):
        return value
    return value._forward_module if sharded else value.module


def inside_fabric_optimizer(value: Any) -> Any:
    """The optimizer in Fabric's wrapper; anything else as it is."""
    return value.optimizer if type(value).__name__.startswith("Fabric") and hasattr(value, "optimizer") else value


def inside_fabric_loader(loader: Any) -> Any:
    """The loader that Fabric's wrapper iterates."""
    return loader._dataloader


def put_inside_fabric_loader(loader: Any, inner: Any) -> None:
    loader._dataloader = inner


def fabric_passes(loader: Any) -> int:
    """How often the wrapper was iterated: it tells the sampler that number as its epoch."""
    return int(loader._num_iter_calls)


def set_fabric_passes(loader: Any, passes: int) -> None:
    loader._num_iter_calls = passes
