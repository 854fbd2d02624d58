from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from steersman.host import sysctl
from steersman.host.sysctl import ConntrackConfig, Setting, SysctlError

MAX = "proc/sys/net/netfilter/nf_conntrack_max"
HASHSIZE = "sys/module/nf_conntrack/parameters/hashsize"


@pytest.mark.parametrize(
    ("per_core", "minimum", "cpus", "expected"),
    [
        (None, 5, 4, 0),
        (0, 5, 4, 0),
        (-1, 5, 4, 0),
        (10, None, 4, 40),
        (10, 100, 4, 100),
        (32768, 131072, 2, 131072),
        (32768, 131072, 8, 262144),
        (32768, 131072, 33, 1 << 20),
        (32768, 1 << 21, 33, 1 << 20),  # the cap wins over the minimum
        (32768, 1 << 21, 32, 1 << 21),
    ],
)
def test_the_table_size_follows_the_cores(
    per_core: int | None, minimum: int | None, cpus: int, expected: int
) -> None:
    assert sysctl.conntrack_max(per_core, minimum, cpus) == expected


def test_everything_asked_for_comes_in_order() -> None:
    config = ConntrackConfig(1000, 1, 86400, 3600.9, True, 30, 120)
    names = "proc/sys/net/netfilter/nf_conntrack_"
    assert sysctl.conntrack_settings(config, 4) == (
        Setting(MAX, 4000),
        Setting(HASHSIZE, 1000, at_least=True, read_only_is_fatal=False),
        Setting(f"{names}tcp_timeout_established", 86400),
        Setting(f"{names}tcp_timeout_close_wait", 3600),
        Setting(f"{names}tcp_be_liberal", 1),
        Setting(f"{names}udp_timeout", 30),
        Setting(f"{names}udp_timeout_stream", 120),
    )
    assert sysctl.conntrack_settings(ConntrackConfig(udp_timeout=0), 4) == ()


def test_modes_ask_for_what_they_need() -> None:
    assert sysctl.iptables_settings(False) == ()
    assert sysctl.iptables_settings(True) == (
        Setting("proc/sys/net/ipv4/conf/all/route_localnet", 1),
    )
    new = sysctl.ipvs_settings((6, 1), strict_arp=True)
    assert [Path(s.path).name for s in new] == [
        "conntrack",
        "expire_nodest_conn",
        "expire_quiescent_template",
        "ip_forward",
        "arp_ignore",
        "arp_announce",
    ]
    for kernel, named in (((4, 0), False), ((4, 1), True), ((5, 8), True), ((5, 9), False)):
        settings = sysctl.ipvs_settings(kernel, strict_arp=False)
        assert any(s.path.endswith("conn_reuse_mode") for s in settings) is named
        assert not any("arp" in s.path for s in settings)


def _tree(root: Path, **values: str) -> Path:
    for path, value in values.items():
        (root / path).write_text(value)
    return root


def test_only_what_differs_is_written(tmp_path: Path) -> None:
    _tree(tmp_path, same="7\n", other="1\n", more="9\n", less="1\n")
    (tmp_path / "same").chmod(0o400)
    settings = (
        Setting("same", 7),
        Setting("other", 2),
        Setting("more", 3, at_least=True),
        Setting("less", 3, at_least=True),
    )
    written = {name: (tmp_path / name).stat().st_mtime_ns for name in ("same", "more")}
    assert sysctl.apply(settings, tmp_path) == ()
    assert {name: (tmp_path / name).stat().st_mtime_ns for name in written} == written
    assert [sysctl.read(n, tmp_path) for n in ("same", "other", "more", "less")] == [7, 2, 9, 3]
    times = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert sysctl.apply(settings, tmp_path) == ()
    assert {path: path.stat().st_mtime_ns for path in times} == times


def test_the_first_error_stops(tmp_path: Path) -> None:
    _tree(tmp_path, good="1", junk="many\n")
    with pytest.raises(SysctlError, match=r"/absent cannot be read.*No such file"):
        sysctl.apply((Setting("absent", 1), Setting("good", 2)), tmp_path)
    with pytest.raises(SysctlError, match="/junk cannot be read"):
        sysctl.apply((Setting("junk", 1),), tmp_path)
    assert sysctl.read("good", tmp_path) == 1


def _refuse(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def write_text(self: Path, _text: str) -> int:
        raise OSError(code, "refused")

    monkeypatch.setattr(Path, "write_text", write_text)


def test_a_read_only_sys_is_a_warning_where_runtimes_are_known_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _tree(tmp_path, it="1")
    soft = Setting("it", 2, read_only_is_fatal=False)
    _refuse(monkeypatch, errno.EROFS)
    (warning,) = sysctl.apply((soft,), tmp_path)
    assert "/it cannot be set to 2: refused" in warning
    with pytest.raises(SysctlError, match="/it cannot be set to 2"):
        sysctl.apply((Setting("it", 2),), tmp_path)
    _refuse(monkeypatch, errno.EACCES)
    with pytest.raises(SysctlError, match="/it cannot be set to 2"):
        sysctl.apply((soft,), tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes somebody else")
def test_what_cannot_be_read_for_want_of_rights_is_a_sentence(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("1")
    secret.chmod(0o600)
    tmp_path.chmod(0o755)
    os.seteuid(65534)
    try:
        with pytest.raises(SysctlError) as refused:
            sysctl.read("secret", tmp_path)
    finally:
        os.seteuid(0)
    assert str(refused.value) in ("/secret cannot be read: Permission denied; this needs root",)
