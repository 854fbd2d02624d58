"""What is done once, before the loop: build the source and the mode, set the kernel's switches."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from steersman.compile.node import node_settings
from steersman.config import ProxyConfig, to_node_config
from steersman.config.go import Duration
from steersman.config.rules import parse_port_range
from steersman.host.exec import Exec, SubprocessExec
from steersman.host.facts import hostname
from steersman.host.sysctl import (
    ConntrackConfig,
    SysctlError,
    apply,
    conntrack_settings,
    iptables_settings,
)
from steersman.model.addresses import canonical_cidr
from steersman.model.inputs import HostFacts, NodeConfig, Snapshot
from steersman.model.plan import Traits
from steersman.modes.base import Mode, Support
from steersman.modes.ipvs.options import IpvsOptions
from steersman.modes.registry import MODES, Factory, ModeOptions
from steersman.run.fallback import Chosen, choose
from steersman.source.apiserver import ApiServerSource
from steersman.source.base import Source
from steersman.source.files import FileSource
from steersman.source.kubeconfig import ClusterAccess, load_cluster_access
from steersman.source.store import Store

log = logging.getLogger(__name__)


class StartError(Exception):
    """The process cannot start; the message says why and what to do."""


def node_config(config: ProxyConfig) -> NodeConfig:
    """The part of the configuration that shapes the plan, this node's name filled in.

    Raises:
        StartError: this machine has no name.
    """
    result = to_node_config(config, node_name=hostname())
    if not result.node_name:
        raise StartError("this machine has no hostname; give --hostname-override")
    return result


def cluster_access(config: ProxyConfig) -> ClusterAccess:
    """Find out how to reach the API server; KubeconfigError where that is not configured well."""
    block = config.steersman
    return load_cluster_access(
        config.client_connection.kubeconfig or None,
        masters=block.api_servers,
        context=block.kubeconfig_context,
    )


def make_source(config: ProxyConfig, node_name: str) -> Source:
    """Build the source of objects that the configuration names."""
    if paths := config.steersman.manifests:
        return FileSource([Path(path) for path in paths])
    return ApiServerSource(cluster_access(config), node_name)


def mode_options(config: ProxyConfig) -> ModeOptions:
    """What the configuration says about modes."""
    ports = parse_port_range(config.port_range)
    return ModeOptions(
        iptables_variant=config.steersman.iptables_variant,
        ipvs=_ipvs_options(config),
        proxy_ports=ports if ports and ports[1] else None,
        udp_idle=config.steersman.udp_idle_timeout.seconds,
        portals=config.steersman.userspace_portals,
        dns_search=config.steersman.dns_search,
        guard_node_ports=config.steersman.ebpf_guard_node_ports,
        xdp_devices=config.steersman.ebpf_xdp_devices,
        cgroup_root=config.steersman.ebpf_cgroup_root,
    )


def _ipvs_options(config: ProxyConfig) -> IpvsOptions:
    block = config.ipvs
    cidrs = tuple(c for text in block.exclude_cidrs if (c := canonical_cidr(text)) is not None)
    return IpvsOptions(
        scheduler=block.scheduler or "rr",
        scheduler_flags=config.steersman.ipvs_scheduler_flags,
        exclude_cidrs=cidrs,
        strict_arp=block.strict_arp,
        tcp_timeout=int(block.tcp_timeout.seconds),
        tcp_fin_timeout=int(block.tcp_fin_timeout.seconds),
        udp_timeout=int(block.udp_timeout.seconds),
        load_modules=config.mode == "ipvs",
    )


def new_mode(
    config: ProxyConfig, execute: Exec | None = None, modes: Mapping[str, Factory] = MODES
) -> Mode:
    """Build the mode; nothing is read or run.

    Raises:
        StartError: there is no such mode.
    """
    factory = modes.get(config.mode)
    if factory is None:
        known = ", ".join(sorted(modes))
        raise StartError(f"mode {config.mode} is not there yet; this version has {known}")
    return factory(execute or SubprocessExec(), mode_options(config))


async def choose_mode(config: ProxyConfig, modes: Mapping[str, Factory] = MODES) -> Chosen:
    """Build the mode, or what stands in for it, and see that it can run here.

    Raises:
        StartError: something is missing.
    """
    wanted = new_mode(config, modes=modes)
    found = await choose(
        wanted,
        lambda name: modes[name](SubprocessExec(), mode_options(config)),
        strict=config.steersman.strict,
    )
    if isinstance(found, Support):
        raise StartError(f"{wanted.name} mode cannot run here: {' '.join(found.missing)}")
    if found.missing:
        log.warning("%s", found.sentence)
    return found


async def make_mode(config: ProxyConfig) -> Mode:
    """Build the mode that `choose_mode` finds, for commands that only need the mode.

    Raises:
        StartError: something is missing.
    """
    return (await choose_mode(config)).mode


async def prepared_mode(config: ProxyConfig) -> Mode:
    """Build the mode, or what stands in for it, and have its own switches of the kernel set.

    Raises:
        StartError: something is missing.
        BusyError: a switch cannot be set.
    """
    mode = new_mode(config)
    if mode.needs_sysctls:
        mode = await make_mode(config)
        mode.prepare()
    return mode


async def load_store(config: ProxyConfig, *, seconds: float = 30.0) -> Store:
    """Read the source once, for commands that do not run on.

    Raises:
        TimeoutError: the source did not deliver its initial lists in time.
    """
    node_name = node_config(config).node_name
    loaded = asyncio.Event()
    store = Store(node_name, on_change=lambda: loaded.set() if store.synced else None)
    source = make_source(config, node_name)
    task = asyncio.create_task(source.run(store))
    try:
        async with asyncio.timeout(seconds):
            await loaded.wait()
    except TimeoutError:
        where = ", ".join(config.steersman.manifests)
        if isinstance(source, ApiServerSource):
            where = source.stats.server
        raise TimeoutError(
            f"no Services were read from {where} in {seconds:g} s; is it there?"
        ) from None
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    return store


def set_conntrack(config: ProxyConfig, traits: Traits) -> None:
    """Set the start-up sysctls of conntrack (behaviour 1.6), where the mode needs conntrack.

    The table's size belongs to the machine's first network namespace: elsewhere it cannot be set,
    which is only a warning.

    Raises:
        SysctlError: a setting cannot be written.
    """
    if not traits.tracks_connections:
        return
    block = config.linux.conntrack

    def seconds(value: Duration | None) -> float | None:
        return None if value is None else value.seconds

    wanted = ConntrackConfig(
        max_per_core=block.max_per_core,
        min=block.min,
        tcp_established_timeout=seconds(block.tcp_established_timeout),
        tcp_close_wait_timeout=seconds(block.tcp_close_wait_timeout),
        tcp_be_liberal=block.tcp_be_liberal,
        udp_timeout=seconds(block.udp_timeout),
        udp_stream_timeout=seconds(block.udp_stream_timeout),
    )
    for setting in conntrack_settings(wanted, os.cpu_count() or 1):
        try:
            for warning in apply([setting]):
                log.warning("%s", warning)
        except SysctlError as error:
            if error.errno not in (errno.EACCES, errno.EPERM) or not setting.path.endswith("_max"):
                raise
            log.warning("%s; it can be set only in the first network namespace", error.strerror)


def allow_localhost_node_ports(config: NodeConfig, mode: Mode, facts: HostFacts) -> NodeConfig:
    """Route 127.0.0.0/8 where node ports are to answer there; without them where it cannot be."""
    if mode.traits.relays_localhost:  # nothing is routed there
        return config
    settings, _ = node_settings(Snapshot(), config, facts, mode.traits)
    try:
        apply(iptables_settings(settings.ipv4.localhost_node_ports))
    except SysctlError as error:
        log.warning("no node ports on localhost: %s", error.strerror)
        return msgspec.structs.replace(config, localhost_node_ports=False)
    return config
