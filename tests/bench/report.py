"""Numbers to tables, and whether the goals were met."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.bench.contestants import SPOT, STOCK_ASYNC

GIB = 1 << 30


def report(numbers: dict[str, Any], console: Console) -> None:
    console.print(", ".join(f"{key} {value}" for key, value in numbers["machine"].items()))
    goals: list[tuple[str, float, float]] = []
    for size, table in numbers["saves"].items():
        console.print(_saves_table(size, table))
        goals += _saves_goals(size, table)
    if numbers["launches"]:
        console.print(_launches_table(numbers["launches"]))
        if rows := numbers["launches"].get(SPOT, {}).get("saves"):
            goals.append(("launch-bound loop with 8,000 tensors: mean slowdown", _median(rows, "mean"), 1.2))
    if "memory" in numbers:
        console.print(_memory_table(numbers))
        if (peak := numbers["memory"].get(SPOT)) and (state := _state_bytes(numbers)):
            goals.append(("peak memory of a save / state", peak / state, 1.1))
    for size, answer in numbers.get("restore", {}).items():
        if answer is not None:
            console.print(_restore_table(size, answer))
            for heat in ("cold", "warm"):
                ours, theirs = (statistics.median(times[heat]) for times in answer["restore"].values())
                goals.append((f"{size}: restore, {heat} / torch.load(mmap) + copy", ours / theirs, 1.0))
    if goals:
        console.print(_goals_table(goals))


def _saves_table(size: str, table: dict[str, Any]) -> Table:
    counts = sorted({len(entry["saves"]) for entry in table.values() if entry["saves"]})
    drawn = Table(title=f"State of {size}: seconds per save, median (min-max) of {counts} saves; first saves apart")
    for column in ("", "blocked", "lost training time", "durable", "first: blocked", "first: durable"):
        drawn.add_column(column)
    for name, entry in table.items():
        if not entry["saves"]:
            drawn.add_row(name, "failed")
            continue
        mark = "" if entry.get("synced", True) else " (not synced)"
        cells = [_spread(entry["saves"], key) for key in ("blocked", "lost", "durable")]
        firsts = [_spread(entry["firsts"], key) for key in ("blocked", "durable")]
        drawn.add_row(name, cells[0], cells[1], cells[2] + mark, *firsts)
    if raw := [row for entry in table.values() for row in entry["saves"] if "raw" in row]:
        drawn.add_row("the disk itself (O_DIRECT, no digests)", "", "", _spread(raw, "raw"))
    return drawn


def _saves_goals(size: str, table: dict[str, Any]) -> Iterable[tuple[str, float, float]]:
    ours = table.get(SPOT)
    stock = [table[name] for name in STOCK_ASYNC if name in table and table[name]["saves"]]
    if not ours or not ours["saves"]:
        return
    if stock:
        for key, most in (("blocked", 0.1), ("lost", 1 / 3)):
            best = min(_median(entry["saves"], key) for entry in stock)
            yield f"{size}: {key} / best stock async", _median(ours["saves"], key) / best, most
    first = statistics.median(row["blocked"] for row in ours["firsts"])
    yield f"{size}: first save blocked / slowest later one", first / max(row["blocked"] for row in ours["saves"]), 1.0
    first = statistics.median(row["durable"] for row in ours["firsts"])
    yield f"{size}: first save durable / slowest later one", first / max(row["durable"] for row in ours["saves"]), 1.0
    if all("raw" in row for row in ours["saves"]):
        yield f"{size}: durable / disk limit", _median(ours["saves"], "durable") / _median(ours["saves"], "raw"), 1.3


def _launches_table(table: dict[str, Any]) -> Table:
    drawn = Table(title="Launch-bound loop, 8,000 small tensors, 0.25 GB: iterations while a save is in flight")
    for column in ("", "mean slowdown", "worst iteration", "blocked (s)", "durable (s)"):
        drawn.add_column(column)
    for name, entry in table.items():
        keys = ("mean", "worst", "blocked", "durable")
        drawn.add_row(name, *([_spread(entry["saves"], key) for key in keys] if entry["saves"] else ["failed"]))
    return drawn


def _memory_table(numbers: dict[str, Any]) -> Table:
    state = _state_bytes(numbers)
    drawn = Table(title="Peak memory of a save above the state, all processes (shared pages once)")
    for column in ("", "GiB", "of the state"):
        drawn.add_column(column)
    for name, peak in numbers["memory"].items():
        if peak is None:
            drawn.add_row(name, "failed")
        else:
            drawn.add_row(name, f"{peak / GIB:.2f}", f"{peak / state:.2f}" if state else "")
    return drawn


def _restore_table(size: str, answer: dict[str, Any]) -> Table:
    drawn = Table(title=f"State of {size}: seconds to restore into the model, median (min-max)")
    for column in ("", "from disk", "from page cache"):
        drawn.add_column(column)
    for name, times in answer["restore"].items():
        label = f"{name}, digests verified" if name == SPOT else name
        drawn.add_row(label, *(_range(times[heat]) for heat in ("cold", "warm")))
    return drawn


def _goals_table(goals: list[tuple[str, float, float]]) -> Table:
    drawn = Table(title="Goals")
    for column in ("", "measured", "at most", ""):
        drawn.add_column(column)
    for what, measured, most in goals:
        drawn.add_row(what, f"{measured:.3f}", f"{most:.3f}", "met" if measured <= most else "[red]missed[/]")
    return drawn


def _state_bytes(numbers: dict[str, Any]) -> int | None:
    sizes = list(numbers["saves"].values()) or [{}]
    found = [entry["bytes"] for entry in sizes[-1].values() if "bytes" in entry]
    found += [answer["bytes"] for answer in list(numbers.get("restore", {}).values())[-1:] if answer]
    return found[0] if found else None


def _median(rows: list[dict[str, float]], key: str) -> float:
    return statistics.median(row[key] for row in rows)


def _spread(rows: list[dict[str, float]], key: str) -> str:
    return _range([row[key] for row in rows]) if rows else ""


def _range(values: list[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f}-{max(values):.3f})"
