"""Running metrics of an epoch: sums behind epoch means, states of torchmetrics, what was shown. Private names, as
`_compat` has them; tests/lightning/test_compat.py fails when one of them vanishes.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from typing import Any

import torch

from lightning_spot import _compat

log = logging.getLogger(__name__)


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


def merge_metric_states(module: Any, states: list[Mapping[str, Any]]) -> dict[str, Any]:
    """What one rank carries on of several: sums are added, so that an epoch's mean is still over all its batches.

    Entries that only one of them has are kept; of the metrics shown so far the first one's are taken. A metric whose
    states are not made to be reduced (torchmetrics calculates with those of all ranks side by side) begins anew.
    """
    metrics = dict(_torchmetrics(module))
    merged = copy.deepcopy(dict(states[0]))
    for state in states[1:]:
        for key, entry in state["results"].items():
            mine = merged["results"].setdefault(key, entry)
            if mine is not entry and entry["is_tensor"]:
                mine["value"] = _joined(entry["reduce"][1], mine["value"], entry["value"])
                if entry["size"] is not None:
                    mine["size"] = mine["size"] + entry["size"]
                mine["updates"] += entry["updates"]
        for name, saved in state["modules"].items():
            if name not in metrics or name not in merged["modules"]:
                continue
            mine, reductions = merged["modules"][name], metrics[name]._reductions
            if any(reductions.get(part) is None and not isinstance(value, list)
                   for part, value in saved["states"].items()):
                log.warning("spot: the running metric %s cannot be carried on by another number of ranks: it begins "
                            "anew inside this epoch", name)
                del merged["modules"][name]
                continue
            for part, value in saved["states"].items():
                how = getattr(reductions.get(part), "__name__", "").removeprefix("dim_zero_")
                shares = (mine["updates"], saved["updates"])
                mine["states"][part] = _joined(how, mine["states"][part], value, shares)
            mine["updates"] += saved["updates"]
    return merged


def _joined(how: str, mine: Any, other: Any, shares: tuple[int, int] | None = None) -> Any:
    """shares: of a state that is a mean (a logged mean's `value` is a sum), from how many updates each has it."""
    if isinstance(mine, list):
        return mine + list(other)
    if how == "cat":
        return torch.cat([torch.atleast_1d(mine), torch.atleast_1d(other)])
    if how in ("max", "min"):
        return torch.maximum(mine, other) if how == "max" else torch.minimum(mine, other)
    if how == "mean" and shares is not None:
        return (mine * shares[0] + other * shares[1]) / max(sum(shares), 1)
    return mine + other


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

    result = _compat.module_of(trainer, "trainer.connectors.logger_connector.result")
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
