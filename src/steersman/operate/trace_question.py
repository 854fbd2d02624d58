"""From the words of `steersman trace` to the packet to follow."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from steersman.config import ProxyConfig
from steersman.model.addresses import family_of, join_host_port
from steersman.model.names import Protocol
from steersman.model.plan import SourceClass
from steersman.model.world import World
from steersman.operate.answer import QuestionError
from steersman.operate.names import Names, UnknownNameError, known_pod
from steersman.run.process.startup import cluster_access
from steersman.source.fetch import fetch_pod
from steersman.source.kubeconfig import KubeconfigError
from steersman.source.wire import ApiError

_NAMESPACES = Path("/run/netns")


class TraceQuestion(msgspec.Struct, frozen=True):
    """Which packet to follow."""

    destination: str
    """A canonical address."""
    port: int
    protocol: Protocol = Protocol.TCP
    source: str = ""
    """The client's address; "" for this node, or with `wait` for anyone."""
    netns: Path | None = None
    """The network namespace to send from; None finds it by `source`."""
    wait: bool = False
    """Wait for a packet of real traffic instead of sending one."""
    timeout: float = 3.0
    """Seconds to wait for an answer, or for the packet."""
    must_answer: bool = False
    """Silence is a fault for a datagram, too: others of its way are answered."""


async def ask(
    world: World, namespace: str, config: ProxyConfig, words: Mapping[str, Any]
) -> TraceQuestion:
    """Resolve the words of a question; the API server knows pods that are behind no Service.

    Args:
        world: where to look first.
        namespace: of names without one.
        config: says how to reach the API server.
        words: arguments of `read_question`.

    Raises:
        QuestionError: something is unknown, missing or ambiguous.
    """
    try:
        return read_question(Names(world, namespace), **words)
    except UnknownNameError as error:
        if error.pod is None or world.origin.kind == "manifests":
            raise
        try:
            found = await fetch_pod(cluster_access(config), *error.pod)
        except KubeconfigError:
            found = None  # no flag names an API server, and this is no pod
        except ApiError as problem:
            text = f"{error}; asking the API server failed: {problem}"
            raise QuestionError(text) from error
        if found is None:
            raise
        return read_question(Names(world, namespace, [known_pod(found)]), **words)


def read_question(
    names: Names,
    client: str,
    to: str,
    *,
    netns: str = "",
    wait: bool = False,
    timeout: float = 3.0,
) -> TraceQuestion:
    """Resolve the client and the destination.

    Args:
        names: of the World.
        client: a pod, an address, or the words `node` and `outside`; "" for this node.
        to: a Service with a port, or the address and port of anything else.
        netns: a network namespace: its path, its name, or the pid of a process in it.
        wait: see TraceQuestion, as `timeout`.

    Raises:
        QuestionError: something is unknown, missing or ambiguous.
    """
    target = names.resolve(to)
    port, protocol = target.port, target.protocol or Protocol.TCP
    if target.kind == "service":
        if len(target.ports) != 1:
            listed = [f"{target.label}:{each.name or each.port}" for each in target.ports]
            write = f"write {' or '.join(listed)}" if listed else "it has none"
            raise QuestionError(f"{target.label}: a packet goes to one port: {write}")
        (only,) = target.ports
        port, protocol = only.port, Protocol(only.protocol or "TCP")
    elif not port:
        raise QuestionError(f"give a port, such as {join_host_port(target.label, 80)}")
    source = _source(names, client, inside=bool(netns), wait=wait)
    families = {family_of(address) for address in source}
    addresses = [a for a in target.addresses if not families or family_of(a) in families]
    if not addresses:
        what = "no address in the client's family" if target.addresses else "no address of its own"
        raise QuestionError(f"{target.label} has {what}: trace a connection to one of its pods")
    sources = [a for a in source if family_of(a) is family_of(addresses[0])]
    return TraceQuestion(
        addresses[0],
        port,
        protocol,
        sources[0] if sources else "",
        namespace_path(netns) if netns else None,
        wait,
        timeout,
    )


def _source(names: Names, client: str, *, inside: bool, wait: bool) -> tuple[str, ...]:
    """Return the addresses that the packet may come from; () for this node, or for anyone."""
    if not client:
        return ()
    target = names.client(client)
    if target.client is SourceClass.NODE or (wait and target.kind == "class"):
        return ()
    if target.kind == "class":
        raise QuestionError(
            f"--from {client}: a probe is sent from this node or from a pod on it: name one, or"
            " give --wait to follow the next packet of real traffic"
        )
    if target.kind == "node":
        if target.node != names.here and not wait:
            raise QuestionError(
                f"--from {client}: this is {names.here or 'another node'}: run the command on"
                f" {target.label}"
            )
        return () if target.node == names.here else target.addresses
    if target.kind == "pod" and target.node not in ("", names.here) and not (wait or inside):
        raise QuestionError(
            f"--from {client}: the pod runs on {target.node}: run the command there, or give --wait"
            " to follow its next packet that comes here"
        )
    return target.addresses


def namespace_path(text: str, folder: Path = _NAMESPACES) -> Path:
    """Return the path of a network namespace.

    Raises:
        QuestionError: there is none.
    """
    path = Path(f"/proc/{text}/ns/net") if text.isdecimal() else Path(text)
    if "/" not in text and not text.isdecimal():
        path = folder / text
    if not path.exists():
        raise QuestionError(f"--netns {text}: there is no network namespace {path}")
    return path
