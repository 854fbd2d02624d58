"""This node's Node object: awaited at the start, watched afterwards (behaviour 13).

until 30 s     wait for the addresses, then start without them
until 330 s    wait for PodCIDRs if local pods are detected by them (NodeCIDR), then fail
afterwards     other PodCIDRs: restart, as the detection depends on them; addresses: log only
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Callable

from steersman.compile.node import node_ips
from steersman.model.inputs import DetectLocalMode, NodeConfig
from steersman.model.kube import Node
from steersman.run.sync.runner import Clock, MonotonicClock
from steersman.source.store import Store

log = logging.getLogger(__name__)

POLL_SECONDS = 1.0
NODE_IPS_SECONDS = 30.0
POD_CIDRS_SECONDS = 300.0


class Wait(enum.Enum):
    """The decision at the start."""

    ON = "wait on"
    START = "start"
    FAIL = "fail"


def pod_cidrs(node: Node | None) -> tuple[str, ...]:
    """Return the CIDRs of this node's pods, as written."""
    return tuple(node.pod_cidrs) if node else ()


def host_ips(node: Node | None) -> tuple[str, ...]:
    """Return this node's addresses, the primary family first; () while it has none."""
    return tuple(node_ips(node, NodeConfig()).values())


def judge(node: Node | None, waited: float, *, needs_pod_cidrs: bool) -> Wait:
    """Decide whether to start with a node's object as it is.

    Args:
        waited: seconds since the process began to wait.
        needs_pod_cidrs: local pods are detected by this node's PodCIDRs (NodeCIDR).
    """
    patience = NODE_IPS_SECONDS + POD_CIDRS_SECONDS
    if needs_pod_cidrs and not pod_cidrs(node):
        return Wait.FAIL if waited >= patience else Wait.ON
    if host_ips(node) or waited >= NODE_IPS_SECONDS:
        return Wait.START
    return Wait.ON


class NodeWatcher:
    """Compares this node's object with the one at the start; requests a restart if necessary."""

    def __init__(self, config: NodeConfig, store: Store, stop: Callable[[str], None]) -> None:
        """Create a watcher; `stop` ends the process with a reason, so that it is restarted."""
        self._name = config.node_name
        self._needs_pod_cidrs = config.detect_local_mode is DetectLocalMode.NODE_CIDR
        self._store = store
        self._stop = stop
        self._started_with: Node | None = None
        self._changed = asyncio.Event()
        """The Store has changed since `wait` looked."""
        self._logged = ""
        self._followed: object = None
        """The input of the last `follow`."""

    async def wait(self, clock: Clock | None = None) -> None:
        """Return when it is time to start, or end the process if that does not come."""
        clock = clock or MonotonicClock()
        what = "PodCIDRs" if self._needs_pod_cidrs else "addresses"
        if self._store.snapshot.node is None:
            log.info('waiting for node "%s" and its %s', self._name, what)
        began, decision = clock.time(), Wait.ON
        while decision is Wait.ON:
            node, waited = self._store.snapshot.node, clock.time() - began
            decision = judge(node, waited, needs_pod_cidrs=self._needs_pod_cidrs)
            if decision is Wait.ON:
                self._changed.clear()
                await clock.wait(self._changed, POLL_SECONDS)
        if decision is Wait.FAIL:
            what = f'node "{self._name}"'  # upstream's words, which people search for
            what = f"PodCIDR allocation on {what}" if node else f"{what} to exist"
            self._stop(f"timeout waiting for {what}")
            return
        self._started_with = node
        self.follow()
        if self._started_with is None:
            text = 'node "%s" is not known, going on without it; %s'
            known = self._store.synced
            why = "is --hostname-override its name?" if known else "the API server has not answered"
            log.warning(text, self._name, why)
        elif not host_ips(self._started_with):
            text = 'node "%s" has no addresses, going on without them; its kubelet reports them'
            log.warning(text, self._name)

    def use(self, config: NodeConfig) -> None:
        """Use a changed configuration."""
        self._needs_pod_cidrs = config.detect_local_mode is DetectLocalMode.NODE_CIDR

    def follow(self) -> None:
        """Log what a change of the object means; end the process if it has to be restarted.

        Other PodCIDRs than at the start end it if local pods are detected by them.
        """
        self._changed.set()
        if self._started_with is None:
            return
        # The Store keeps values that the object has lost (source/store.py): report that, too.
        own, message = self._store.own_node, ""
        state = own.node, own.deleted, own.kept, self._needs_pod_cidrs
        if state == self._followed:  # most changes are of other objects
            return
        self._followed = state
        if own.deleted:
            message = "this node's object was deleted; keeping its last addresses and pod CIDRs"
        elif own.kept:
            message = f"this node's object has no {', '.join(own.kept)}; keeping the last ones"
        before, after = pod_cidrs(self._started_with), pod_cidrs(own.node)
        old, new = host_ips(self._started_with), host_ips(own.node)
        exits = self._needs_pod_cidrs and before != after
        if exits:
            text = f"PodCIDRs of this node changed from {_listed(before)} to {_listed(after)}"
            message = f"{text}; restarting to detect local pods by them"
        elif old != new:
            message = f"addresses of this node changed from {_listed(old)} to {_listed(new)}"
        if message != self._logged:
            log.warning("%s", message or "this node's Node object is complete again")
        self._logged = message
        if exits:
            self._stop(message)


def _listed(values: tuple[str, ...]) -> str:
    return ", ".join(values) or "none"
