"""This node's object: waited for at the start, followed while the process runs (behaviour 13)."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable

from steersman.model.inputs import DetectLocalMode, NodeConfig
from steersman.model.kube import Node
from steersman.run.node import NodeTimeoutError, host_ips, react, wait_for_node
from steersman.source.store import Store

log = logging.getLogger(__name__)


class OwnNode:
    """Knows with which Node the process started, and says when it has to start afresh."""

    def __init__(self, config: NodeConfig, store: Store, stop: Callable[[str], None]) -> None:
        """Take whose Node it is, where it is to be found, and how to end the process."""
        self._name = config.node_name
        self._needs_pod_cidrs = config.detect_local_mode is DetectLocalMode.NODE_CIDR
        self._store = store
        self._stop = stop
        self._started_with: Node | None = None
        self._said = ""
        self._followed: object = None
        """What `follow` looked at last."""

    async def wait(
        self,
        sleep: Callable[[float], Awaitable[None]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Return when it is time to start; `sleep` waits for seconds, or for news."""
        what = "PodCIDRs" if self._needs_pod_cidrs else "addresses"
        if self._store.snapshot.node is None:
            log.info('waiting for node "%s" and its %s', self._name, what)
        try:
            self._started_with = await wait_for_node(
                lambda: self._store.snapshot.node,
                self._name,
                needs_pod_cidrs=self._needs_pod_cidrs,
                clock=clock,
                sleep=sleep,
            )
        except NodeTimeoutError as error:
            self._stop(str(error))
        else:
            self._say_what_is_missing()

    def _say_what_is_missing(self) -> None:
        if host_ips(self._started_with):
            return
        if self._started_with is None:
            text = 'node "%s" is not known, going on without; is --hostname-override its name?'
        else:
            text = 'node "%s" has no addresses, going on without; its kubelet should report them'
        log.warning(text, self._name)

    def use(self, config: NodeConfig) -> None:
        """Follow the object by a changed configuration."""
        self._needs_pod_cidrs = config.detect_local_mode is DetectLocalMode.NODE_CIDR

    def follow(self) -> None:
        """Log what a change of the object means, and end the process if it has to start afresh."""
        if self._started_with is None:
            return
        own, message = self._store.own_node, ""
        state = own.node, own.deleted, own.kept, self._needs_pod_cidrs
        if state == self._followed:  # most changes are of other objects
            return
        self._followed = state
        if own.deleted:
            message = "this node's object was deleted; keeping its last addresses and pod CIDRs"
        elif own.kept:
            message = f"this node's object has no {', '.join(own.kept)}; keeping the last ones"
        reaction = react(self._started_with, own.node, needs_pod_cidrs=self._needs_pod_cidrs)
        message = reaction.message or message
        if message != self._said:
            log.warning("%s", message or "this node's object is complete again")
        self._said = message
        if reaction.exits:
            self._stop(reaction.message)
