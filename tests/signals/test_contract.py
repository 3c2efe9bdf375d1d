"""Every built-in source against the contract that ships for third parties."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest

from spot_core.signals import FlagFile, Source
from spot_core.signals.alibaba import alibaba
from spot_core.signals.aws import AwsSource
from spot_core.signals.azure_events import AzureSource
from spot_core.signals.gcp import GcpMaintenance, GcpPreempted
from spot_core.signals.tencent import tencent
from spot_core.testing.metadata import FakeAlibaba, FakeAws, FakeAzure, FakeGcp, FakeTencent, MetadataServer
from spot_core.testing.sources import SourceContract


class _OverHttp(SourceContract):
    fake: type[MetadataServer]

    @pytest.fixture(autouse=True)
    def _serve(self) -> Iterator[None]:
        with self.fake() as self.server:
            yield

    def break_service(self) -> None:
        self.server.fail(503, times=10**6)

    def repair_service(self) -> None:
        self.server.heal()


class TestAws(_OverHttp):
    fake = FakeAws

    def make(self) -> Source:
        return AwsSource(self.server.url)

    def announce(self) -> None:
        self.server.interrupt("terminate", time.time() + 120)


class TestAlibaba(_OverHttp):
    fake = FakeAlibaba

    def make(self) -> Source:
        return alibaba(self.server.url)

    def announce(self) -> None:
        self.server.terminate(time.time() + 300)


class TestTencent(_OverHttp):
    fake = FakeTencent

    def make(self) -> Source:
        return tencent(self.server.url)

    def announce(self) -> None:
        self.server.terminate(time.time() + 120)


class TestGcpPreempted(_OverHttp):
    fake = FakeGcp

    def make(self) -> Source:
        return GcpPreempted(self.server.url, wait_s=0.1)

    def announce(self) -> None:
        self.server.preempt()


class TestGcpMaintenance(_OverHttp):
    fake = FakeGcp

    def make(self) -> Source:
        return GcpMaintenance(self.server.url, wait_s=0.1)

    def announce(self) -> None:
        self.server.maintenance("TERMINATE_ON_HOST_MAINTENANCE")


class TestAzure(_OverHttp):
    fake = FakeAzure

    def make(self) -> Source:
        return AzureSource(self.server.url)

    def announce(self) -> None:
        self.server.schedule("event-1", "Preempt", time.time() + 30)


class TestFlagFile(SourceContract):
    @pytest.fixture(autouse=True)
    def _path(self, tmp_path) -> None:
        self.path = tmp_path / "flag"

    def make(self) -> Source:
        return FlagFile(self.path)

    def announce(self) -> None:
        notice = {"id": "mine", "kind": "preemption", "source": "me", "deadline": time.time() + 60, "detail": ""}
        self.path.write_text(json.dumps(notice))

    def break_service(self) -> None:
        # A link to itself: looking at it is an error, not "no file".
        self.path.symlink_to(self.path)

    def repair_service(self) -> None:
        self.path.unlink()
