"""From a list of names, or from looking around, to sources."""

from __future__ import annotations

import importlib
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from queue import Empty, SimpleQueue

from spot_core.clock import SYSTEM_CLOCK, Clock
from spot_core.errors import ConfigError
from spot_core.signals import kubernetes
from spot_core.signals.base import Source
from spot_core.signals.context import Context, Plugin
from spot_core.signals.posix_signals import ACCEPTED

logger = logging.getLogger(__name__)

GROUP = "spot_core.sources"
BUILT_IN = ("signals", "file", "slurm", "aws", "gcp", "azure", "alibaba", "tencent")
PROBE_S = 2.0
"""How long all probes together may take; they run side by side."""
DMI = Path("/sys/class/dmi/id")
_MODULES = {"signals": "posix_signals", "file": "flag_file", "azure": "azure_events"}


def third_party() -> dict[str, EntryPoint]:
    """Installed plugins by name. A built-in name cannot be replaced."""
    return {entry.name: entry for entry in entry_points(group=GROUP) if entry.name not in BUILT_IN}


def accepted() -> list[str]:
    """Every name that a list of sources may hold."""
    return ["auto", "none", *BUILT_IN, *(name.lower() for name in ACCEPTED), *sorted(third_party())]


def parse(spec: str) -> tuple[str, ...]:
    """The names in ``"aws,sigterm"``, checked, each once.

    Raises ConfigError for an unknown name, naming those that are known.
    """
    items = tuple(dict.fromkeys(item.strip() for item in spec.split(",") if item.strip()))
    known = accepted()
    for item in items:
        name = item.partition(":")[0].lower()
        if name not in known:
            raise ConfigError(
                f"There is no notice source {name!r} (in {spec!r}).",
                hint=f"Accepted, joined by commas: {', '.join(known)}; file takes a path: file:/path/to/flag.",
            )
        if name == "file" and ":" not in item and not os.environ.get("SPOT_FLAG_FILE"):
            raise ConfigError(
                "The notice source 'file' needs a path.", hint="Write file:/path/to/flag or set SPOT_FLAG_FILE."
            )
    if not items:
        raise ConfigError("The list of notice sources is empty.", hint="Write 'auto', or 'none' to watch nothing.")
    return items


def sources(
    spec: str = "auto",
    *,
    local_rank: int | None = None,
    grace_s: float = 30.0,
    clock: Clock = SYSTEM_CLOCK,
    env: Mapping[str, str] | None = None,
    posix: bool = True,
) -> list[Source]:
    """The sources of this process: those of the machine on local rank 0 only, signals on every rank.

    ``spec`` is ``"auto"``, ``"none"``, or names joined by commas (``"auto,file:/tmp/stop"`` adds to the detected
    ones). ``local_rank`` None: from LOCAL_RANK, SLURM_LOCALID, or 0. ``posix`` False leaves signals out (a watcher
    beside the job). In a pod the grace is at most the pod's. Raises ConfigError for an unknown name.
    """
    env = os.environ if env is None else env
    items = parse(spec)
    if local_rank is None:
        local_rank = int(env.get("LOCAL_RANK") or env.get("SLURM_LOCALID") or 0)
    pod_grace_s = kubernetes.grace_s(env)
    if pod_grace_s is not None:
        grace_s = min(grace_s, pod_grace_s)
    context = Context(env=env, clock=clock, grace_s=grace_s)
    wanted: dict[str, tuple[Plugin, Context]] = {}
    for item in items:
        if item == "auto":
            for plugin, answer in _detected(context, local_rank).items():
                wanted.setdefault(plugin.name, (plugin, _with(context, found=answer)))
        elif item != "none":
            name, _, argument = item.partition(":")
            if name.upper() in ACCEPTED:
                # All signals share one descriptor, so they are one source.
                _, earlier = wanted.get("signals", (None, context))
                name, argument = "signals", "+".join(filter(None, (earlier.argument, name)))
            wanted[name] = (load(name), _with(context, argument=argument))
    if not posix and any(i.partition(":")[0].upper() in {"SIGNALS", *ACCEPTED} for i in items):
        raise ConfigError(
            f"Signals cannot be watched here (in {spec!r}).", hint="They would reach the watcher, not the job."
        )
    made: list[Source] = []
    for plugin, its_context in wanted.values():
        if (plugin.per_node and local_rank != 0) or (plugin.name == "signals" and not posix):
            continue
        made += plugin.make(its_context)
    return made


def load(name: str) -> Plugin:
    """The plugin of a built-in or third-party name. Raises ConfigError when it is no plugin."""
    entry = third_party().get(name)
    if entry is None:
        plugin = importlib.import_module(f"spot_core.signals.{_MODULES.get(name, name)}").PLUGIN
    else:
        plugin = entry.load()
    if not isinstance(plugin, Plugin):
        raise ConfigError(f"The entry point {name!r} of group {GROUP} is {plugin!r}.", hint="It has to be a Plugin.")
    return plugin


def _with(context: Context, *, argument: str = "", found: str = "") -> Context:
    return Context(context.env, context.clock, context.grace_s, argument, found)


def _detected(context: Context, local_rank: int) -> dict[Plugin, str]:
    """The plugins whose platform is here, in the order of their names' list, with what their probe answered."""
    vendor = _vendor()
    asked: list[Plugin] = []
    for name in (*BUILT_IN, *third_party()):
        plugin = load(name)
        moved = bool(plugin.endpoint_env and context.env.get(plugin.endpoint_env))
        elsewhere = bool(plugin.vendors and vendor and not any(v in vendor for v in plugin.vendors))
        if plugin.probe is None or (plugin.per_node and local_rank != 0) or (elsewhere and not moved):
            continue
        asked.append(plugin)
    answers = _ask(asked, context)
    here = {plugin: answers[plugin.name] for plugin in asked if answers.get(plugin.name)}
    logger.info(
        "notice sources found: %s; not here: %s",
        ", ".join(f"{plugin.name} ({answer})" for plugin, answer in here.items()) or "none",
        ", ".join(sorted({*BUILT_IN, *third_party()} - {plugin.name for plugin in here})) or "none",
    )
    return here


def _ask(plugins: Sequence[Plugin], context: Context) -> dict[str, str]:
    """Run all probes side by side, each in a daemon thread: a name server that hangs costs `PROBE_S`, not the start."""
    replies: SimpleQueue[tuple[str, str | None]] = SimpleQueue()

    def ask(plugin: Plugin) -> None:
        answer = None
        try:
            answer = plugin.probe(context) if plugin.probe else None
        except Exception as error:
            # Nothing there is the usual case; a probe's own fault must not end the start either.
            logger.debug("probe for %s: %s", plugin.name, error, exc_info=True)
        replies.put((plugin.name, answer))

    for plugin in plugins:
        threading.Thread(target=ask, args=(plugin,), name=f"spot-probe-{plugin.name}", daemon=True).start()
    ends = SYSTEM_CLOCK.monotonic() + PROBE_S
    answers: dict[str, str] = {}
    for _ in plugins:
        try:
            name, answer = replies.get(timeout=max(0.0, ends - SYSTEM_CLOCK.monotonic()))
        except Empty:
            logger.debug("some probes did not answer within %.1f s", PROBE_S)
            break
        if answer:
            answers[name] = answer
    return answers


def _vendor() -> str:
    """What the hardware says it is; empty where it does not say (containers that hide it)."""
    words = []
    for name in ("sys_vendor", "product_name"):
        try:
            words.append((DMI / name).read_text(encoding="utf-8", errors="replace").strip())
        except OSError:
            continue
    return " ".join(words)
