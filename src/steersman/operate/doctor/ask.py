"""Read the question of `steersman doctor` from an operator's words, and run all checks on it."""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress

import msgspec
from msgspec.structs import replace

from steersman.compile.node import is_this_machine
from steersman.compile.planner import compile_all
from steersman.compile.trace import Flow, trace
from steersman.config import ConfigError, Parsed, ProxyConfig
from steersman.host.exec import SubprocessExec
from steersman.host.facts import read_facts
from steersman.host.netns import find_namespace
from steersman.model.inputs import Snapshot
from steersman.model.names import ObjectName, Protocol
from steersman.model.plan import SourceClass
from steersman.model.world import Origin, World
from steersman.modes.base import release
from steersman.modes.specs import SPECS
from steersman.operate.answer import QuestionError
from steersman.operate.client import Client, NotRunningError
from steersman.operate.doctor import CHECKS
from steersman.operate.doctor.check import Diagnosis, diagnose
from steersman.operate.doctor.context import ApiReply, Context, Question
from steersman.operate.doctor.facts import SharedListings
from steersman.operate.dump import mode_of
from steersman.operate.load import config_of, load_world, world_again
from steersman.operate.names import Names, Target, UnknownNameError, split_words
from steersman.run.process.startup import cluster_access, new_mode, node_config
from steersman.source.fetch import fetch_reply
from steersman.source.kubeconfig import ClusterAccess, KubeconfigError

_ALONE = "this machine alone: no steersman runs here"


class Asked(msgspec.Struct, frozen=True):
    """The words of an operator."""

    service: str = ""
    """A Service, with a port after a colon if it is about one."""
    source: str = ""
    """The client of a connection."""
    destination: str = ""
    pod: str = ""
    """A pod of this node to dial from."""
    namespace: str = ""
    """Of names without one; "" for `default`."""
    dial: bool = True
    """Whether connections may be made."""


async def doctor(parsed: Parsed, asked: Asked) -> Diagnosis:
    """Read the World that a command line names, and run every check that applies to a question.

    Raises:
        QuestionError: the World cannot be read, or the question means nothing known.
        TimeoutError, KubeconfigError, StartError: see `load_world`.
    """
    try:
        world = await load_world(parsed)
    except NotRunningError:
        # Without a process it is not known which mode is meant on Windows, and not much to check.
        about_node = asked == Asked(namespace=asked.namespace, dial=asked.dial)
        if not about_node or sys.platform == "win32":
            raise
        # That no process runs is an answer, too, and the node can be checked.
        world = await world_without_process(parsed.config)
    return await examine(world, asked, parsed.config)


async def examine(world: World, asked: Asked, config: ProxyConfig) -> Diagnosis:
    """Run every check that applies to a question.

    Args:
        world: everything known of the cluster and the node.
        asked: the question.
        config: of the command line: how to reach the API server, and settings of the mode.

    Raises:
        QuestionError: the question means nothing known.
    """
    question = replace(await read_question(world, asked), dial=asked.dial)
    access = _access(config, world)

    async def ask_api(path: str) -> ApiReply:
        assert access is not None
        return ApiReply(*await fetch_reply(access, path))

    execute = SharedListings(SubprocessExec())
    server_pid = await asyncio.to_thread(Client().server_pid)
    # Where the mode keeps its objects is said by the flags of the process, not by ours.
    with suppress(OSError, ConfigError):
        if world.process and server_pid:
            config = config_of(server_pid)
    mode = mode_of(world, config, execute) if world.mode in SPECS else None
    context = Context(
        world,
        question,
        execute=execute,
        mode=mode,
        here=await is_here(world),
        ask_api=ask_api if access else None,
        renew=world_again,
        server_pid=server_pid,
    )
    # Looking must leave nothing open: the mode may have sockets of netlink by now.
    try:
        return await diagnose(context, CHECKS, source=world.origin.text)
    finally:
        if mode is not None:
            await release(mode)


# The question


async def read_question(world: World, asked: Asked) -> Question:
    """Return the meaning of an operator's words.

    Raises:
        QuestionError: they mean nothing known.
    """
    names = Names(world, asked.namespace or "default")
    question = Question()
    if asked.service and asked.destination:
        raise QuestionError("give either a Service or --to, not both")
    if asked.source and not asked.destination:
        raise QuestionError("give --to with --from, or --from-pod to dial from a pod")
    if asked.service:
        question = _of_service(names, asked.service, names.namespace)
    elif asked.destination:
        question = _of_flow(world, names, asked)
    if not asked.pod:
        return question
    if sys.platform == "win32":
        raise QuestionError("--from-pod: connections from inside a pod need Linux")
    pod = names.client(asked.pod)
    if pod.client is not None or not pod.addresses:
        raise QuestionError(f"--from-pod {asked.pod}: give a pod that runs on this node")
    netns = await asyncio.to_thread(find_namespace, pod.addresses[0])
    if netns is None:
        raise QuestionError(
            f"--from-pod {asked.pod}: no network namespace of this machine has its address "
            f"{pod.addresses[0]}; run this on its node{f' {pod.node}' if pod.node else ''}, as root"
        )
    return replace(question, pod=pod.label, netns=str(netns))


def _of_service(names: Names, text: str, namespace: str) -> Question:
    """Return a question about a Service; one that is not there is a matter of the checks."""
    try:
        target = names.resolve(text)
    except UnknownNameError:
        words = split_words(text)
        first, slash, rest = words.host.partition("/")
        name = ObjectName(first, rest) if slash else ObjectName(namespace, first)
        return Question(name, words.port or None)
    if target.kind == "address" and target.port:
        if (served := _served_at(names.world, target, SourceClass.EXTERNAL)) is None:
            raise QuestionError(f"no Service is at {text}")
        return Question(*served)
    if target.kind != "service" or target.name is None:
        raise QuestionError(f"{text} is not a Service: give its name, or a connection with --to")
    return Question(target.name, split_words(text).port or None)


def _of_flow(world: World, names: Names, asked: Asked) -> Question:
    """Return a question about a connection."""
    client = names.client(asked.source or SourceClass.EXTERNAL.value)
    source = client.client or (client.addresses[0] if client.addresses else None)
    if source is None:
        raise QuestionError(f"--from {asked.source}: its address is not known; give the address")
    target = names.resolve(asked.destination)
    if target.kind == "service":
        if not target.ports or not target.addresses:
            raise QuestionError(f"--to {asked.destination}: it has no address and port to reach")
        port = target.ports[0]
        protocol = Protocol(port.protocol or "TCP")
        number, service = port.port, target.name
    else:
        number, protocol = target.port, target.protocol or Protocol.TCP
        if not target.addresses or not number:
            raise QuestionError(f"--to {asked.destination}: give an address with a port")
        served = _served_at(world, target, source)
        service = served[0] if served else None  # the check of the connection says so
    return Question(service, flow=Flow(source, target.addresses[0], number, protocol))


def _served_at(
    world: World, target: Target, source: str | SourceClass
) -> tuple[ObjectName, str | None] | None:
    """Return the Service at an address, and its port; None if there is none."""
    protocol = target.protocol or Protocol.TCP
    found = trace(world.plan, Flow(source, target.addresses[0], target.port, protocol)).plan
    return None if found is None else (found.name.object_name, found.name.port or None)


# The machine


async def is_here(world: World) -> bool:
    """Whether the node of a World is this machine."""
    if world.origin.kind == "process" or world.origin.text == _ALONE:
        return True
    return is_this_machine(world.config.node_name, world.snapshot.node, await read_facts())


async def world_without_process(config: ProxyConfig) -> World:
    """Return a World of this node alone, for a node on which no steersman process runs."""
    node, facts, mode = node_config(config), await read_facts(), new_mode(config)
    plan = compile_all(Snapshot(), node, facts, mode.traits)
    return World(
        Origin("manifests", _ALONE), Snapshot(), plan, config.mode, mode.variant, node, facts
    )


def _access(config: ProxyConfig, world: World) -> ClusterAccess | None:
    """Return how to reach the API server; None if that is not known, or not meant."""
    if world.origin.kind == "manifests":
        return None
    try:
        return cluster_access(config)
    except (KubeconfigError, OSError):
        return None
