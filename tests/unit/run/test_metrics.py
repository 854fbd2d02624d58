from __future__ import annotations

import re

import pytest

from steersman.model.names import Family
from steersman.run.metrics import (
    NFACCT,
    OURS,
    PROGRAMMING_BUCKETS,
    SYNC_BUCKETS,
    UPSTREAM,
    Metrics,
    conntrack_usage,
    nfacct_packets,
)


def text(metrics: Metrics) -> str:
    return metrics.render()[0].decode()


def types(metrics: Metrics) -> dict[str, str]:
    return dict(re.findall(r"^# TYPE (\S+) (\S+)$", text(metrics), re.MULTILINE))


@pytest.mark.parametrize("mode", ["iptables", "nftables", "ipvs", "ebpf"])
def test_each_mode_has_its_metrics_under_upstreams_names_and_types(mode: str) -> None:
    found = types(Metrics(mode))
    for row in UPSTREAM:
        expected = row.kind if not row.modes or mode in row.modes else None
        assert found.get(f"kubeproxy_{row.name}") == expected
    for row in OURS:
        assert found[f"steersman_{row.name}"] == row.kind
    assert "process_resident_memory_bytes" in found
    assert not any(name.endswith("_created") for name in found)


def test_buckets_are_upstreams() -> None:
    assert SYNC_BUCKETS[0] == 0.001
    assert SYNC_BUCKETS[-1] == pytest.approx(16.384)
    assert len(SYNC_BUCKETS) == 15
    assert PROGRAMMING_BUCKETS[:4] == (0.25, 0.5, 1, 2)
    assert PROGRAMMING_BUCKETS[59:63] == (58, 59, 60, 65)
    assert PROGRAMMING_BUCKETS[-8:] == (115, 120, 150, 180, 210, 240, 270, 300)
    assert list(PROGRAMMING_BUCKETS) == sorted(set(PROGRAMMING_BUCKETS))


def test_values_go_where_they_belong() -> None:
    metrics = Metrics("iptables", [Family.IPV4])
    metrics.add("proxy_healthz_total", "200")
    metrics.add("proxy_healthz_total", "200", amount=2)
    metrics.set("sync_proxy_rules_iptables_total", 7, "nat", "IPv4")
    metrics.observe("sync_proxy_rules_duration_seconds", 0.003, "IPv4")
    metrics.set("sync_proxy_rules_endpoint_changes_pending", 4)
    out = text(metrics)
    assert 'kubeproxy_proxy_healthz_total{code="200"} 3.0\n' in out
    assert 'kubeproxy_sync_proxy_rules_iptables_total{ip_family="IPv4",table="nat"} 7.0\n' in out
    seconds = "kubeproxy_sync_proxy_rules_duration_seconds"
    assert f'{seconds}_bucket{{ip_family="IPv4",le="0.002"}} 0.0\n' in out
    assert f'{seconds}_bucket{{ip_family="IPv4",le="0.004"}} 1.0\n' in out
    assert "kubeproxy_sync_proxy_rules_endpoint_changes_pending 4.0\n" in out


def test_series_of_the_families_served_exist_from_the_start() -> None:
    out = text(Metrics("nftables", [Family.IPV6]))
    name = "kubeproxy_sync_proxy_rules_nftables_sync_failures_total"
    assert f'{name}{{ip_family="IPv6"}} 0.0\n' in out
    assert 'ip_family="IPv4"' not in out


@pytest.mark.parametrize(
    "name",
    [
        "sync_proxy_rules_iptables_restore_failures_total",
        "sync_proxy_rules_ipvs_sync_failures_total",
    ],
)
def test_a_metric_that_the_mode_does_not_have_is_an_error(name: str) -> None:
    metrics = Metrics("ebpf")
    assert not metrics.has(name)
    with pytest.raises(KeyError):
        metrics.add(name, "IPv4")
    with pytest.raises(KeyError):
        metrics.set(name, 7, "IPv4")
    with pytest.raises(KeyError):
        metrics.observe(name, 1, "IPv4")


def test_a_metric_of_another_type_is_an_error() -> None:
    with pytest.raises(TypeError, match="kernel_objects is not a Counter"):
        Metrics("ebpf").add("kernel_objects")


def test_help_texts_are_whole_sentences() -> None:
    for row in (*UPSTREAM, *OURS):
        assert re.fullmatch(r"[A-Z1].* .*\.", row.help), row


def test_two_live_side_by_side() -> None:
    one, other = Metrics("iptables"), Metrics("iptables")
    one.add("proxy_livez_total", "503")
    assert "proxy_livez_total{" in text(one)
    assert "proxy_livez_total{" not in text(other)


def test_openmetrics_is_spoken_when_asked_for() -> None:
    metrics = Metrics("iptables")
    metrics.set("sync_proxy_rules_iptables_total", 7, "nat", "IPv4")
    body, content_type = metrics.render("application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert body.endswith(b"# EOF\n")


def test_the_kernel_is_asked_at_each_scrape() -> None:
    metrics = Metrics("iptables")
    usage, fails, packets = (1, 10), False, dict.fromkeys(NFACCT, 5)

    def read() -> tuple[int, int]:
        if fails:
            raise OSError
        return usage

    metrics.ask(conntrack_usage(read))
    metrics.ask(nfacct_packets(lambda: packets))
    out = text(metrics)
    assert "steersman_conntrack_entries 1.0\n" in out
    assert "steersman_conntrack_entries_limit 10.0\n" in out
    for name, _ in NFACCT.values():
        assert f"{name} 5.0\n" in out
    usage, packets = (2, 10), {}
    out = text(metrics)
    assert "steersman_conntrack_entries 2.0\n" in out
    assert "packets_total" not in out
    fails = True
    assert "steersman_conntrack_entries" not in text(metrics)
