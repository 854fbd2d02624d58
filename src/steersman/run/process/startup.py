"""Steps before the sync loop: build the source, choose the mode, set sysctls.

Commands that do not run on (`explain`, `--init-only`, `--dry-run`) use the same steps.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from pathlib import Path
from typing import NamedTuple

import msgspec

from steersman.compile.node import node_settings
from steersman.config import ProxyConfig, to_mode_options, to_node_config
from steersman.config.settings import in_seconds
from steersman.host import sysctl
from steersman.host.exec import SubprocessExec
from steersman.host.facts import hostname, read_facts
from steersman.host.sysctl import (
    ConntrackConfig,
    SysctlError,
    apply,
    conntrack_settings,
    iptables_settings,
)
from steersman.model import codes
from steersman.model.errors import BusyError
from steersman.model.findings import Finding, Severity
from steersman.model.inputs import HostFacts, NodeConfig, Snapshot
from steersman.model.plan import Traits
from steersman.modes.base import Mode, release
from steersman.modes.registry import Factory, create
from steersman.modes.specs import SPECS
from steersman.run.observe.events import EventPoster, Recorder
from steersman.run.observe.metrics import Metrics
from steersman.source.apiserver import ApiServerSource
from steersman.source.base import Source
from steersman.source.events import ApiEventPoster, NoEvents
from steersman.source.kubeconfig import ClusterAccess, load_cluster_access
from steersman.source.store import Store
from steersman.source.wire import ApiError

log = logging.getLogger(__name__)

_JSON = "application/json"


class StartError(Exception):
    """The process cannot start; the message says why and what to do."""


def node_config(config: ProxyConfig) -> NodeConfig:
    """Return the part of the configuration that shapes the plan, with this node's name.

    Raises:
        StartError: it has none.
    """
    result = to_node_config(config, node_name=hostname())
    if not result.node_name:
        raise StartError(
            "this node has no name: hostnameOverride is blank, or this machine has no hostname; "
            "give --hostname-override"
        )
    return result


def cluster_access(config: ProxyConfig) -> ClusterAccess:
    """Return how to reach the API server; raise KubeconfigError if that is misconfigured."""
    block, connection = config.steersman, config.client_connection
    access = load_cluster_access(
        connection.kubeconfig or None, masters=block.api_servers, context=block.kubeconfig_context
    )
    # As in client-go, the type of requests is also accepted, and JSON always is.
    spoken = connection.content_type or _JSON
    accepted = connection.accept_content_types or spoken
    if not any(word.split(";")[0].strip() == _JSON for word in accepted.split(",")):
        accepted = f"{accepted},{_JSON}"
    return msgspec.structs.replace(access, accepted=accepted, content_type=spoken)


def make_source(config: ProxyConfig, node_name: str) -> tuple[Source, EventPoster]:
    """Build the source of objects, manifests or the API server, and what posts Events."""
    if paths := config.steersman.manifests:
        from steersman.source.files import FileSource  # noqa: PLC0415 - not with an API server

        return FileSource([Path(path) for path in paths]), NoEvents()
    access, watch_list = cluster_access(config), config.steersman.watch_list
    source = ApiServerSource(access, node_name, watch_list=watch_list)
    return source, ApiEventPoster(source.connections, source.stats.requests)


def new_mode(config: ProxyConfig, create: Factory = create) -> Mode:
    """Build the configured mode; nothing is read or run.

    Raises:
        StartError: there is no such mode.
    """
    if config.mode not in SPECS:
        known = ", ".join(sorted(SPECS))
        raise StartError(f"there is no mode {config.mode}; this version has {known}")
    return create(config.mode, SubprocessExec(), to_mode_options(config))


class Chosen(NamedTuple):
    """The mode to run."""

    mode: Mode
    wanted: str
    """The configured mode."""
    missing: tuple[str, ...] = ()
    """The reasons why the configured mode cannot run, a sentence each; () if it runs."""

    @property
    def sentence(self) -> str:
        """The fallback, for people."""
        why = " ".join(self.missing)
        return f"mode {self.wanted} cannot run here; {self.mode.name} serves instead. {why}"


async def choose_mode(config: ProxyConfig, create: Factory = create) -> Chosen:
    """Build the configured mode or its fallback, and check that it can run here.

    Raises:
        StartError: something is missing.
    """
    wanted = new_mode(config, create)
    support = await wanted.worker.do(wanted.probe)
    if support.usable:
        for sentence in support.missing:
            log.warning("%s", sentence)
        return Chosen(wanted, wanted.name)
    missing, fallback = support.missing, SPECS[wanted.name].fallback
    if fallback and not config.steersman.strict:
        other = create(fallback, SubprocessExec(), to_mode_options(config))
        support = await other.worker.do(other.probe)
        if support.usable:
            chosen = Chosen(other, wanted.name, missing)
            log.warning("%s", chosen.sentence)
            return chosen
        missing += support.missing
    raise StartError(f"{wanted.name} mode cannot run here: {' '.join(missing)}")


def report_fallback(chosen: Chosen, recorder: Recorder, store: Store, metrics: Metrics) -> None:
    """Report a fallback by a Warning Event, a Finding and a metric; do nothing if there is none."""
    if not chosen.missing:
        return
    note = f"{chosen.sentence} [{codes.FALLBACK_MODE}]"
    recorder.node("Warning", "ModeFallback", "StartKubeProxy", note)
    text, error = chosen.sentence, Severity.ERROR
    store.report("mode", (Finding("the node", "mode", text, error, codes.FALLBACK_MODE),))
    metrics.mode_fallback(chosen.wanted, chosen.mode.name).set(1)


async def initialize(config: ProxyConfig) -> None:
    """Set the sysctls, which takes more privileges than NET_ADMIN (behaviour 1.6).

    Raises:
        StartError: the mode cannot run here.
        BusyError: a sysctl cannot be set.
    """
    mode = new_mode(config)
    if mode.requirements().settings:
        mode = (await choose_mode(config)).mode
        try:
            for warning in await mode.worker.do(sysctl.apply, mode.requirements().settings):
                log.warning("%s", warning)
        except sysctl.SysctlError as error:
            raise BusyError(f"{error.strerror}; {mode.name} needs it") from error
        await release(mode)
    set_conntrack(config, mode.traits)
    allow_localhost_node_ports(node_config(config), mode, await read_facts())


async def load_store(config: ProxyConfig, *, seconds: float = 30.0) -> Store:
    """Read everything once, for commands that do not run on: manifests or an API server.

    The Store has the Services that are not served and all Nodes, too.

    Raises:
        StartError: it cannot be read; the message says where it was looked for, and why not.
    """
    store = Store(node_config(config).node_name)
    paths = config.steersman.manifests
    try:
        async with asyncio.timeout(seconds):
            if paths:
                from steersman.source.files import FileSource  # noqa: PLC0415 - see above

                await FileSource([Path(path) for path in paths]).read_once(store)
            else:
                from steersman.source.fetch import fetch_objects  # noqa: PLC0415 - see above

                await fetch_objects(cluster_access(config), store)
    except TimeoutError:
        where = ", ".join(paths) or "the API server"
        raise StartError(f"no Services were read from {where} in {seconds:g} s") from None
    except ApiError as error:
        raise StartError(str(error)) from error
    if not store.synced:
        missing = "; ".join(map(str, store.findings)) or "there are no manifests"
        raise StartError(f"no Services were read from {', '.join(paths)}: {missing}")
    return store


def set_conntrack(config: ProxyConfig, traits: Traits) -> None:
    """Set the start-up sysctls of conntrack (behaviour 1.6), if the mode needs conntrack.

    The table's size belongs to the machine's first network namespace: in others it cannot be set,
    which is only a warning.

    Raises:
        SysctlError: a setting cannot be written.
    """
    if not traits.tracks_connections:
        return
    wanted = ConntrackConfig(**in_seconds(config.conntrack))
    # One setting at a time: the size of the table may be read-only here, the timeouts are not.
    for setting in conntrack_settings(wanted, os.cpu_count() or 1):
        try:
            for warning in apply([setting]):
                log.warning("%s", warning)
        except SysctlError as error:
            if error.errno not in (errno.EACCES, errno.EPERM) or not setting.path.endswith("_max"):
                raise
            log.warning("%s; it can be set only in the initial network namespace", error.strerror)


def allow_localhost_node_ports(config: NodeConfig, mode: Mode, facts: HostFacts) -> NodeConfig:
    """Route 127.0.0.0/8 if node ports are served there.

    Returns:
        The configuration to use: without node ports on localhost if the sysctl cannot be set.
    """
    if mode.traits.relays_localhost:  # a relay serves them, and needs no route
        return config
    settings, _ = node_settings(Snapshot(), config, facts, mode.traits)
    try:
        apply(iptables_settings(settings.ipv4.localhost_node_ports))
    except SysctlError as error:
        log.warning("no node ports on localhost: %s", error.strerror)
        return msgspec.structs.replace(config, localhost_node_ports=False)
    return config
