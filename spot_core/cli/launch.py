"""`spot launch`: torchrun, with a clean stop's exit code and no worker left behind."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
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


@contextmanager
def supervised(program: str) -> Iterator[Supervisor]:
    """Around the import of torch and the launching: the signals are taken over first.

    The threads that torch starts then inherit the blocked signals. `program` is the name in the log.
    """
    logging.basicConfig(level=logging.INFO, format=f"[{program}] %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    supervisor = Supervisor()
    supervisor.start()
    try:
        yield supervisor
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ConfigError(f"{program} needs torch.", hint="pip install 'lightning-spot[torch]'") from error
    except LauncherSignal as error:
        raise typer.Exit(shell_code(-error.signum)) from error  # as if this program had not minded the signal


def launch(ctx: typer.Context) -> None:
    """Start workers as torchrun does: spot launch [torchrun's options] [--run URI] -- train.py args."""
    with supervised("spot launch") as supervisor:
        from spot_core.pytorch.launch import launch as run_torchrun

        raise typer.Exit(run_torchrun(ctx.args, supervisor))


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("launch", cls=TorchrunCommand)(launch)
