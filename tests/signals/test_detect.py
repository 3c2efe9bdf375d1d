from __future__ import annotations

import logging
import threading
from importlib.metadata import EntryPoint

import pytest

from spot_core.errors import ConfigError
from spot_core.signals import BaseSource, Plugin, detect, parse, sources
from spot_core.testing.metadata import FakeAlibaba, FakeAws, FakeAzure, FakeGcp, FakeTencent

NOWHERE = "http://127.0.0.1:9"
OFF = {
    "AWS_EC2_METADATA_SERVICE_ENDPOINT": NOWHERE,
    "GCE_METADATA_HOST": "127.0.0.1:9",
    "SPOT_AZURE_METADATA": NOWHERE,
    "SPOT_ALIBABA_METADATA": NOWHERE,
    "SPOT_TENCENT_METADATA": NOWHERE,
}


def names(spec="auto", **kwargs):
    made = sources(spec, **{"env": OFF, **kwargs})
    found = [source.name for source in made]
    for source in made:
        source.close()
    return found


def test_without_a_platform_signals_remain():
    assert names() == ["sigterm"]
    assert names(posix=False) == []


@pytest.mark.parametrize(
    ("fake", "variable", "expected"),
    [
        (FakeAws, "AWS_EC2_METADATA_SERVICE_ENDPOINT", ["aws"]),
        (FakeGcp, "GCE_METADATA_HOST", ["gcp", "gcp-maintenance"]),
        (FakeAzure, "SPOT_AZURE_METADATA", ["azure"]),
        (FakeAlibaba, "SPOT_ALIBABA_METADATA", ["alibaba"]),
        (FakeTencent, "SPOT_TENCENT_METADATA", ["tencent"]),
    ],
)
def test_every_platform_is_found_by_its_metadata_service(fake, variable, expected, caplog):
    with fake() as server, caplog.at_level(logging.INFO):
        env = {**OFF, variable: server.host if variable == "GCE_METADATA_HOST" else server.url}
        assert names(env=env) == ["sigterm", *expected]
        # Only the machine's first rank asks the service.
        asked = len(server.requests)
        assert names(env=env, local_rank=1) == ["sigterm"]
        assert len(server.requests) == asked
    found, absent = caplog.messages[0].removeprefix("notice sources found: ").split("; not here: ")
    assert expected[0] in found
    assert expected[0] not in absent.split(", ")


def test_all_clouds_at_one_address_are_told_apart():
    """On the real address, EC2, Google and Azure answer on the same IP; each fake must be taken for itself only."""
    for fake, expected in ((FakeAws, "aws"), (FakeGcp, "gcp"), (FakeAzure, "azure"), (FakeAlibaba, "alibaba")):
        with fake() as server:
            env = {name: server.host if name == "GCE_METADATA_HOST" else server.url for name in OFF}
            found = names(env=env, posix=False)
        assert expected in found
        assert not {"aws", "gcp", "azure"} & set(found) - {expected}


def test_a_service_that_never_answers_delays_the_start_only_a_little(monkeypatch):
    monkeypatch.setattr(detect, "PROBE_S", 0.3)
    with FakeAws() as server:
        server.hang()
        done = threading.Event()
        env = {**OFF, "AWS_EC2_METADATA_SERVICE_ENDPOINT": server.url}
        thread = threading.Thread(target=lambda: (names(env=env, posix=False), done.set()), daemon=True)
        thread.start()
        assert done.wait(20)


def test_hardware_that_names_itself_spares_the_other_probes(monkeypatch, tmp_path):
    monkeypatch.setattr(detect, "DMI", tmp_path)
    (tmp_path / "sys_vendor").write_text("Google\n")
    asked = []
    monkeypatch.setattr(detect, "_ask", lambda plugins, context: asked.extend(p.name for p in plugins) or {})
    assert names(env={}) == []
    assert asked == ["signals", "file", "slurm", "gcp"]
    asked.clear()
    names(env={"SPOT_AZURE_METADATA": NOWHERE})
    assert asked == ["signals", "file", "slurm", "gcp", "azure"]


def test_aws_can_be_switched_off_like_in_the_sdk():
    with FakeAws() as server:
        env = {**OFF, "AWS_EC2_METADATA_SERVICE_ENDPOINT": server.url, "AWS_EC2_METADATA_DISABLED": "true"}
        assert names(env=env, posix=False) == []


def test_slurm_and_flag_file_come_from_the_environment(tmp_path):
    env = {**OFF, "SLURM_JOB_ID": "42", "SPOT_FLAG_FILE": str(tmp_path / "flag"), "SLURM_LOCALID": "0"}
    assert names(env=env) == ["sigterm", "file", "slurm"]
    assert names(env={**env, "SLURM_LOCALID": "1"}) == ["sigterm"]
    assert names(env={**env, "LOCAL_RANK": "1"}) == ["sigterm"]


def test_a_list_is_taken_as_it_is(tmp_path):
    assert names("aws,sigterm") == ["aws", "sigterm"]
    assert names("sigusr1, SIGTERM,sigusr1") == ["sigusr1+sigterm"]
    assert names("none") == []
    assert names(f"auto,file:{tmp_path}/stop") == ["sigterm", "file"]
    assert names("gcp", env={**OFF, "KUBERNETES_SERVICE_HOST": "x"}) == ["gcp", "gcp-maintenance"]


def test_the_grace_in_a_pod_is_the_smaller_one():
    made = sources("sigterm", grace_s=60, env={**OFF, "KUBERNETES_SERVICE_HOST": "x", "SPOT_POD_GRACE_S": "40"})
    assert made[0]._grace_s == 40
    made = sources("sigterm", grace_s=20, env={**OFF, "KUBERNETES_SERVICE_HOST": "x"})
    assert made[0]._grace_s == 20


@pytest.mark.parametrize("spec", ["asw", "aws,sigkill", "auto,gpc", "sigsegv"])
def test_an_unknown_name_is_an_error_that_lists_the_known(spec):
    with pytest.raises(ConfigError) as caught:
        parse(spec)
    text = str(caught.value)
    assert spec in text
    for name in ("auto", "aws", "gcp", "azure", "alibaba", "tencent", "slurm", "sigterm", "sigusr1", "file:"):
        assert name in text


@pytest.mark.parametrize("spec", ["", " , ", "file"])
def test_an_empty_list_and_a_file_without_path_are_errors(spec, monkeypatch):
    monkeypatch.delenv("SPOT_FLAG_FILE", raising=False)
    with pytest.raises(ConfigError):
        parse(spec)


class Own(BaseSource):
    name = "own"

    def look(self):
        return []


OWN = Plugin("own", lambda context: [Own(clock=context.clock)], lambda context: "here")
NO_PLUGIN = object()


@pytest.fixture
def entry_points(monkeypatch):
    def install(*entries):
        made = [EntryPoint(name, value, detect.GROUP) for name, value in entries]
        monkeypatch.setattr(detect, "entry_points", lambda group: [e for e in made if e.group == group])

    return install


def test_third_parties_add_sources(entry_points, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "own_plugin", sys.modules[__name__])
    entry_points(("own", "own_plugin:OWN"), ("aws", "own_plugin:OWN"), ("bad", "own_plugin:NO_PLUGIN"))
    assert "own" in detect.accepted()
    assert names("own") == ["own"]
    # A built-in name stays what it is.
    assert names("aws") == ["aws"]
    with pytest.raises(ConfigError, match="has to be a Plugin"):
        sources("bad", env=OFF)


def test_a_probe_with_a_fault_ends_nothing(entry_points, monkeypatch):
    import sys

    def broken(context):
        raise RuntimeError("no")

    module = type(sys)("broken_plugin")
    module.PLUGIN = Plugin("broken", lambda context: [], broken)
    monkeypatch.setitem(sys.modules, "broken_plugin", module)
    entry_points(("broken", "broken_plugin:PLUGIN"))
    assert names() == ["sigterm"]
