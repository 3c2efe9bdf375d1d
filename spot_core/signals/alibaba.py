"""Alibaba Cloud ECS: the termination time of a preemptible instance.

Protocol: Alibaba Cloud documentation, "Best practices for preemptible instances".
"""

from __future__ import annotations

from spot_core.clock import SYSTEM_CLOCK, Clock
from spot_core.signals.context import Context, Plugin
from spot_core.signals.ec2_like import Dialect, Ec2LikeClient, TerminationTime, utc

BASE_URL = "http://100.100.100.200"
PATH = "/latest/meta-data/instance/spot/termination-time"
ENDPOINT_ENV = "SPOT_ALIBABA_METADATA"


def dialect(base_url: str = BASE_URL) -> Dialect:
    return Dialect(
        name="alibaba",
        base_url=base_url,
        token_path="/latest/api/token",
        ttl_header="X-aliyun-ecs-metadata-token-ttl-seconds",
        token_header="X-aliyun-ecs-metadata-token",
    )


def alibaba(
    base_url: str = BASE_URL, *, clock: Clock = SYSTEM_CLOCK, every_s: float = 5.0, timeout_s: float = 2.0
) -> TerminationTime:
    """The source. The time is UTC, ``2015-01-05T18:02:00Z``."""
    return TerminationTime(dialect(base_url), PATH, utc, clock=clock, every_s=every_s, timeout_s=timeout_s)


def _base_url(context: Context) -> str:
    return context.env.get(ENDPOINT_ENV, BASE_URL)


def _probe(context: Context) -> str | None:
    client = Ec2LikeClient(dialect(_base_url(context)), clock=context.clock, timeout_s=context.probe_s)
    try:
        return client.get("/latest/meta-data/instance-id")
    finally:
        client.close()


def _make(context: Context) -> list[TerminationTime]:
    return [alibaba(_base_url(context), clock=context.clock)]


PLUGIN = Plugin("alibaba", _make, _probe, vendors=("Alibaba Cloud",), endpoint_env=ENDPOINT_ENV)
