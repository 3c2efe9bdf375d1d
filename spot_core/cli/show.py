"""`spot show`: what one generation holds and what made it."""

from __future__ import annotations

import json as json_text

import typer

from spot_core.cli.generations import pick, referred, summary
from spot_core.cli.opening import open_run
from spot_core.cli.output import GenerationArgument, JsonOption, RunArgument, console, moment, print_json, size, table


def show(run: RunArgument, generation: GenerationArgument = None, json: JsonOption = False) -> None:
    """Show one generation: its objects with sizes and digests, and what made it.

    Exit codes: 0 shown, 3 no such generation, 4 it is damaged, 5 the store failed.
    """
    opened = open_run(run)
    committed = pick(opened, opened.discover(), generation)
    manifest = committed.manifest
    if json:
        print_json({"run": opened.uri, "generation": summary(committed), "manifest": manifest.to_json()})
        return
    out = console()
    facts = table("", "")
    facts.show_header = False
    facts.add_row("generation", committed.id.name)
    facts.add_row("run", f"{opened.uri} ({manifest.run_id})")
    facts.add_row("step", str(manifest.step))
    facts.add_row("life", str(manifest.life))
    facts.add_row("committed", moment(manifest.created))
    facts.add_row("ranks", str(manifest.world_size))
    facts.add_row("size", f"{size(manifest.size)} in {len(manifest.objects)} objects")
    if manifest.referred:
        facts.add_row("refers to", f"{referred(committed)}, which stay for it when those are pruned")
    for name, value in sorted(manifest.meta.items()):
        facts.add_row(name, value if isinstance(value, str) else json_text.dumps(value, sort_keys=True))
    out.print(facts, markup=False)
    out.print()
    objects = table("object", "size", "digest", right=("size",))
    for ref in manifest.objects:
        objects.add_row(ref.key, size(ref.size), ref.digest)
    out.print(objects)


def register(app: typer.Typer) -> None:
    app.command("show")(show)
