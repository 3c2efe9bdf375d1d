"""`accelerate-spot launch`: as `accelerate launch`, with the run that `spot_config:` names."""

from __future__ import annotations

import typer

from spot_core.cli.launch import TorchrunCommand, supervised


def launch(ctx: typer.Context) -> None:
    """accelerate-spot launch --config_file cfg.yaml [accelerate's options] train.py args."""
    with supervised("accelerate-spot launch") as supervisor:
        from accelerate_spot.launch.command import launch as run

        raise typer.Exit(run(ctx.args, supervisor))


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("launch", cls=TorchrunCommand)(launch)
