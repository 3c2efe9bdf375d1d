from __future__ import annotations

import pytest

from spot_core.signals.kubernetes import grace_s, write_termination_log

POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}


def test_outside_a_pod_there_is_no_grace_period(tmp_path):
    assert grace_s({"SPOT_POD_GRACE_S": "60"}, tmp_path / "none") is None


def test_variable_then_annotation_then_the_default(tmp_path):
    podinfo = tmp_path / "annotations"
    assert grace_s(POD, podinfo) == 30.0
    podinfo.write_text('kubernetes.io/config.seen="now"\nspot/grace-s="90"\n')
    assert grace_s(POD, podinfo) == 90.0
    assert grace_s({**POD, "SPOT_POD_GRACE_S": "45"}, podinfo) == 45.0


@pytest.mark.parametrize("text", ["soon", "-1", "0"])
def test_nonsense_is_passed_over(tmp_path, text):
    assert grace_s({**POD, "SPOT_POD_GRACE_S": text}, tmp_path / "none") == 30.0


def test_the_termination_log_is_replaced_and_bounded(tmp_path):
    log = tmp_path / "termination-log"
    assert write_termination_log("x", log) is False
    assert not log.exists()
    log.write_text("what was there before, and longer")
    assert write_termination_log("stopped cleanly at step 7", log) is True
    assert log.read_text() == "stopped cleanly at step 7"
    write_termination_log("é" * 4000, log)
    assert log.stat().st_size == 4096
