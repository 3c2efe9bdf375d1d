"""`accelerate-spot config`: the `spot_config:` section of an accelerate configuration, by questions or by flags."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from accelerate_spot.section import KEY, Section
from spot_core.config import Settings

_START = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "NO", "num_processes": 1}
"""A file that there was not before: one process on this machine."""


def config(
    config_file: Annotated[
        Path | None, typer.Option("--config_file", "--config-file", help="file to change; accelerate's own by default")
    ] = None,
    run: Annotated[str | None, typer.Option(help="folder or URI of the run")] = None,
    interval: Annotated[str | None, typer.Option(help="auto, 90s, 10min, 500 steps, lose at most 10min")] = None,
    keep: Annotated[int | None, typer.Option(help="newest generations to keep")] = None,
    keep_every: Annotated[int | None, typer.Option(help="also keep one every so many steps")] = None,
    grace_s: Annotated[float | None, typer.Option("--grace-s", "--grace_s", help="seconds after a notice")] = None,
    window_s: Annotated[float | None, typer.Option("--window-s", "--window_s", help="of them, for a save")] = None,
    exit_code: Annotated[int | None, typer.Option("--exit-code", "--exit_code", help="of a clean stop")] = None,
    sources: Annotated[str | None, typer.Option(help="of notices: auto, none, or names")] = None,
    epoch_loop: Annotated[str | None, typer.Option("--epoch-loop", "--epoch_loop", help="rewrite or off")] = None,
) -> None:
    """Put the section into a configuration that `accelerate config` wrote; asks for what matters when no flag is given.

    What the section holds already stays, unless it is given anew.
    """
    from accelerate_spot.launch import _compat, configuration

    path = config_file or Path(_compat.default_file() or _compat.default_location())
    rest, section = configuration.read(path) if path.exists() else (dict(_START), {})
    given: dict[str, Any] = {
        "run": run,
        "interval": interval,
        "keep": keep,
        "keep_every": keep_every,
        "grace_s": grace_s,
        "window_s": window_s,
        "exit_code": exit_code,
        "sources": sources,
        "epoch_loop": epoch_loop,
    }
    given = {name: value for name, value in given.items() if value is not None}
    if not given:
        given = _ask(section)
    section |= given
    Section.active(environ={}, **section)  # refuses what does not go together, before anything is written
    configuration.write(path, rest, section)
    typer.echo(f"{KEY} is in {path}. Start by: accelerate-spot launch --config_file {path} train.py")


def _ask(section: dict[str, Any]) -> dict[str, Any]:
    def before(name: str) -> Any:
        return section.get(name, getattr(Settings, name, None))

    grace_s = typer.prompt("Seconds between the platform's notice and the end", default=before("grace_s"), type=float)
    return {
        "run": typer.prompt("Where is the run kept (folder or URI)", default=section.get("run")),
        "interval": typer.prompt("How often to save (auto, 10min, 500 steps)", default=before("interval")),
        "keep": typer.prompt("How many generations to keep", default=before("keep"), type=int),
        "grace_s": grace_s,
        "window_s": min(grace_s, float(section.get("window_s", Settings.window_s))),
    }


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("config")(config)
