"""Fake metadata services of the clouds, on a free port of this machine, with their error cases.

    with FakeAws() as aws:
        source = AwsSource(aws.url)
        aws.interrupt("terminate", at=clock.now() + 120)

They keep to the documented protocols, also where those are awkward, and break on demand: see `MetadataServer`.
"""

from __future__ import annotations

from spot_core.testing.metadata.azure_events import FakeAzure
from spot_core.testing.metadata.ec2_like import FakeAlibaba, FakeAws, FakeTencent
from spot_core.testing.metadata.gcp import FakeGcp
from spot_core.testing.metadata.server import MetadataServer, Reply, Request

__all__ = ["FakeAlibaba", "FakeAws", "FakeAzure", "FakeGcp", "FakeTencent", "MetadataServer", "Reply", "Request"]
