"""A store that rank 0 hosts itself, for ranks whose default process group has none to share (MPI, a user's own class).

Only then: where the ranks met over a store of torch's, a clone of it needs no further port and no address.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import psutil
import torch.distributed as dist

from spot_core.errors import ConfigError
from spot_core.pytorch.ranks import Ranks

_REACH_S = 3.0
"""For one address to answer."""
_ANSWER_S = 30.0


def host_store(ranks: Ranks) -> Any:
    """Collective: a TCPStore on a free port of rank 0, which lives as long as what is returned there, on every rank.

    Raises ConfigError on every rank when one of them cannot reach it.
    """
    server: list[Any] = []

    def offer() -> tuple[str, list[str], int]:
        server.append(_tcp_store("localhost", 0, hosts=True))
        return socket.gethostname(), _addresses(), server[0].port

    name, addresses, port = ranks.from_first(offer)
    return ranks.together(lambda: server[0] if server else _join(name, addresses, port, ranks.rank))


def _join(name: str, addresses: Sequence[str], port: int, rank: int) -> Any:
    """The store of a host known by several addresses, over the first that answers."""
    same_machine = ["localhost"] if name == socket.gethostname() else []
    tried = []
    for address in (*same_machine, name, *addresses):
        try:
            socket.create_connection((address, port), timeout=_REACH_S).close()
        except OSError as error:
            tried.append(f"{address} ({error})")
            continue
        return _tcp_store(address, port, hosts=False)
    raise ConfigError(
        f"The store of the default process group cannot be cloned, and rank {rank} does not reach the one that rank 0 "
        f"hosts in its place on port {port} of {', '.join(tried)}.",
        hint="Let the ranks meet over one of torch's own stores (init_method='env://'), or name the interface that "
        "they reach each other by in GLOO_SOCKET_IFNAME.",
    )


def _tcp_store(host: str, port: int, *, hosts: bool) -> Any:
    timeout = timedelta(seconds=_ANSWER_S)
    return dist.TCPStore(host, port, None, hosts, wait_for_workers=False, timeout=timeout)  # type: ignore[attr-defined]


def _addresses() -> list[str]:
    """This machine's addresses that others may reach, those of gloo's own interface first."""
    chosen = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")
    found = []
    for interface, addresses in psutil.net_if_addrs().items():
        for each in addresses:
            if each.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            address = ipaddress.ip_address(each.address.partition("%")[0])
            if not (address.is_loopback or address.is_link_local):
                found.append((interface not in chosen, address.version, str(address)))
    return [text for _, _, text in sorted(found)]
