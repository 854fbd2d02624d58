"""The checks of `steersman doctor`: the table of all of them. ask.py runs it."""

from __future__ import annotations

from typing import Final

from steersman.operate.doctor import (
    node_changes,
    node_conntrack,
    node_firewall,
    node_path,
    node_pods,
    node_process,
    node_rivals,
    node_rules,
    node_sysctl,
    service_api,
    service_listener,
    service_object,
    service_policy,
    traffic_checks,
    traffic_load,
    tries_check,
)
from steersman.operate.doctor.check import Check, Needs
from steersman.operate.doctor.result import Cause

_SERVICE: Final = Needs.SERVICE
_API: Final = Needs.SERVICE | Needs.API
_DIAL: Final = Needs.SERVICE | Needs.NODE | Needs.DIALS
_LINUX: Final = Needs.NODE | Needs.LINUX
_ENDS: Final = _LINUX | Needs.SERVICE
_SYSCTL: Final = _LINUX | Needs.SYSCTLS
_TABLE: Final = _LINUX | Needs.CONNTRACK
_OBJECT, _ENDPOINTS, _POLICY, _PROXY = Cause.OBJECT, Cause.ENDPOINTS, Cause.POLICY, Cause.PROXY
_RULES, _NODE, _PATH = Cause.RULES, Cause.NODE, Cause.PATH

CHECKS: Final[tuple[Check, ...]] = (
    # One Service
    Check("service-exists", "the Service", service_object.service_exists, _SERVICE, _OBJECT),
    Check("service-findings", "Findings", service_object.service_findings, _SERVICE, _OBJECT + 1),
    Check("service-endpoints", "endpoints", service_object.service_endpoints, _SERVICE, _ENDPOINTS),
    Check("selector", "the selector", service_api.matching_pods, _API, _ENDPOINTS - 1),
    Check("network-policies", "NetworkPolicies", service_api.network_policies, _API, _POLICY + 5),
    Check("flow", "the connection in question", service_policy.flow, Needs.CONNECTION, _POLICY),
    Check("service-policy", "traffic policies", service_policy.policies, _SERVICE, _POLICY + 1),
    Check(
        "node-port-addresses", "node port addresses", service_policy.ports, _SERVICE, _POLICY + 2
    ),
    Check(
        "node-port-listener", "processes on the node port", service_listener.ports, _ENDS, _NODE + 5
    ),
    Check("cluster-ip-on-node", "addresses of the node", service_listener.addresses, _ENDS, _NODE),
    Check(
        "endpoints-from-node",
        "endpoints dialled from the node",
        traffic_checks.endpoints,
        _DIAL,
        Cause.ENDPOINT,
    ),
    Check(
        "tries", "connections to the Service", tries_check.tries, Needs.NODE, Cause.SYMPTOM, 14.5
    ),
    Check("load", "load of the endpoints", traffic_load.load, _ENDS, _POLICY + 7),
    # The node
    Check("process", "proxy process", node_process.process, Needs.NODE, _PROXY),
    Check("source", "source of objects", node_process.source, Needs.NODE, _PROXY + 1),
    Check("node", "this node", node_process.node, cause=_PROXY + 2),
    Check("pods", "pod network", node_process.pods, cause=_PROXY + 3),
    Check("failover", "failing endpoints", node_process.failover, _LINUX, _PROXY + 5),
    Check("api-server", "clock and version", node_process.api_server, cause=_PROXY + 4),
    Check("ejected", "ejected endpoints", node_process.ejected, cause=_ENDPOINTS + 1),
    Check("other-proxy", "other proxies", node_rivals.other_proxy, _LINUX, _PROXY + 1),
    Check("mode", "parts of the mode", node_rules.probe, Needs.NODE, _PROXY + 5),
    Check("rules", "rules in the kernel", node_rules.rules, _LINUX, _RULES, 9.5),
    Check("lock", "lock of the rules", node_rules.lock, _LINUX, _RULES - 2),
    Check("number-of-rules", "number of rules", node_rules.number_of_rules, _LINUX, _NODE, 9.5),
    Check("mode-sysctls", "sysctls of the mode", node_rules.settings_of_mode, _LINUX, _NODE),
    Check("firewall", "firewalls", node_firewall.firewalls, _LINUX, _NODE + 2, 8.0),
    Check("rule-changes", "rules that change packets", node_changes.changes, _LINUX, _NODE, 8.0),
    Check("forwarding", "IP forwarding", node_sysctl.forwarding, _SYSCTL),
    Check("rp-filter", "reverse path filter", node_sysctl.reverse_path, _SYSCTL, _NODE + 4),
    Check("route-localnet", "node ports on loopback", node_sysctl.loopback, _SYSCTL, _NODE + 5),
    Check("ephemeral-ports", "ephemeral ports", node_sysctl.ephemeral_ports, _SYSCTL),
    Check(
        "bridge-netfilter",
        "netfilter on bridges",
        node_sysctl.bridge_netfilter,
        _SYSCTL,
        _NODE + 5,
    ),
    Check("hairpin", "hairpin mode of bridges", node_sysctl.hairpin, _SYSCTL, _NODE + 6),
    Check("conntrack-table", "conntrack table", node_conntrack.table, _TABLE, _NODE + 1),
    Check("conntrack-failures", "conntrack failures", node_conntrack.counters, _TABLE, _NODE + 3),
    Check(
        "conntrack-stale",
        "stale conntrack entries",
        node_conntrack.stale,
        _TABLE | _SERVICE,
        _NODE + 3,
    ),
    Check("route", "routes to endpoints", node_path.routes, _ENDS, _PATH),
    Check("overlay", "MTU of overlays", node_path.overlays, _LINUX, _PATH + 1),
    # A rule that drops large packets explains it.
    Check("path-mtu", "MTU of the path", node_path.path_mtu, _ENDS, _PATH - 2, 9.0),
    Check("pod-networks", "networks of the pods", node_pods.pod_networks, _ENDS, _PATH - 3),
    Check("devices", "programs at devices", node_pods.devices, _LINUX, _NODE + 9),
)
"""Every check, in the order of docs/doctor.md; they run together."""
