"""What to do about each kind of problem that nodes report: one table, shown in docs/problems.md.

The text of a Finding names the field and its problem. A Remedy says what to do, how to look
closer, and which page of the documentation tells more. The first row that fits is used.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from steersman.model.findings import Finding
from steersman.model.node_state import Condition

_OBJECT = re.compile(r"(Service|EndpointSlice|Endpoints) ([^/\s]+)/(\S+)")
_DNS_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_NAMED = re.compile(r"(Service|EndpointSlice|Endpoints|Node|ServiceCIDR) \S+")
_KINDS = {
    "the node": "node",
    "leftovers": "node",
    "objects of an earlier process": "node",
    "inotify": "node",
    "configuration": "configuration",
    "KubeProxyConfiguration": "configuration",
    "Findings": "Findings",
}
"""The kind of a Finding whose object has no name of its own."""


class About(NamedTuple):
    """The Kubernetes object that a Finding is about."""

    kind: str
    namespace: str
    name: str

    @property
    def service(self) -> str:
        """The Service as `namespace/name`; "" if it is another object."""
        return f"{self.namespace}/{self.name}" if self.kind == "Service" else ""

    @property
    def command(self) -> str:
        """A command that shows the object; "" if its name cannot be that of an object."""
        if not (_DNS_NAME.fullmatch(self.namespace) and _DNS_NAME.fullmatch(self.name)):
            return ""  # nobody should copy such text into a shell
        return f"kubectl -n {self.namespace} get {self.kind.lower()} {self.name} -o yaml"


class Remedy(NamedTuple):
    """A row of the table."""

    name: str
    """One or several words with hyphens; the row in docs/problems.md."""
    kind: str
    """A regular expression that the object's kind matches as a whole."""
    field: str
    """One that is found in the field."""
    says: str
    """One that is found in the reason."""
    remedy: str
    """What to do."""
    docs: str
    """A page of the documentation, with the section if it has several."""

    def fits(self, kind: str, field: str, reason: str) -> bool:
        """Return whether the row is about this problem."""
        return bool(
            re.fullmatch(self.kind, kind)
            and re.search(self.field, field)
            and re.search(self.says, reason)
        )


_CONFLICT = "belongs to|is the clusterIP of|is held by"
REMEDIES = (
    # Findings about Services and EndpointSlices
    Remedy(
        "defect",
        "Service|EndpointSlice|node",
        "",
        "please report",
        "Report it with the text and the object; rules that were in force stay in force. Changing "
        "the object slightly may avoid it.",
        "CONTRIBUTING.md",
    ),
    Remedy(
        "refused-by-the-kernel",
        "Service",
        "^port ",
        "the kernel refuses",
        "Read the kernel's error: a module is missing, or another program holds the name. Run "
        "doctor on the node: its checks mode and other-proxy name the cause. It is retried.",
        "limits.md",
    ),
    Remedy(
        "destination-held",
        "Service",
        "",
        _CONFLICT,
        "Two Services claim one address and port. Give one of them another address or node port; "
        "the holder keeps it until then.",
        "behaviour.md, section 3",
    ),
    Remedy(
        "address-of-the-node",
        "Service",
        "",
        "is an address of this node",
        "Give the Service an address that no node has, or use a mode that assigns no Service "
        "addresses to the node.",
        "compatibility.md",
    ),
    Remedy(
        "limit",
        "Service|EndpointSlice|Findings",
        "",
        r"divide the Service|more than|has \d+ entries|are not listed",
        "A limit was passed and the rest is ignored. Divide the object, or correct the listed "
        "problems first.",
        "limits.md",
    ),
    Remedy(
        "sctp",
        "Service",
        "^spec.ports$",
        "SCTP",
        "Run these nodes in a mode that forwards SCTP; `steersman plan --proxy-mode MODE` shows "
        "what a switch would change.",
        "compatibility.md",
    ),
    Remedy(
        "health-check-port",
        "Service",
        "^spec.healthCheckNodePort$",
        "",
        "Give one of the Services another port: until then load balancers may ask the wrong one.",
        "behaviour.md, section 4",
    ),
    Remedy(
        "source-ranges",
        "Service",
        "loadBalancerSourceRanges|loadBalancer.ingress$",
        "CIDR|source ranges",
        "Correct the list at once: it decides who may use the load balancer.",
        "behaviour.md, section 3",
    ),
    Remedy(
        "annotation",
        "Service|EndpointSlice",
        "^metadata.annotations",
        "",
        "Correct the value of the annotation, or remove it; the default is used meanwhile.",
        "configuration.md",
    ),
    Remedy(
        "cluster-ip",
        "Service",
        "^spec.clusterIPs?|^spec.ipFamilies",
        "",
        "Correct the address or the family. The API server never writes such a Service; look at "
        "what wrote it.",
        "behaviour.md, section 3",
    ),
    Remedy(
        "slice-of-no-service",
        "EndpointSlice",
        "^metadata.labels",
        "",
        "Add the label kubernetes.io/service-name with the name of the Service.",
        "configuration.md",
    ),
    Remedy(
        "endpoint",
        "EndpointSlice",
        "",
        "",
        "Correct the EndpointSlice, or the controller that wrote it; its other endpoints are "
        "served.",
        "behaviour.md, section 4",
    ),
    Remedy(
        "endpoints-object",
        "Endpoints",
        "",
        "",
        "Replace the Endpoints object by an EndpointSlice.",
        "configuration.md",
    ),
    Remedy(
        "service-field",
        "Service",
        "",
        "",
        "Correct the field; an error leaves this part of the Service unserved, a warning only the "
        "value.",
        "behaviour.md, section 3",
    ),
    # Findings about the node, its files and its configuration
    Remedy(
        "rewritten-rules",
        "node",
        "^rules$",
        "",
        "Stop the program that changes the rules: two proxies on one node fight for ever. "
        "`steersman drift` on the node shows the objects.",
        "operate.md",
    ),
    Remedy(
        "fallback-mode",
        "node",
        "^mode$",
        "cannot|falls|not",
        "Install or load what the mode needs, then restart; doctor's check mode names the cause.",
        "compatibility.md",
    ),
    Remedy(
        "mode-of-a-switch",
        "node",
        "^mode$",
        "",
        "Write the mode into the configuration, so that a restart keeps it.",
        "operate.md",
    ),
    Remedy(
        "leftovers",
        "node",
        "",
        "",
        "Run doctor on the node; `steersman cleanup` removes the rules of modes that are not used.",
        "operate.md",
    ),
    Remedy(
        "unknown-node",
        "Node",
        "",
        "",
        "Give the name of the node by --hostname-override.",
        "configuration.md",
    ),
    Remedy(
        "configuration",
        "configuration",
        "",
        "",
        "Correct the configuration; `steersman config check FILE` checks a file before it is used.",
        "configuration.md",
    ),
    Remedy(
        "file",
        "file",
        "",
        "",
        "Correct the file; the last good version of its objects stays in force.",
        "configuration.md",
    ),
    # Problems of nodes that are no Finding
    Remedy(
        "unreachable",
        "unreachable",
        "",
        "",
        "See whether the node is up and its pod of steersman runs: its rules stay in force, but "
        "nobody updates them if the process has ended.",
        "ui.md",
    ),
    Remedy(
        "disagreement",
        "disagreement",
        "",
        "",
        "These nodes serve the Service differently from most others: see their lag and their "
        "connection to the API server, then restart steersman on one of them.",
        "ui.md",
    ),
    Remedy(
        "drift",
        "drift",
        "",
        "",
        "Rules are repaired by themselves. Find out why the program writes them: it may be another "
        "proxy, or a firewall that restores an old state.",
        "operate.md",
    ),
    Remedy(
        "waiting",
        "condition",
        "^Synced$",
        "waiting for",
        "Nothing is programmed before the first lists arrived: see the connection to the API "
        "server.",
        "operate.md",
    ),
    Remedy(
        "sync-failed",
        "condition",
        "^(Synced|KernelMatches)$",
        "",
        "The rules of the last good sync stay in force and it is retried. Run doctor on the node.",
        "operate.md",
    ),
    Remedy(
        "not-connected",
        "condition",
        "^SourceConnected$",
        "",
        "Check the way from the node to the API server and the credentials; changes do not arrive "
        "meanwhile.",
        "doctor.md",
    ),
    Remedy(
        "not-healthy",
        "condition",
        "^Healthy$",
        "",
        "A change waits too long: look at the node's timeline for slow or failed syncs.",
        "ui.md",
    ),
    Remedy(
        "other-condition",
        "condition",
        "",
        "",
        "Run `steersman status` on the node, then doctor.",
        "operate.md",
    ),
)


def about(finding: Finding) -> About | None:
    """Return the Kubernetes object that a Finding is about, None if it is none with a namespace."""
    found = _OBJECT.fullmatch(finding.object)
    return About(*found.groups()) if found else None


def remedy_for_finding(finding: Finding) -> Remedy:
    """Return the row for a Finding."""
    named = _NAMED.fullmatch(finding.object)
    # Any other text is a file, or a place in it.
    kind = named[1] if named else _KINDS.get(finding.object, "file")
    return _first(kind, finding.field, finding.reason)


def remedy_for_condition(condition: Condition) -> Remedy:
    """Return the row for a condition that is not True."""
    return _first("condition", condition.type, condition.message)


def remedy_named(name: str) -> Remedy:
    """Return the row of a name."""
    return next(each for each in REMEDIES if each.name == name)


def _first(kind: str, field: str, reason: str) -> Remedy:
    fitting = (each for each in REMEDIES if each.fits(kind, field, reason))
    return next(fitting, remedy_named("file"))
