from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from ._cluster import DAEMONS, Cluster, install, missing


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A running Slurm; SPOT_TEST_SLURM=1 allows it to be installed where it is missing."""
    if os.geteuid() != 0:
        pytest.skip("Slurm's daemons run as root here")
    if missing():
        if os.environ.get("SPOT_TEST_SLURM") != "1":
            pytest.skip(f"no {', '.join(missing())} ({', '.join(DAEMONS)} are needed); SPOT_TEST_SLURM=1 installs them")
        install()
        assert missing() == []
    cluster = Cluster(tmp_path_factory.mktemp("slurm"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
