from __future__ import annotations

import re

import pytest

from steersman.model.names import Family
from steersman.modes.specs import SPECS
from steersman.run.observe.metric_table import (
    DECLARED,
    PROGRAMMING_BUCKETS,
    SYNC_BUCKETS,
    MetricTable,
)
from steersman.run.observe.metrics import COUNTED, OF_SOME_MODES, Metrics
from steersman.run.observe.prometheus import Labelled, exposition
from steersman.run.observe.scraped import NFACCT, conntrack_usage, nfacct_packets


def text(metrics: Metrics) -> str:
    return b"".join(exposition(metrics.collect())).decode()


def types(metrics: Metrics) -> dict[str, str]:
    return dict(re.findall(r"^# TYPE (\S+) (\S+)$", text(metrics), re.MULTILINE))


@pytest.mark.parametrize("mode", ["iptables", "nftables", "ipvs", "ebpf"])
def test_each_mode_has_its_metrics_under_upstreams_names_and_types(mode: str) -> None:
    metrics = Metrics(mode)
    found = types(metrics)
    optional = SPECS[mode].metrics
    for metric in COUNTED:
        there = metric.name not in OF_SOME_MODES or metric.name in optional
        assert found.get(metric.name) == (metric.kind if there else None)
        name = next(name for name, each in vars(MetricTable).items() if each is metric)
        if there:
            assert isinstance(getattr(metrics, name), Labelled)
        else:
            with pytest.raises(KeyError):  # a mode that does not declare it cannot count in it
                getattr(metrics, name)
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
    metrics.healthz("200").inc()
    metrics.healthz("200").inc(2)
    metrics.iptables_rules("nat", "IPv4").set(7)
    metrics.sync_seconds("IPv4").observe(0.003)
    metrics.kernel_objects().set(4)
    metrics.show(Metrics.endpoint_changes_pending, lambda: [((), 5)])
    out = text(metrics)
    assert 'kubeproxy_proxy_healthz_total{code="200"} 3.0\n' in out
    assert 'kubeproxy_sync_proxy_rules_iptables_total{ip_family="IPv4",table="nat"} 7.0\n' in out
    seconds = "kubeproxy_sync_proxy_rules_duration_seconds"
    assert f'{seconds}_bucket{{ip_family="IPv4",le="0.002"}} 0.0\n' in out
    assert f'{seconds}_bucket{{ip_family="IPv4",le="0.004"}} 1.0\n' in out
    assert "steersman_kernel_objects 4.0\n" in out
    assert "kubeproxy_sync_proxy_rules_endpoint_changes_pending 5.0\n" in out


def test_series_of_the_families_served_exist_from_the_start() -> None:
    out = text(Metrics("nftables", [Family.IPV6]))
    name = "kubeproxy_sync_proxy_rules_nftables_sync_failures_total"
    assert f'{name}{{ip_family="IPv6"}} 0.0\n' in out
    assert 'ip_family="IPv4"' not in out


def test_refused_batches_are_counted_where_the_mode_declares_it() -> None:
    for mode, refused, partial in (
        ("iptables", "iptables_restore", "iptables_partial_restore"),
        ("ipvs", "iptables_restore", ""),
        ("nftables", "nftables_sync", ""),
        ("ebpf", "", ""),
    ):
        metrics = Metrics(mode, [Family.IPV4])
        metrics.count_refused(Family.IPV4, full=1, partial=2)
        counted = re.findall(r"_(\w+)_failures_total{.*} ([1-9].*)\n", text(metrics))
        expected = [(f"sync_proxy_rules_{refused}", "3.0")] if refused else []
        expected += [(f"sync_proxy_rules_{partial}", "2.0")] if partial else []
        assert sorted(counted) == sorted(expected)


def test_help_texts_are_whole_sentences() -> None:
    for metric in DECLARED:
        assert re.fullmatch(r"[A-Z1].* .*\.", metric.text), metric.name


def test_a_switch_of_the_mode_changes_the_metrics_that_only_some_modes_have() -> None:
    metrics = Metrics("nftables")
    metrics.syncs("start", "ok").inc()
    metrics.use_mode("iptables")
    text = b"".join(exposition(metrics.collect())).decode()
    assert "nftables_sync_failures_total" not in text
    assert "iptables_restore_failures_total" in text
    assert 'steersman_syncs_total{outcome="ok",reason="start"} 1.0' in text
    metrics.use_mode("nftables")
    assert "nftables_sync_failures_total" in b"".join(exposition(metrics.collect())).decode()


def test_two_live_side_by_side() -> None:
    one, other = Metrics("iptables"), Metrics("iptables")
    one.livez("503").inc()
    assert "proxy_livez_total{" in text(one)
    assert "proxy_livez_total{" not in text(other)


def test_the_kernel_is_asked_at_each_scrape() -> None:
    metrics = Metrics("iptables")
    usage, fails, packets = (1, 10), False, dict.fromkeys(NFACCT, 5)

    def read() -> tuple[int, int]:
        if fails:
            raise OSError
        return usage

    metrics.on_scrape(lambda: conntrack_usage(read))
    metrics.on_scrape(lambda: nfacct_packets(packets))
    out = text(metrics)
    assert "steersman_conntrack_entries 1.0\n" in out
    assert "steersman_conntrack_entries_limit 10.0\n" in out
    for metric in NFACCT.values():
        assert f"{metric.name} 5.0\n" in out
    usage, packets = (2, 10), {}
    out = text(metrics)
    assert "steersman_conntrack_entries 2.0\n" in out
    assert "packets_total" not in out
    fails = True
    assert "steersman_conntrack_entries" not in text(metrics)
