from __future__ import annotations

import socket
from pathlib import Path

import pytest

from steersman.host import facts
from steersman.host.process import set_oom_score_adjustment


@pytest.mark.parametrize(
    ("listed", "disabled", "expected"),
    [(True, "0", True), (True, "1", False), (False, "0", False), (True, None, True)],
)
def test_ipv6_is_there_unless_absent_or_disabled(
    tmp_path: Path, listed: bool, disabled: str | None, expected: bool
) -> None:
    (tmp_path / "net").mkdir()
    (tmp_path / "sys/net/ipv6/conf/all").mkdir(parents=True)
    if listed:
        (tmp_path / "net/if_inet6").touch()
    if disabled is not None:
        (tmp_path / "sys/net/ipv6/conf/all/disable_ipv6").write_text(f"{disabled}\n")
    assert facts.has_ipv6(tmp_path) is expected


def test_the_hostname_is_made_a_node_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: " Node-1.Example ")
    assert facts.hostname() == "node-1.example"


def test_the_oom_score_is_set_or_the_reason_told(tmp_path: Path) -> None:
    assert "could not be set to -999: No such file" in set_oom_score_adjustment(-999, tmp_path)
    (tmp_path / "self").mkdir()
    assert set_oom_score_adjustment(-999, tmp_path) == ""
    assert (tmp_path / "self/oom_score_adj").read_text() == "-999"
