"""What a test of connectivity reads of the objects of a cluster."""

from __future__ import annotations

from typing import Any

import msgspec

from steersman.model.names import Family


class Meta(msgspec.Struct, frozen=True):
    """Metadata of an object."""

    name: str
    labels: dict[str, str] | None = None


class Namespace(msgspec.Struct, frozen=True):
    """A namespace."""

    metadata: Meta


class _Address(msgspec.Struct, frozen=True):
    type: str
    address: str


class _Condition(msgspec.Struct, frozen=True):
    type: str
    status: str


class _NodeStatus(msgspec.Struct, frozen=True):
    addresses: list[_Address] = []
    conditions: list[_Condition] = []


class Node(msgspec.Struct, frozen=True):
    """A node of the cluster."""

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
        for each in self.status.addresses:
            if each.type == "InternalIP" and (":" in each.address) is (family is Family.IPV6):
                return each.address
        return ""


class _Reason(msgspec.Struct, frozen=True, rename="camel"):
    exit_code: int = 0
    reason: str = ""
    message: str = ""


class State(msgspec.Struct, frozen=True):
    """How a container is: one of these."""

    running: dict[str, Any] | None = None
    waiting: _Reason | None = None
    terminated: _Reason | None = None


class _Container(msgspec.Struct, frozen=True):
    name: str
    state: State = State()


class _PodStatus(msgspec.Struct, frozen=True, rename="camel"):
    phase: str = ""
    message: str = ""
    container_statuses: list[_Container] = []


class _Image(msgspec.Struct, frozen=True):
    image: str = ""


class _PodSpec(msgspec.Struct, frozen=True):
    containers: list[_Image] = []


class Pod(msgspec.Struct, frozen=True):
    """A pod."""

    metadata: Meta
    spec: _PodSpec = _PodSpec()
    status: _PodStatus = _PodStatus()

    def state(self, container: str) -> State:
        """Return how a container is."""
        found = (each.state for each in self.status.container_statuses if each.name == container)
        return next(found, State())

    def trouble(self, container: str) -> str:
        """Say why a container does not run or has no result."""
        state = self.state(container)
        if state.waiting is not None:
            return ": ".join(filter(None, (state.waiting.reason, state.waiting.message)))
        if state.terminated is not None and state.terminated.exit_code:
            said = state.terminated.message or state.terminated.reason
            return f"it ended with status {state.terminated.exit_code}: {said}"
        return self.status.message or f"it is {self.status.phase or 'unknown'}"
