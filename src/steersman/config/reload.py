"""What a changed configuration means for a process that runs: a pure comparison.

Not here: applying it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import msgspec

from steersman.config.convert import to_v1alpha1
from steersman.config.types import ProxyConfig

_RESTART: Final = (
    "featureGates",
    "clientConnection",
    "logging.format",
    "logging.flushFrequency",
    "logging.vmodule",
    "logging.options",
    "hostnameOverride",
    "healthzBindAddress",
    "metricsBindAddress",
    "bindAddressHardFail",
    "enableProfiling",
    "showHiddenMetricsForVersion",
    "mode",
    "winkernel",
    "oomScoreAdj",
    "portRange",
    "windowsRunAsService",
    "steersman.manifests",
    "steersman.apiServers",
    "steersman.kubeconfigContext",
    "steersman.udpIdleTimeout",
    "steersman.userspacePortals",
    "steersman.dnsSearch",
    "steersman.iptablesVariant",
    "steersman.strict",
    "steersman.takeOver",
    "steersman.ipvsSchedulerFlags",
    "steersman.ebpfGuardNodePorts",
    "steersman.ebpfXdpDevices",
    "steersman.ebpfCgroupRoot",
    "ipvs.scheduler",
    "ipvs.excludeCIDRs",
    "ipvs.strictARP",
    "ipvs.tcpTimeout",
    "ipvs.tcpFinTimeout",
    "ipvs.udpTimeout",
)
"""Fields, and sections whole, that are read once: at the start."""


class ReloadPlan(NamedTuple):
    """The fields that changed, by their paths in the document, in its order."""

    applied_live: list[str]
    needs_restart: list[str]


def reload_plan(old: ProxyConfig, new: ProxyConfig) -> ReloadPlan:
    """Tell what of a new configuration takes effect at once and what only after a restart.

    Where it is of another mode, everything waits: what the file means, and its defaults, go by it.
    """
    if new.mode != old.mode:
        return ReloadPlan([], ["mode"])
    plan = ReloadPlan([], [])
    for path in changed_fields(to_v1alpha1(old), to_v1alpha1(new), ""):
        later = any(path == field or path.startswith(field + ".") for field in _RESTART)
        (plan.needs_restart if later else plan.applied_live).append(path)
    return plan


def applied(old: ProxyConfig, new: ProxyConfig) -> ProxyConfig:
    """The configuration in force after a reload: the new one, the old where a restart is due."""
    if new.mode != old.mode:
        return old
    logging = msgspec.structs.replace(old.logging, verbosity=new.logging.verbosity)
    score = old.linux.oom_score_adj
    return msgspec.structs.replace(
        new,
        feature_gates=old.feature_gates,
        client_connection=old.client_connection,
        logging=logging,
        hostname_override=old.hostname_override,
        healthz_bind_address=old.healthz_bind_address,
        metrics_bind_address=old.metrics_bind_address,
        bind_address_hard_fail=old.bind_address_hard_fail,
        enable_profiling=old.enable_profiling,
        show_hidden_metrics_for_version=old.show_hidden_metrics_for_version,
        linux=msgspec.structs.replace(new.linux, oom_score_adj=score),
        ipvs=old.ipvs,
        winkernel=old.winkernel,
        port_range=old.port_range,
        windows_run_as_service=old.windows_run_as_service,
        steersman=msgspec.structs.replace(
            new.steersman,
            manifests=old.steersman.manifests,
            api_servers=old.steersman.api_servers,
            kubeconfig_context=old.steersman.kubeconfig_context,
            udp_idle_timeout=old.steersman.udp_idle_timeout,
            userspace_portals=old.steersman.userspace_portals,
            dns_search=old.steersman.dns_search,
            iptables_variant=old.steersman.iptables_variant,
            strict=old.steersman.strict,
            take_over=old.steersman.take_over,
            ipvs_scheduler_flags=old.steersman.ipvs_scheduler_flags,
            ebpf_guard_node_ports=old.steersman.ebpf_guard_node_ports,
            ebpf_xdp_devices=old.steersman.ebpf_xdp_devices,
            ebpf_cgroup_root=old.steersman.ebpf_cgroup_root,
        ),
    )


def changed_fields(old: msgspec.Struct, new: msgspec.Struct, prefix: str) -> Iterator[str]:
    """Paths of the fields in which two parts of one kind differ."""
    for field in msgspec.structs.fields(old):
        before, after = getattr(old, field.name), getattr(new, field.name)
        path = prefix + field.encode_name
        if isinstance(before, msgspec.Struct) and type(before) is type(after):
            yield from changed_fields(before, after, path + ".")
        elif before != after:
            yield path
