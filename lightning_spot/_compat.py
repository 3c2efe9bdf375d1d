"""The only file that imports Lightning, and the only one that uses its private names.

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


def _module(trainer: Any, name: str) -> ModuleType:
    return importlib.import_module(f"{package_of(trainer)}.{name}")


def stop_exception(trainer: Any, code: int) -> SystemExit:
    """What ends the fit: a SIGTERMException of the trainer's package, which it treats as an orderly end, with `code`.

    A subclass with its own constructor: in 2.6.6 the class is a bare SystemExit (exit code 0), later ones take no
    argument.
    """
    base = _module(trainer, "utilities.exceptions").SIGTERMException

    class SpotStop(base):  # type: ignore[misc]
        def __init__(self, code: int) -> None:
            SystemExit.__init__(self, code)

    return SpotStop(code)


def is_instance(trainer: Any, value: Any, *names: str) -> bool:
    """Whether `value` is one of these callback classes of the trainer's package, as far as this version has them."""
    callbacks = _module(trainer, "callbacks")
    classes = tuple(cls for name in names if (cls := getattr(callbacks, name, None)) is not None)
    return isinstance(value, classes)


def overridden(trainer: Any, name: str, module: Any) -> bool:
    """Whether the user's module replaces this hook."""
    return bool(_module(trainer, "utilities.model_helpers").is_overridden(name, module))


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


# -- running metrics --------------------------------------------------------------------------------------------------


def metric_state(trainer: Any, module: Any) -> dict[str, Any]:
    """Sums behind epoch means, states of torchmetrics and the metrics shown so far: Lightning saves none of them."""
    connector = trainer._logger_connector
    results = trainer.fit_loop.epoch_loop._results
    return {
        "results": {key: entry for key, value in results.items() if (entry := _result(value)) is not None},
        "modules": {name: _metric(metric) for name, metric in _torchmetrics(module)},
        "shown": {name: dict(getattr(connector, name)) for name in _SHOWN},
        "hook": connector._current_fx,
    }


def restore_metric_state(trainer: Any, module: Any, saved: Mapping[str, Any]) -> None:
    """Put back what `metric_state` took, so that the epoch goes on as if it had not been interrupted."""
    device = trainer.strategy.root_device
    metrics = dict(_torchmetrics(module))
    for name, state in saved["modules"].items():
        if name in metrics:
            _set_metric(metrics[name], state, device)
    connector = trainer._logger_connector
    for name in _SHOWN:
        getattr(connector, name).update({key: _to(value, device) for key, value in saved["shown"][name].items()})
    results = trainer.fit_loop.epoch_loop._results
    for key, entry in saved["results"].items():
        results[key] = _make_result(trainer, module, entry, device)
    if saved["results"]:
        # "The first batch was there already": otherwise the first `self.log` of each hook empties the sums.
        connector._first_loop_iter = True
        connector._current_fx = saved["hook"]


_SHOWN = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")
_META = ("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx")
_META_OPTIONAL = ("dataloader_idx", "metric_attribute")


def _result(result: Any) -> dict[str, Any] | None:
    meta = result.meta
    if meta.sync.group is not None:
        return None  # a process group of the user's own: it cannot be named in a file; the metric starts anew
    reduce_fx = meta.reduce_fx
    entry = {
        "meta": {name: getattr(meta, name) for name in (*_META, *_META_OPTIONAL)},
        "reduce": [reduce_fx.__module__ == "builtins", reduce_fx.__name__],
        "sync": [meta.sync.should, meta.sync.rank_zero_only],
        "has_reset": result.has_reset,
        "updates": result._update_count,
        "last": _detached(result._forward_cache),
        "is_tensor": result.is_tensor,
    }
    if result.is_tensor:
        entry["value"] = _detached(result.value)
        entry["size"] = _detached(getattr(result, "cumulated_batch_size", None))
    return entry


def _make_result(trainer: Any, module: Any, entry: Mapping[str, Any], device: Any) -> Any:
    import builtins

    import torch

    result = _module(trainer, "trainer.connectors.logger_connector.result")
    from_builtins, name = entry["reduce"]
    meta = result._Metadata(**entry["meta"], reduce_fx=getattr(builtins if from_builtins else torch, name))
    should, rank_zero_only = entry["sync"]
    meta.sync = result._Sync(_should=should, fn=trainer.strategy.reduce, _group=None, rank_zero_only=rank_zero_only)
    made = result._ResultMetric(meta, entry["is_tensor"]).to(device)
    if entry["is_tensor"]:
        made.value = _to(entry["value"], device)
        if entry["size"] is not None:
            made.cumulated_batch_size = _to(entry["size"], device)
    else:
        made.value = module.get_submodule(entry["meta"]["metric_attribute"])
    made.has_reset = entry["has_reset"]
    made._update_count = entry["updates"]
    made._forward_cache = _to(entry["last"], device)
    made._computed = None
    return made


def _torchmetrics(module: Any) -> list[tuple[str, Any]]:
    from torchmetrics import Metric

    return [(name, part) for name, part in module.named_modules() if isinstance(part, Metric)]


def _metric(metric: Any) -> dict[str, Any]:
    states = {
        name: [_detached(item) for item in value] if isinstance(value, list) else _detached(value)
        for name, value in metric.metric_state.items()
    }
    return {"states": states, "updates": metric._update_count}


def _set_metric(metric: Any, saved: Mapping[str, Any], device: Any) -> None:
    for name, value in saved["states"].items():
        setattr(metric, name, [_to(v, device) for v in value] if isinstance(value, list) else _to(value, device))
    metric._update_count = saved["updates"]
    metric._computed = None


def _detached(value: Any) -> Any:
    return value.detach() if hasattr(value, "detach") else value


def _to(value: Any, device: Any) -> Any:
    return value.to(device) if hasattr(value, "to") else value


# -- signals ----------------------------------------------------------------------------------------------------------


def signal_owner(trainer: Any) -> tuple[Any, str]:
    """Lightning's part of the SIGTERM handler; it runs a broadcast there, which hangs when one rank gets the signal."""
    return trainer._signal_connector, "_sigterm_notifier_fn"


def signal_poll_owner(trainer: Any) -> tuple[Any, str]:
    """A broadcast at each batch start that asks whether rank 0 got SIGTERM (not in every supported version)."""
    return trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor"
