"""Tencent Cloud CVM: the termination time of a spot instance.

Protocol: Tencent Cloud documentation 213/32487. There is no token, and the time is in UTC+8.
"""

from __future__ import annotations

from spot_core.clock import SYSTEM_CLOCK, Clock
from spot_core.signals.context import Context, Plugin
from spot_core.signals.ec2_like import Dialect, Ec2LikeClient, TerminationTime, utc8

BASE_URL = "http://metadata.tencentyun.com"
PATH = "/latest/meta-data/spot/termination-time"
ENDPOINT_ENV = "SPOT_TENCENT_METADATA"


def tencent(
    base_url: str = BASE_URL, *, clock: Clock = SYSTEM_CLOCK, every_s: float = 5.0, timeout_s: float = 2.0
) -> TerminationTime:
    """The source. The time is local to UTC+8, ``2018-08-18 12:05:33``."""
    return TerminationTime(Dialect("tencent", base_url), PATH, utc8, clock=clock, every_s=every_s, timeout_s=timeout_s)


def _base_url(context: Context) -> str:
    return context.env.get(ENDPOINT_ENV, BASE_URL)


def _probe(context: Context) -> str | None:
    client = Ec2LikeClient(Dialect("tencent", _base_url(context)), clock=context.clock, timeout_s=context.probe_s)
    try:
        return client.get("/latest/meta-data/instance-id")
    finally:
        client.close()


def _make(context: Context) -> list[TerminationTime]:
    return [tencent(_base_url(context), clock=context.clock)]


PLUGIN = Plugin("tencent", _make, _probe, vendors=("Tencent Cloud",), endpoint_env=ENDPOINT_ENV)
