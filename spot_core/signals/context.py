"""What a plugin gets, and what a plugin is: the contract of the entry point group ``spot_core.sources``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from spot_core.clock import SYSTEM_CLOCK, Clock
from spot_core.signals.base import Source


@dataclass(frozen=True)
class Context:
    """Everything a plugin may look at."""

    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    clock: Clock = SYSTEM_CLOCK
    grace_s: float = 30.0
    """Seconds between a signal and the end of the process."""
    argument: str = ""
    """The part behind the colon in the list of sources: ``file:/tmp/stop``."""
    found: str = ""
    """What the probe answered, empty when the source was named and not probed for."""
    probe_s: float = 1.0
    """Time-out of one request of a probe."""


@dataclass(frozen=True)
class Plugin:
    """One name in the list of sources. Third parties register an instance in the entry point group
    ``spot_core.sources``.

    ``probe`` answers a few words when the platform is here and None when it is not; it may raise and may take up to a
    second or two, since it runs in a thread of its own. Without a probe the source is opened only when named.
    ``vendors`` are the hardware vendor or product strings (DMI) of the platform: on a machine that names itself, other
    platforms are not probed for. ``endpoint_env`` names a variable that moves the service's address; when it is set the
    platform is probed for whatever the hardware says.
    """

    name: str
    make: Callable[[Context], Sequence[Source]]
    probe: Callable[[Context], str | None] | None = None
    vendors: tuple[str, ...] = ()
    endpoint_env: str = ""
    per_node: bool = True
