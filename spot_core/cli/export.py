"""`spot export`: a generation in a format that others read. The only command here that needs torch."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

from spot_core.cli.generations import pick
from spot_core.cli.opening import open_run
from spot_core.cli.output import GenerationArgument, JsonOption, RunArgument, console, print_json
from spot_core.errors import ConfigError


class Format(str, enum.Enum):
    """What a generation can be written as."""

    DCP = "dcp"
    TORCH = "torch"
    SAFETENSORS = "safetensors"


def export(
    run: RunArgument,
    generation: GenerationArgument = None,
    fmt: Annotated[
        Format, typer.Option("--format", help="dcp: a folder for torch.distributed.checkpoint; torch: one file.")
    ] = Format.TORCH,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="The new file or folder.")] = None,
    prefix: Annotated[
        str, typer.Option(help="Only what is below this dotted path, e.g. 'state_dict.' for a Lightning run's weights.")
    ] = "",
    json: JsonOption = False,
) -> None:
    """Write a generation, its digests checked on the way, as DCP, torch.save or safetensors.

    Exit codes: 0 written, 2 the target is missing or exists, or torch is not installed, 3 no such generation,
    4 it is damaged, 5 the store failed.
    """
    if out is None:
        raise ConfigError("Say where to write.", hint="Give --out PATH.")
    if out.exists():
        raise ConfigError(f"{out} exists; an export never replaces anything.", hint="Choose a new name.")
    opened = open_run(run)
    committed = pick(opened, opened.discover(), generation)
    try:
        from spot_core.pytorch.export import export as write
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "safetensors", "numpy"):
            raise
        raise ConfigError(
            f"An export needs {error.name}, which is not installed.", hint="pip install 'lightning-spot[torch]'"
        ) from error
    write(opened, committed, out, fmt=fmt.value, prefix=prefix)
    if json:
        print_json({"run": opened.uri, "generation": committed.id.name, "format": fmt.value, "out": str(out)})
    else:
        console().print(f"Wrote generation {committed.id} as {fmt.value} to {out}.", markup=False)


def register(app: typer.Typer) -> None:
    app.command("export")(export)
