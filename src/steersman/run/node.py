"""Wait for this node's object at start, and judge its later changes (behaviour 13). Pure rules.

`judge` is asked once a second while the process waits; `react` at every later change. The waiting
itself is `wait_for_node`'s, with the clock given.
"""

from __future__ import annotations

import asyncio
import enum
import time
from collections.abc import Awaitable, Callable

import msgspec

from steersman.compile.node import UNDETERMINED, node_ips
from steersman.model.inputs import NodeConfig
from steersman.model.kube import Node
from steersman.model.names import Family

POLL_SECONDS = 1.0
NODE_IPS_SECONDS = 30.0
POD_CIDRS_SECONDS = 300.0


class Wait(enum.Enum):
    """What to do at start."""

    ON = "wait on"
    START = "start"
    FAIL = "give up"


class NodeTimeoutError(Exception):
    """This node has no PodCIDRs, without which NodeCIDR detection cannot work."""


class Reaction(msgspec.Struct, frozen=True):
    """What a change of this node's object means beside a new plan."""

    exits: bool = False
    """The process is to end with code 1 and be started afresh."""
    message: str = ""
    """What to log; "" for nothing."""


def pod_cidrs(node: Node | None) -> tuple[str, ...]:
    """Return the CIDRs of this node's pods, as written."""
    if node is None:
        return ()
    spec = node.spec
    return tuple(spec.pod_cidrs or ([spec.pod_cidr] if spec.pod_cidr else ()))


def host_ips(node: Node | None) -> tuple[str, ...]:
    """Return this node's addresses, the primary family's first; () while it has none."""
    ips = node_ips(node, NodeConfig())
    families = sorted(Family, key=lambda family: family is not ips.primary)
    return tuple(ips.of(f) for f in families if ips.of(f) != UNDETERMINED[f])


def judge(node: Node | None, waited: float, *, needs_pod_cidrs: bool) -> Wait:
    """Say whether to start with a node's object as it is.

    Args:
        node: this node's object; None while there is none.
        waited: seconds since the process began to wait.
        needs_pod_cidrs: local pods are told by this node's PodCIDRs (NodeCIDR).
    """
    patience = NODE_IPS_SECONDS + POD_CIDRS_SECONDS
    if needs_pod_cidrs and not pod_cidrs(node):
        return Wait.FAIL if waited >= patience else Wait.ON
    if host_ips(node) or waited >= NODE_IPS_SECONDS:
        return Wait.START
    return Wait.ON


def timeout_message(node: Node | None, name: str) -> str:
    """Say what was waited for in vain, in upstream's words: people search for them."""
    if node is None:
        return f'timeout waiting for node "{name}" to exist'
    return f'timeout waiting for PodCIDR allocation on node "{name}"'


def react(started_with: Node | None, node: Node | None, *, needs_pod_cidrs: bool) -> Reaction:
    """Say what a change means, against the object that the process started with."""
    before, after = pod_cidrs(started_with), pod_cidrs(node)
    if needs_pod_cidrs and before != after:
        text = f"PodCIDRs of this node changed from {_words(before)} to {_words(after)}"
        return Reaction(exits=True, message=f"{text}; restarting to tell local pods by them")
    old, new = host_ips(started_with), host_ips(node)
    if old != new:
        text = f"addresses of this node changed from {_words(old)} to {_words(new)}"
        return Reaction(message=text)
    return Reaction()


def _words(values: tuple[str, ...]) -> str:
    return ", ".join(values) or "none"


async def wait_for_node(
    node: Callable[[], Node | None],
    name: str,
    *,
    needs_pod_cidrs: bool,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> Node | None:
    """Wait until it is time to start; this node's object then, which may still be missing.

    Args:
        node: returns the object as last seen.
        name: this node's name.
        needs_pod_cidrs: local pods are told by this node's PodCIDRs.
        clock: monotonic seconds.
        sleep: waits for some seconds.

    Raises:
        NodeTimeoutError: the PodCIDRs did not come in time.
    """
    began = clock()
    while True:
        current = node()
        match judge(current, clock() - began, needs_pod_cidrs=needs_pod_cidrs):
            case Wait.START:
                return current
            case Wait.FAIL:
                raise NodeTimeoutError(timeout_message(current, name))
        await sleep(POLL_SECONDS)
