"""The `spot` command: one small file per sub-command, each with `register(app)`. Exit codes: `spot_core.cli.exits`."""

from __future__ import annotations

import typer

from spot_core.cli import doctor, exits, export, launch, ls, prune, show, verify, watch

__all__ = ["app", "main"]

app = typer.Typer(
    name="spot",
    cls=exits.ReportingGroup,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Look after runs that survive being killed. Exit codes: 0 done, 2 wrong call, 3 nothing there, 4 damaged, "
    "5 the store failed, 6 refused by a newer life.",
)
for _command in (ls, show, verify, prune, export, doctor, launch, watch):
    _command.register(app)


def main() -> None:
    """Entry point of `spot`."""
    app()
