from __future__ import annotations

import logging

import pytest

from spot_core.signals.base import LookFailed
from spot_core.signals.metadata import MetadataClient
from spot_core.testing.metadata import FakeTencent


def test_requests_leave_no_line_in_the_log_and_keep_their_connection(caplog):
    with FakeTencent() as server, caplog.at_level(logging.INFO):
        client = MetadataClient(server.url, headers={"A": "1"})
        for _ in range(3):
            response = client.request("GET", "/latest/meta-data/instance-id", params={"q": "x y"}, headers={"B": "2"})
            assert (response.status_code, response.text) == (200, "ins-fake")
        client.close()
        assert server.connections == 1
        assert server.requests[0].query == {"q": "x y"}
        assert {"a": "1", "b": "2"}.items() <= server.requests[0].headers.items()
    assert caplog.records == []


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "http://no-such-host.invalid", "no url at all"])
def test_no_answer_is_one_kind_of_error(url):
    client = MetadataClient(url, timeout_s=0.5)
    with pytest.raises(LookFailed, match="GET"):
        client.request("GET", "/x")
    client.close()


def test_a_redirect_is_not_followed():
    with FakeTencent() as server:
        server.fail(302)
        assert MetadataClient(server.url).request("GET", "/x").status_code == 302
