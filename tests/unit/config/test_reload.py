import pytest

from steersman.config import (
    default_config,
    load,
    reload_plan,
)
from steersman.config.commandline import assign
from steersman.config.defaults import apply_platform_defaults
from steersman.config.go import Duration
from steersman.config.types import ProxyConfig, VModule

HEAD = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"
BASE = apply_platform_defaults(default_config())


def changed(**paths: object) -> ProxyConfig:
    config = BASE
    for path, value in paths.items():
        config = assign(config, path.replace("__", "."), value)
    return config


@pytest.mark.parametrize(
    ("path", "value", "live", "later"),
    [
        ("iptables__sync_period", Duration(5), ["iptables.syncPeriod"], []),
        ("logging__verbosity", 4, ["logging.verbosity"], []),
        ("node_port_addresses", ("primary",), ["nodePortAddresses"], []),
        ("cluster_cidr", "10.0.0.0/8", ["clusterCIDR"], []),
        ("steersman__split_threshold", 7, ["steersman.splitThreshold"], []),
        ("conntrack__min", 7, ["conntrack.min"], []),
        ("steersman__metrics_per_service", True, ["steersman.metricsPerService"], []),
        ("steersman__eject_failing_endpoints", True, ["steersman.ejectFailingEndpoints"], []),
        ("steersman__failover__hold", Duration(7), ["steersman.failover.hold"], []),
        ("steersman__manifests", ("a",), [], ["steersman.manifests"]),
        ("steersman__ipvs_local_fallback", True, ["steersman.ipvsLocalFallback"], []),
        ("steersman__ebpf_guard_node_ports", False, [], ["steersman.ebpfGuardNodePorts"]),
        ("steersman__ebpf_fast_path", True, [], ["steersman.ebpfFastPath"]),
        ("steersman__ebpf_xdp_devices", ("eth0",), [], ["steersman.ebpfXdpDevices"]),
        ("steersman__ebpf_cgroup_root", "/c", [], ["steersman.ebpfCgroupRoot"]),
        ("steersman__ipvs_scheduler_flags", ("none",), [], ["steersman.ipvsSchedulerFlags"]),
        ("client_connection__qps", 7.0, [], ["clientConnection.qps"]),
        ("feature_gates", {"AllBeta": True}, [], ["featureGates"]),
        ("hostname_override", "x", [], ["hostnameOverride"]),
        ("logging__format", "json", [], ["logging.format"]),
        ("logging__vmodule", (VModule(file_pattern="a"),), [], ["logging.vmodule"]),
        ("oom_score_adj", -7, [], ["oomScoreAdj"]),
    ],
)
def test_what_a_reload_does(path: str, value: object, live: list[str], later: list[str]) -> None:
    new = changed(**{path: value})
    assert reload_plan(BASE, new) == (live, later, new if live else BASE)


def test_nothing_changed() -> None:
    assert reload_plan(BASE, BASE) == ([], [], BASE)


def test_a_mode_change_waits_for_the_restart() -> None:
    new = load(HEAD + "mode: nftables\niptables: {masqueradeAll: true}\n").config
    new = apply_platform_defaults(new)
    assert (new.node_port_addresses, BASE.node_port_addresses) == (("primary",), ())
    assert reload_plan(BASE, new) == ([], ["mode"], BASE)


def test_pointers_that_appear_are_changes() -> None:
    new = changed(conntrack__tcp_established_timeout=None)
    assert reload_plan(BASE, new).applied_live == ["conntrack.tcpEstablishedTimeout"]
