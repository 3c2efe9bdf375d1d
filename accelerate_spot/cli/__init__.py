"""The `accelerate-spot` command. Exit codes of its own are those of `spot_core.cli.exits`."""

from __future__ import annotations

import typer

from accelerate_spot.cli import config, launch
from spot_core.cli import exits

__all__ = ["app", "main"]

app = typer.Typer(
    name="accelerate-spot",
    cls=exits.ReportingGroup,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="accelerate, for machines that can be taken away.",
)
for _command in (launch, config):
    _command.register(app)


def main() -> None:
    """Entry point of `accelerate-spot`."""
    app()
