"""`spot launch`: torchrun, with a clean stop's exit code and no worker left behind."""

from __future__ import annotations

import logging
from typing import Any

import typer
from typer.core import TyperCommand

from spot_core.errors import ConfigError
from spot_core.launch.exit_code import shell_code
from spot_core.launch.supervisor import LauncherSignal, Supervisor


class TorchrunCommand(TyperCommand):
    """Leaves every argument, `--help` and `--` too, to torchrun's own parser."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # Any: typer ships its own click
        ctx.args = list(args)
        return []


def launch(ctx: typer.Context) -> None:
    """Start workers as torchrun does: spot launch [torchrun's options] [--run URI] -- train.py args."""
    logging.basicConfig(level=logging.INFO, format="[spot launch] %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    supervisor = Supervisor()
    supervisor.start()  # before torch: its threads then inherit the blocked signals
    try:
        from spot_core.pytorch.launch import launch as run_torchrun
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ConfigError("spot launch needs torch.", hint="pip install 'lightning-spot[torch]'") from error
    except LauncherSignal as error:
        raise typer.Exit(shell_code(-error.signum)) from error  # as if this program had not minded the signal
    raise typer.Exit(run_torchrun(ctx.args, supervisor))


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("launch", cls=TorchrunCommand)(launch)
