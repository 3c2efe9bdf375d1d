"""Running metrics of several ranks, carried on by fewer: what one rank would have that had seen all of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torchmetrics import CatMetric, MaxMetric, MeanMetric, Metric, MinMetric, PearsonCorrCoef, SumMetric
from torchmetrics.classification import MulticlassConfusionMatrix

from lightning_spot import _compat_metrics


class Several(Metric):
    """States of the rarer kinds: a mean, rows in one tensor, the largest of each column."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("middle", torch.zeros(2), dist_reduce_fx="mean")
        self.add_state("rows", torch.zeros(0, 2), dist_reduce_fx="cat")
        self.add_state("top", torch.full((2,), -9.0), dist_reduce_fx="max")

    def update(self, value: torch.Tensor) -> None:
        pair = torch.stack([value, -value])
        self.middle = (self.middle * (self._update_count - 1) + pair) / self._update_count
        self.rows = torch.cat([self.rows, pair[None]])
        self.top = torch.maximum(self.top, pair)

    def compute(self) -> torch.Tensor:
        return torch.cat([self.middle, self.rows.sum(0), self.top])


def holding(**metrics: Any) -> torch.nn.Module:
    module = torch.nn.Module()
    for name, metric in metrics.items():
        module.add_module(name, metric)
    return module


KINDS: dict[str, Any] = {
    "mean": MeanMetric, "sum": SumMetric, "max": MaxMetric, "min": MinMetric, "cat": CatMetric, "several": Several,
}


@pytest.mark.parametrize("kind", KINDS)
def test_of_torchmetrics(kind: str) -> None:
    values = [torch.tensor(value) for value in (3.0, 1.5, -4.0, 7.25, 0.5)]
    ranks, whole = [KINDS[kind]() for _ in range(3)], KINDS[kind]()
    for number, value in enumerate(values):
        ranks[number % 3].update(value)
    for number in (0, 3, 1, 4, 2):  # rank by rank
        whole.update(values[number])
    states = [_state(metric=_compat_metrics._metric(metric)) for metric in ranks]
    module = holding(metric=KINDS[kind]())
    merged = _compat_metrics.merge_metric_states(module, states)["modules"]["metric"]
    _compat_metrics._set_metric(module.metric, merged, "cpu")
    torch.testing.assert_close(module.metric.compute(), whole.compute())
    assert module.metric._update_count == 5


def test_of_a_matrix() -> None:
    ranks, whole = [MulticlassConfusionMatrix(3) for _ in range(2)], MulticlassConfusionMatrix(3)
    for number in range(6):
        pair = torch.tensor([number % 3]), torch.tensor([number * 2 % 3])
        ranks[number % 2].update(*pair)
        whole.update(*pair)
    module = holding(metric=MulticlassConfusionMatrix(3))
    states = [_state(metric=_compat_metrics._metric(metric)) for metric in ranks]
    _compat_metrics._set_metric(
        module.metric, _compat_metrics.merge_metric_states(module, states)["modules"]["metric"], "cpu"
    )
    assert torch.equal(module.metric.compute(), whole.compute())


def test_what_cannot_be_merged_begins_anew(caplog: pytest.LogCaptureFixture) -> None:
    ranks = [PearsonCorrCoef() for _ in range(2)]
    for number, metric in enumerate(ranks):
        metric.update(torch.arange(4.0) + number, torch.arange(4.0) ** 2)
    module = holding(metric=PearsonCorrCoef())
    states = [_state(metric=_compat_metrics._metric(metric)) for metric in ranks]
    assert _compat_metrics.merge_metric_states(module, states)["modules"] == {}
    assert "the running metric metric cannot be carried on" in caplog.text


def test_of_values_that_were_logged() -> None:
    """A mean is kept as a sum and its weight; what one rank alone has logged is kept."""

    def logged(how: str, value: float, size: int | None, updates: int) -> dict[str, Any]:
        sizes = None if size is None else torch.tensor(size)
        return {"is_tensor": True, "reduce": [how != "mean", how], "value": torch.tensor(value), "size": sizes,
                "updates": updates}

    first = {"loss": logged("mean", 6.0, 8, 2), "top": logged("max", 3.0, None, 2), "own": logged("sum", 1.0, None, 1)}
    second = {"loss": logged("mean", 1.5, 4, 1), "top": logged("max", 5.0, None, 1)}
    merged = _compat_metrics.merge_metric_states(torch.nn.Module(), [_state(results=first), _state(results=second)])
    found = {name: (float(one["value"]), one["size"], one["updates"]) for name, one in merged["results"].items()}
    assert found == {"loss": (7.5, 12, 3), "top": (5.0, None, 3), "own": (1.0, None, 1)}
    assert float(first["loss"]["value"]) == 6.0, "what was loaded is not changed"


def _state(results: dict[str, Any] | None = None, **modules: Any) -> dict[str, Any]:
    return {"results": results or {}, "modules": modules, "shown": {}, "hook": None}
