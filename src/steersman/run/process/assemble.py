"""Assemble the parts of the process: the daemon of `steersman run`.

Every part is made by its constructor, of parts that exist. Only the Store is older than its
listener, the Daemon, which begins to listen at the end.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time

import msgspec

from steersman.compile.node import missing_cluster_cidr
from steersman.config import Parsed, configz, in_mode
from steersman.host.facts import read_facts
from steersman.model.switch import SwitchRequest
from steersman.run.observe.drift import DriftLog
from steersman.run.observe.failover import Failover
from steersman.run.observe.findings_log import FindingsLog
from steersman.run.observe.observers import SyncObservers
from steersman.run.observe.service_log import ServiceLog
from steersman.run.observe.trouble import TroubleLog
from steersman.run.pages.cluster_pages import ClusterPages
from steersman.run.pages.command_page import CommandPage
from steersman.run.pages.connections_page import ConnectionsPage
from steersman.run.pages.digest_page import DigestPage
from steersman.run.pages.drift_page import DriftPage
from steersman.run.pages.history import History
from steersman.run.pages.node_page import NodePage
from steersman.run.pages.top import TopPage
from steersman.run.process.config_reloader import ConfigReloader
from steersman.run.process.daemon import Daemon, Stop
from steersman.run.process.event_loop import on_signal, until
from steersman.run.process.klog import ProcessLog
from steersman.run.process.machine import Machine
from steersman.run.process.node_watcher import NodeWatcher
from steersman.run.process.startup import (
    StartError,
    choose_mode,
    make_source,
    node_config,
    report_fallback,
)
from steersman.run.serve.control import told_in_lines
from steersman.run.serve.http import Answer, Request
from steersman.run.serve.servers import Servers
from steersman.run.sync.engine import Engine
from steersman.source.store import Store

log = logging.getLogger("steersman")


async def run_daemon(parsed: Parsed, logs: ProcessLog, machine: Machine) -> None:
    """Run the process until SIGTERM or SIGINT; the rules stay in force.

    Raises:
        StartError: it cannot run here, or a supervisor has to restart it.
        SysctlError: a start-up setting cannot be written (behaviour 1.1).
    """
    machine.raise_descriptor_limit()
    machine.memory_at_start()
    stop = Stop()
    for number in (signal.SIGTERM, signal.SIGINT, getattr(signal, "SIGBREAK", None)):
        if number is not None:
            on_signal(number, stop.request)
    # Their default would end the process. The daemon reloads at SIGHUP once it runs, and looks at
    # the file then anyway; upstream's runtime ignores the other two.
    for name in ("SIGHUP", "SIGUSR1", "SIGUSR2"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:
            on_signal(number, lambda: None)

    try:
        daemon = await until(stop.requested, assemble(parsed, logs, machine, stop))
        if daemon is None or stop.requested.is_set():
            log.info("stopping before anything was written; the rules stay in force")
        else:
            await daemon.run()
    finally:
        machine.instance.release()
    if stop.failure:
        raise StartError(stop.failure)


async def assemble(parsed: Parsed, logs: ProcessLog, machine: Machine, stop: Stop) -> Daemon:
    """Claim the node, make the daemon, set the sysctls it needs, and choose the mode.

    Raises:
        StartError: it cannot run here.
        SysctlError: a start-up setting cannot be written (behaviour 1.1).
    """
    await machine.instance.claim()
    source, poster = make_source(parsed.config, node_config(parsed.config).node_name)
    chosen = await choose_mode(parsed.config, machine.create_mode)
    mode = chosen.mode
    config = in_mode(parsed.config, mode.name)
    facts = await read_facts()
    node = node_config(config)
    if problem := missing_cluster_cidr(node):
        log.warning("clusterCIDR %s", problem)
    # From here on the machine is changed: a wrong configuration has failed before.
    node = machine.allow_localhost_node_ports(node, mode, facts)
    machine.set_conntrack(config, mode.traits)
    # The pipeline: Store -> Planner -> Sync -> mode.
    store = Store(node.node_name, clock=time.monotonic, facts=facts)
    engine = Engine(mode, config, node, store)
    sync = engine.sync
    # What the process shows of it.
    known = (config, parsed.values, node.node_name, sync)
    servers = Servers(*known, stats=source.stats, poster=poster, logs=logs, machine=machine)
    findings, recorder, metrics = FindingsLog(), servers.recorder, servers.metrics
    drift = DriftLog(store, recorder, metrics)
    failover = Failover(store, sync.in_force, recorder, metrics, lambda: servers.config)
    observers = SyncObservers(
        store,
        sync.in_force,
        metrics,
        servers.health,
        servers.health_checks,
        objects=sync.objects,
        mode=mode,
    )
    observers.observers |= {
        "findings": findings.observe,
        "drift": drift.observe,
        "failover": failover.observe,
        "service log": ServiceLog(sync.in_force).observe,
    }
    daemon = Daemon(
        machine=machine,
        logs=logs,
        stop=stop,
        engine=engine,
        source=source,
        servers=servers,
        observers=observers,
        findings=findings,
        drift=drift,
        failover=failover,
        node_watcher=NodeWatcher(node, store, stop.request),
        reloader=ConfigReloader(
            parsed, store, mode.traits, machine.file_changes, machine.set_conntrack
        ),
    )
    add_pages(daemon, servers, observers, drift)
    # From here on the Store is listened to: the report of a fallback is logged at once.
    store.listen(daemon.changed, daemon.reported)
    report_fallback(chosen, recorder, store, metrics)
    return daemon


def add_pages(daemon: Daemon, servers: Servers, observers: SyncObservers, drift: DriftLog) -> None:
    """Add the pages that need the whole daemon: a switch of the mode replaces its Sync."""
    states = servers.states
    top = TopPage(states, lambda: daemon.sync)
    trouble = TroubleLog(daemon.sync.in_force)
    states.trouble = lambda: trouble.state
    states.drift, states.rates, states.lags = lambda: drift.summary, top.rates, observers.lags
    in_force = daemon.sync.in_force
    digests = DigestPage(daemon.sync.store, in_force)
    node = NodePage(states, digests.total)
    digests.ready = node.changed
    history = History(time.time, observers.lags, in_force)

    async def history_page(_: Request) -> Answer:
        found = history.answer(daemon.sync.planner.config.node_name)
        body = await asyncio.to_thread(msgspec.json.encode, found)
        return Answer(body, content_type="application/json")

    observers.observers |= {
        "trouble": trouble.observe,
        "history": history.observe,
        "digests": digests.observe,
        "node page": node.changed,
    }
    tracing = servers.config.steersman.tracing
    if tracing.endpoint:
        from steersman.run.observe.change_trace import ChangeTracer  # noqa: PLC0415 - few configure it

        tracer = ChangeTracer(tracing, in_force, lambda: daemon.sync.planner.config.node_name)
        observers.observers["traces"] = tracer.observe
        servers.background["traces"] = tracer.run
    observers.on_failure = {
        "state": states.failed,
        "history": history.failed,
        "node page": node.changed,
    }
    servers.background["conditions"] = node.follow
    servers.pages |= {
        **ClusterPages(lambda: daemon.sync, states, lambda: servers.config).pages,
        ("GET", "/drift"): DriftPage(drift, lambda: daemon.sync).serve,
        ("GET", "/top"): top.serve,
        ("GET", "/configz"): lambda _: Answer(
            configz(servers.config), content_type="application/json"
        ),
        ("GET", "/connections"): ConnectionsPage(lambda: daemon.sync).serve,
        ("GET", "/node"): node.serve,
        ("GET", "/status"): node.serve_status,
        ("GET", "/history"): history_page,
        ("GET", "/digests"): digests.serve,
        ("POST", "/run"): CommandPage().serve,
        ("POST", "/switch"): told_in_lines(SwitchRequest, daemon.switch),
    }
