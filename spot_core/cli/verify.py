"""`spot verify`: are the generations whole?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from spot_core import layout
from spot_core.cli import exits
from spot_core.cli.generations import nothing_there, pick, problem_json
from spot_core.cli.opening import open_run
from spot_core.cli.output import GenerationArgument, JsonOption, RunArgument, console, print_json, table
from spot_core.errors import RestoreError, SpotError, StoreError, TransientStoreError
from spot_core.generation import Committed
from spot_core.run import Run
from spot_core.verify import Depth

DepthOption = Annotated[
    Depth,
    typer.Option(help="How deep to look: the marker, the size of every object, or every byte (reads everything)."),
]


@dataclass(frozen=True)
class Verdict:
    committed: Committed
    error: SpotError | None

    @property
    def told(self) -> str:
        return "ok" if self.error is None else str(self.error.reason.value)


def verify(
    run: RunArgument, generation: GenerationArgument = None, depth: DepthOption = Depth.SIZES, json: JsonOption = False
) -> None:
    """Verify one generation, or all of them when none is named.

    Exit codes: 0 all whole, 3 nothing there, 4 damage, 5 the store failed.
    """
    opened = open_run(run)
    found = opened.discover()
    chosen = found.generations if generation is None else (pick(opened, found, generation),)
    verdicts = [verdict for item in chosen if (verdict := look(opened, item, depth)) is not None]
    # Damage to markers counts as well, unless another generation was asked about.
    damage = [item for item in found.problems if generation is None and item.kind.blocks_fresh_start]
    if json:
        print_json(
            {
                "run": opened.uri,
                "depth": depth.value,
                "generations": [
                    {
                        "name": item.committed.id.name,
                        "ok": item.error is None,
                        "reason": None if item.error is None else item.error.reason.value,
                        "message": None if item.error is None else str(item.error),
                    }
                    for item in verdicts
                ],
                "problems": [problem_json(item) for item in found.problems],
            }
        )
    else:
        _print(opened, verdicts, depth)
        for problem in damage:
            console().print(f"{problem.kind.value}: {problem.message}", markup=False)
    raise typer.Exit(_code(verdicts, bool(damage)))


def look(run: Run, committed: Committed, depth: Depth) -> Verdict | None:
    """None when the generation was pruned while it was being looked at: then it is not damaged, but gone.

    Raises TransientStoreError: nothing can be said about any generation now.
    """
    try:
        run.verify(committed, depth)
    except TransientStoreError:
        raise
    except (RestoreError, StoreError) as error:
        if run.store.stat(layout.tombstone_key(committed.id)) is not None:
            return None
        return Verdict(committed, error)
    return Verdict(committed, None)


def _print(run: Run, verdicts: list[Verdict], depth: Depth) -> None:
    out = console()
    if not verdicts:
        out.print(nothing_there(run), markup=False)
        return
    rows = table("generation", "verified", "result", "what")
    for item in verdicts:
        rows.add_row(
            item.committed.id.name, depth.value, item.told, "" if item.error is None else item.error.message
        )
    out.print(rows, markup=False)


def _code(verdicts: list[Verdict], damage: bool) -> int:
    if damage or any(isinstance(item.error, RestoreError) for item in verdicts):
        return exits.DAMAGED
    if any(item.error is not None for item in verdicts):
        return exits.STORE
    return exits.OK if verdicts else exits.NOTHING


def register(app: typer.Typer) -> None:
    app.command("verify")(verify)
