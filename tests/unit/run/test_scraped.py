"""Metrics of values that are known elsewhere, as a scrape shows them."""

from __future__ import annotations

from collections.abc import Iterable

from steersman.model.node_state import Condition, NodeState
from steersman.run.observe.prometheus import Declared, Histogram, Metric
from steersman.run.observe.scraped import feature_gates, process_state, source_state
from steersman.source.stats import SourceStats


def values(metrics: Iterable[Metric]) -> dict[str, float]:
    """Samples as `name{value,value}`."""
    return {
        f"{sample.name}{{{','.join(sample.labels.values())}}}": sample.value
        for metric in metrics
        for sample in metric.samples
    }


def test_each_condition_has_one_status_and_its_time() -> None:
    conditions = (
        Condition("Synced", "True", "UpToDate", "", 5.0),
        Condition("KernelMatches", "Unknown", "NotSynced", "", 7.0),
    )
    found = values(process_state(NodeState(conditions=conditions, service_ports=4), 2.5))
    assert found == {
        "steersman_condition{Synced,true}": 1,
        "steersman_condition{Synced,false}": 0,
        "steersman_condition{Synced,unknown}": 0,
        "steersman_condition{KernelMatches,true}": 0,
        "steersman_condition{KernelMatches,false}": 0,
        "steersman_condition{KernelMatches,unknown}": 1,
        "steersman_condition_since_timestamp_seconds{Synced}": 5,
        "steersman_condition_since_timestamp_seconds{KernelMatches}": 7,
        "steersman_oldest_change_waiting_seconds{}": 2.5,
        "steersman_service_ports{}": 4,
    }


def test_the_connection_to_the_api_server_is_shown_by_kind() -> None:
    stats = SourceStats()
    assert values(source_state(stats, 100.0)) == {}
    stats.kind("Service").connected = True
    stats.kind("Node").errors["http_403"] += 2
    assert values(source_state(stats, 100.0)) == {
        "steersman_source_connected{Service}": 1,
        "steersman_source_connected{Node}": 0,
        "steersman_watch_errors_total{Node,http_403}": 2,
    }
    stats.kind("Node").received(b"{}", 90.0)
    assert values(source_state(stats, 100.0))["steersman_source_quiet_seconds{}"] == 10
    stats.kind("Node").received(b"{}", 101.0)  # in the moment of the scrape
    assert values(source_state(stats, 100.0))["steersman_source_quiet_seconds{}"] == 0


def test_requests_are_counted_and_their_seconds_put_into_buckets() -> None:
    stats = SourceStats()
    for seconds in (0.005, 0.3, 99.0):
        stats.requests.count("200", "GET", "api:6443")
        stats.requests.took(seconds, "GET", "api:6443")
    stats.requests.count("<error>", "POST", "api:6443")
    found = values(source_state(stats, 0.0))
    assert found["rest_client_requests_total{200,GET,api:6443}"] == 3
    assert found["rest_client_requests_total{<error>,POST,api:6443}"] == 1
    name = "rest_client_request_duration_seconds"
    assert [found[f"{name}_bucket{{GET,api:6443,{le}}}"] for le in ("0.005", "0.5", "60.0")] == [
        1,
        2,
        2,
    ]
    assert found[f"{name}_count{{GET,api:6443}}"] == 3
    assert found[f"{name}_sum{{GET,api:6443}}"] == 99.305


def test_feature_gates_follow_the_configuration() -> None:
    name = "kubernetes_feature_enabled"
    assert values(feature_gates({"AllBeta": False, "ComponentFlagz": True})) == {
        f"{name}{{AllowServiceExternalIPs,DEPRECATED}}": 1,
        f"{name}{{ComponentFlagz,BETA}}": 1,
        f"{name}{{ComponentStatusz,BETA}}": 0,
        f"{name}{{LoggingAlphaOptions,ALPHA}}": 0,
    }


def test_a_histogram_has_the_sum_and_cumulated_buckets() -> None:
    row = Declared(Histogram, "h_seconds", "Seconds.", ("clock",))
    found = values([row.histogram([(("wall",), (1.0,), (2, 1), 9.0)])])
    assert found["h_seconds_bucket{wall,1.0}"] == 2
    assert found["h_seconds_count{wall}"] == 3
    assert found["h_seconds_sum{wall}"] == 9
