"""What the commands print with: one console, one way to show a size, an age, JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

RunArgument = Annotated[
    str, typer.Argument(metavar="RUN", envvar="SPOT_RUN", help="The run: a folder or a URI such as s3://bucket/run.")
]
GenerationArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[GEN]", help="A generation: its name (000002-000000001200), LIFE-STEP or STEP. The newest by default."
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of a table.")]


def console() -> Console:
    """Made at each use, so that it writes to the stdout of the moment (a test's, a pipe's)."""
    # In a pipe there is no edge to fit into: a row stays one line.
    return Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 400)


def print_json(value: Mapping[str, Any]) -> None:
    typer.echo(json.dumps(value, indent=2, sort_keys=True))


def table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    made = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        made.add_column(name, justify="right" if name in right else "left", overflow="fold")
    return made


def size(count: int) -> str:
    """Bytes, readable: ``1.5 GB`` (powers of 1000)."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    raise AssertionError("unreachable")


def moment(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, tz=timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")


def age(seconds: float) -> str:
    """``3 d 4 h``, ``5 min``, ``12 s``: the two largest units."""
    left = max(0, round(seconds))
    parts = []
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1)):
        number, left = divmod(left, length)
        if number:
            parts.append(f"{number} {unit}")
    return " ".join(parts[:2]) or "0 s"
