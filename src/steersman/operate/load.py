"""Read the World that a question is about: from the running process, manifests or an API server.

--manifests                    the files, as a node that starts with them would see them
--kubeconfig, --master,
--config with a kubeconfig     the API server, read once
otherwise                      the running process of this network namespace; if it does not
                               answer, what its flags name; if there is none and this is a pod,
                               the API server of its service account
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import msgspec

from steersman.compile.node import facts_of_node, is_this_machine, missing_cluster_cidr
from steersman.compile.planner import compile_all
from steersman.config import ConfigError, Parsed, ProxyConfig, UsageError, parse_command_line
from steersman.host.facts import read_facts
from steersman.host.process import words_of
from steersman.model import codes
from steersman.model.findings import Finding
from steersman.model.names import ObjectName, PlanKey
from steersman.model.plan import NodePlan
from steersman.model.ruleset import Diff, Ruleset, diff
from steersman.model.world import Origin, World
from steersman.modes.base import Mode
from steersman.operate.answer import QuestionError
from steersman.operate.client import Client, HungError, NotRunningError, understood
from steersman.operate.world_reader import decode_world
from steersman.run.process.startup import (
    StartError,
    cluster_access,
    load_store,
    new_mode,
    node_config,
)
from steersman.source.kubeconfig import SERVICE_ACCOUNT, KubeconfigError

_FROM_API_SERVER = ("kubeconfig", "master")
_ELSEWHERE = ("kubeconfig-context", "proxy-mode", "hostname-override", "cluster-cidr")
"""Flags that say how to read manifests or an API server."""


async def load_world(parsed: Parsed, client: Client | None = None) -> World:
    """Return the World that the flags of a command line name.

    Raises:
        UsageError: a flag would be ignored, because another source answers.
        QuestionError: it cannot be read.
        TimeoutError, KubeconfigError, StartError: the source does not answer, or is misconfigured.
    """
    config = parsed.config
    if config.steersman.manifests:
        if any(parsed.values.get(name) for name in _FROM_API_SERVER):
            raise UsageError("give --manifests or an API server, not both")
        return await _from_manifests(config)
    access = config.client_connection.kubeconfig
    if access or any(parsed.values.get(name) for name in _FROM_API_SERVER):
        return await _from_api_server(config)
    try:
        world = await world_of_process(client)
    except HungError as hung:
        world = await _by_flags_of(hung)
    except NotRunningError as error:
        if not SERVICE_ACCOUNT.exists():
            raise NotRunningError(f"{error}, or give --manifests or --kubeconfig") from error
        return await _from_api_server(config)
    for name in _ELSEWHERE:
        if name in parsed.values:
            raise UsageError(
                f"--{name} is for --manifests and --kubeconfig: without them the running process "
                "answers, with its own settings (`steersman plan` shows what others would change)"
            )
    return world


async def world_of_process(
    client: Client | None = None, services: Iterable[ObjectName] = ()
) -> World:
    """Return the World of the running process.

    Args:
        client: asks the process.
        services: those that are needed; all without any.

    Raises:
        NotRunningError: no steersman process runs in this network namespace.
        HungError: it does not answer.
        QuestionError: it is another version.
    """
    query = urlencode([("service", str(name)) for name in services])
    data = await asyncio.to_thread((client or Client()).get, f"/world?{query}".rstrip("?"))
    with understood():
        world = await asyncio.to_thread(decode_world, data, Origin("process", ""))
    pid = world.process.pid if world.process else 0
    text = f"the running process (pid {pid}, {world.mode} mode)"
    return msgspec.structs.replace(world, origin=Origin("process", text))


async def world_again(world: World, services: Collection[ObjectName] = ()) -> World:
    """Return the World as a running process has it now; the same one if it is of something else.

    Looking at the kernel takes seconds, in which a busy node has changed some of its Services: what
    differs from the plan counts only if the plan has not changed meanwhile.

    Args:
        world: as it was.
        services: those that are needed; all without any, or if they have been deleted.
    """
    if world.origin.kind != "process":
        return world
    try:
        return await world_of_process(services=services)
    except QuestionError:  # it has ended, or does not answer: there is no later plan
        return await world_again(world) if services else world


def moved_objects(mode: Mode, have: Ruleset, before: NodePlan, now: NodePlan) -> Diff:
    """Return the difference between the kernel objects of two plans.

    Only the Services whose plans differ are rendered. The keys are those of `have`, what the
    kernel has.
    """
    services = before.services.keys() | now.services.keys()
    if before.settings == now.settings:
        services = {key for key in services if before.services.get(key) != now.services.get(key)}

    def wanted(plan: NodePlan) -> Ruleset:
        objects = {**mode.render_node(plan.settings), **render_services(mode, plan, services)}
        return mode.words.wanted(objects, have)

    return diff(wanted(before), wanted(now))


def render_services(mode: Mode, plan: NodePlan, services: Iterable[PlanKey]) -> Ruleset:
    """Return the kernel objects of the Services of a plan that are among these."""
    out: dict[Any, Any] = {}
    for key in services:
        if (service := plan.services.get(key)) is not None:
            out |= mode.render_service(service, plan.settings)
    return out


def config_of(pid: int) -> ProxyConfig:
    """Return the configuration that a process of steersman has started with.

    Raises:
        OSError: it has ended, or may not be looked at.
        ConfigError: its flags, or its file, mean nothing here.
    """
    words = words_of(Path("/proc"), pid)
    first = next((n for n, word in enumerate(words) if word.startswith("--")), len(words))
    return parse_command_line(words[first:]).config


async def _by_flags_of(hung: HungError) -> World:
    """Return the World of what the flags of a process name that does not answer.

    Raises:
        HungError: they cannot be read, or name nothing that can be read here.
    """
    try:
        config = config_of(hung.pid)
        read = _from_manifests if config.steersman.manifests else _from_api_server
        world = await read(config)
    except (OSError, ConfigError, KubeconfigError, StartError) as error:
        raise hung from error
    origin = Origin(world.origin.kind, f"{world.origin.text}, since {hung}", str(hung))
    return msgspec.structs.replace(world, origin=origin)


async def _from_manifests(config: ProxyConfig) -> World:
    where = ", ".join(config.steersman.manifests)
    return await _read(config, Origin("manifests", f"the manifests in {where}"))


async def _from_api_server(config: ProxyConfig) -> World:
    server = cluster_access(config).servers[0]
    return await _read(config, Origin("apiserver", f"the API server {server}"))


async def _read(config: ProxyConfig, origin: Origin) -> World:
    """Read a source once, and compile what a node of this configuration would do with it."""
    store = await load_store(config)
    node, facts, mode = node_config(config), await read_facts(), new_mode(config)
    snapshot = store.detailed_snapshot
    findings = store.findings
    if snapshot.node is None:
        known = ", ".join(each.metadata.name for each in store.nodes[:3]) or "none"
        reason = f"is not among the Nodes that were read ({known}): its addresses and zone are not"
        reason += " known; --hostname-override names the node that is meant"
        findings += (Finding(f"Node {node.node_name}", "", reason, code=codes.UNKNOWN_NODE),)
    if problem := missing_cluster_cidr(node):
        findings += (Finding("configuration", "clusterCIDR", problem, code=codes.CONFIGURATION),)
    if not is_this_machine(node.node_name, snapshot.node, facts):
        facts = facts_of_node(node.node_name, snapshot.node)
    plan = compile_all(snapshot, node, facts, mode.traits)
    return World(
        origin,
        snapshot,
        plan,
        config.mode,
        mode.variant,
        node,
        facts,
        findings=(*findings, *plan.findings),
        nodes=store.nodes,
        unserved=store.unserved,
    )
