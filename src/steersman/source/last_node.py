"""This node's object, with lost fields filled in from its last good version.

A Node can be deleted by mistake, and a kubelet that registers it again does so without addresses,
pod CIDRs and zone: those come seconds later, from the cloud controller. Programming the node by
such an object would open node ports on every address and masquerade the traffic of its pods. So a
field that a Node has lost keeps its last value until it has a new one.
"""

from __future__ import annotations

import msgspec

from steersman.model.addresses import canonical_ip, family_of
from steersman.model.kube import Labels, Node, NodeAddress, NodeStatus
from steersman.model.names import Family

_HOST_TYPES = ("InternalIP", "ExternalIP")


class LastNode:
    """This node's object as plans see it."""

    def __init__(self) -> None:
        self.node: Node | None = None
        self.deleted = False
        """Whether the API server has deleted the object."""
        self.kept: tuple[str, ...] = ()
        """Names of the fields that the object has lost and keeps, for messages."""
        self._replaced = False  # whether the object was created again and has no zone yet

    def update(self, node: Node | None) -> None:
        """Process the object as the API server has it; None if it was deleted."""
        known = self.node
        # The first object, or a deletion: keep the last object.
        if known is None or node is None:
            self.deleted = node is None and known is not None
            self._replaced |= self.deleted
            self.node = known or node
            return
        self.deleted, kept = False, []
        self._replaced |= known.metadata.uid != node.metadata.uid

        # Addresses are kept by family; those of a family that is still there are replaced.
        addresses = _addresses(node)
        if lost := _addresses(known).keys() - addresses.keys():
            kept += [f"{family.kubernetes} addresses" for family in sorted(lost)]
            ordered = {**_addresses(known), **addresses}
            others = [each for each in node.addresses if each.type not in _HOST_TYPES]
            status = NodeStatus([*(a for some in ordered.values() for a in some), *others])
            node = msgspec.structs.replace(node, status=status)

        if known.pod_cidrs and not node.pod_cidrs:
            kept.append("pod CIDRs")
            cidr, cidrs = known.spec.pod_cidr, known.spec.pod_cidrs
            spec = msgspec.structs.replace(node.spec, pod_cidr=cidr, pod_cidrs=cidrs)
            node = msgspec.structs.replace(node, spec=spec)

        # A zone is kept only for a new object: from the same one, somebody has removed the label.
        if node.zone:
            self._replaced = False
        elif self._replaced and known.zone:
            kept.append("zone")
            labels = msgspec.structs.replace(node.metadata.labels or Labels(), zone=known.zone)
            meta = msgspec.structs.replace(node.metadata, labels=labels)
            node = msgspec.structs.replace(node, metadata=meta)

        self.node, self.kept = node, tuple(kept)


def _addresses(node: Node) -> dict[Family, list[NodeAddress]]:
    """Return the valid addresses of a Node's host by family, in order."""
    found: dict[Family, list[NodeAddress]] = {}
    for each in node.addresses:
        address = canonical_ip(each.address)
        if each.type in _HOST_TYPES and address is not None:
            found.setdefault(family_of(address), []).append(each)
    return found
