"""`spot ls`: the generations of a run. Looks only: it claims nothing and writes nothing."""

from __future__ import annotations

import typer

from spot_core.cli import exits
from spot_core.cli.generations import nothing_there, problem_json, referred, summary
from spot_core.cli.opening import open_run
from spot_core.cli.output import JsonOption, RunArgument, age, console, print_json, size, table


def ls(run: RunArgument, json: JsonOption = False) -> None:
    """List the generations of a run, newest first. Has no effect on the run.

    Exit codes: 0 there is one, 3 there is none, 4 there are only damaged ones, 5 the store failed.
    """
    opened = open_run(run)
    record = opened.record()
    found = opened.discover()
    if json:
        print_json(
            {
                "run": opened.uri,
                "run_id": None if record is None else record.run_id,
                "generations": [summary(item) for item in found.generations],
                "problems": [problem_json(item) for item in found.problems],
                "lenders": [{"name": item.id.name, "objects": list(item.keys)} for item in found.lenders],
            }
        )
    else:
        now = opened.clock.now()
        numbers = ("step", "life", "ranks", "size")
        refers = any(committed.manifest.referred for committed in found.generations)
        last = ("refers to",) if refers else ()
        rows = table("generation", "step", "life", "age", "ranks", "size", "why", *last, right=numbers)
        for committed in found.generations:
            item = summary(committed)
            why = "finished" if item["finished"] else str(item["reason"] or "")
            rows.add_row(
                item["name"],
                str(item["step"]),
                str(item["life"]),
                age(now - item["created"]),
                str(item["world_size"]),
                size(item["own_bytes"]),
                why,
                *([referred(committed)] if refers else []),
            )
        out = console()
        if found.generations:
            out.print(rows)
        else:
            out.print(nothing_there(opened), markup=False)
        for lender in found.lenders:
            told = f"{lender.id} was pruned; {len(lender.keys)} objects stay, which later generations refer to."
            out.print(told, markup=False)
        for problem in found.problems:
            out.print(f"{problem.kind.value}: {problem.message}", markup=False)
    if not found.generations:
        damaged = any(problem.kind.blocks_fresh_start for problem in found.problems)
        raise typer.Exit(exits.DAMAGED if damaged else exits.NOTHING)


def register(app: typer.Typer) -> None:
    app.command("ls")(ls)
