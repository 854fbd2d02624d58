"""What a test of connectivity reads of the objects of a cluster."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from steersman.model.kube import ContainerState, NodeStatus, Pod, PodCondition, PodStatus
from steersman.model.names import Family


class Meta(msgspec.Struct, frozen=True):
    """Metadata of an object."""

    name: str
    labels: dict[str, str] | None = None


class Namespace(msgspec.Struct, frozen=True):
    """A namespace."""

    metadata: Meta


class _NodeStatus(NodeStatus, frozen=True):
    conditions: Sequence[PodCondition] = ()


class Node(msgspec.Struct, frozen=True):
    """A node of the cluster, with the label and the conditions that change what it can run."""

    metadata: Meta
    status: _NodeStatus = _NodeStatus()

    @property
    def unfit(self) -> str:
        """Why no pod of ours can run there; "" if one can."""
        if (self.metadata.labels or {}).get("kubernetes.io/os", "linux") != "linux":
            return "this is no Linux node"
        ready = any(c.type == "Ready" and c.status == "True" for c in self.status.conditions)
        return "" if ready else "the Node is not ready"

    def address(self, family: Family) -> str:
        """Return the internal address of a family; "" if there is none."""
        for each in self.status.addresses or ():
            if each.type == "InternalIP" and (":" in each.address) is (family is Family.IPV6):
                return each.address
        return ""


# Pods

_HOPELESS = frozenset(
    ("ImagePullBackOff", "ErrImageNeverPull", "InvalidImageName", "CreateContainerConfigError")
)
"""Reasons of a kubelet for which a container waits in vain."""


def state_of(pod: Pod, container: str) -> ContainerState:
    """Return how a container is."""
    statuses = (pod.status and pod.status.container_statuses) or ()
    return next((each.state for each in statuses if each.name == container), ContainerState())


def has_ended(pod: Pod, container: str) -> bool:
    """Return whether a container has ended or will never run, such as without its image."""
    state = state_of(pod, container)
    # A kubelet without room for a pod fails it before it has any container.
    failed = pod.status is not None and pod.status.phase == "Failed"
    waiting = state.waiting is not None and state.waiting.reason in _HOPELESS
    return failed or waiting or state.terminated is not None


def trouble_of(pod: Pod, container: str) -> str:
    """Say why a container does not run or has no result."""
    state, status = state_of(pod, container), pod.status or PodStatus()
    if state.waiting is not None:
        return _joined(state.waiting.reason, state.waiting.message)
    if state.terminated is not None and state.terminated.exit_code:
        said = state.terminated.message or state.terminated.reason
        return f"it ended with status {state.terminated.exit_code}: {said}"
    return _joined(status.reason, status.message) or f"it is {status.phase or 'unknown'}"


def _joined(*words: str) -> str:
    return ": ".join(filter(None, words))
