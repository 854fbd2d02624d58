"""Stable codes of problems, and what to do about each: one table, shown in docs/problems.md.

A code never changes its meaning; texts of Findings may. The text names the field and its problem,
the table says what to do and which page of the documentation tells more.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

# Services
DEFECT: Final = "SM1001"
REFUSED: Final = "SM1002"
DESTINATION_HELD: Final = "SM1003"
ADDRESS_OF_THE_NODE: Final = "SM1004"
LIMIT: Final = "SM1005"
SCTP: Final = "SM1006"
HEALTH_CHECK_PORT: Final = "SM1007"
SOURCE_RANGES: Final = "SM1008"
ANNOTATION: Final = "SM1009"
CLUSTER_IP: Final = "SM1010"
SERVICE_FIELD: Final = "SM1011"
EJECTED: Final = "SM1012"
MALFORMED: Final = "SM1013"
# Services that clients cannot use here; these are no Findings
NO_ENDPOINT: Final = "SM1014"
NO_LOCAL_ENDPOINT: Final = "SM1015"
ONLY_DRAINING: Final = "SM1016"
UNPLANNED: Final = "SM1017"
# Endpoints
SLICE_OF_NO_SERVICE: Final = "SM1101"
ENDPOINT: Final = "SM1102"
ENDPOINTS_OBJECT: Final = "SM1103"
# The node
REWRITTEN_RULES: Final = "SM2001"
FALLBACK_MODE: Final = "SM2002"
MODE_OF_A_SWITCH: Final = "SM2003"
LEFTOVERS: Final = "SM2004"
UNKNOWN_NODE: Final = "SM2005"
FAILOVER: Final = "SM2006"
POLLED_FILES: Final = "SM2007"
# Files
CONFIGURATION: Final = "SM3001"
FILE: Final = "SM3002"
# Nodes as their fleet sees them; these are no Findings
UNREACHABLE: Final = "SM4001"
DISAGREEMENT: Final = "SM4002"
DRIFT: Final = "SM4003"
WAITING: Final = "SM4004"
SYNC_FAILED: Final = "SM4005"
NOT_CONNECTED: Final = "SM4006"
NOT_HEALTHY: Final = "SM4007"
OTHER_CONDITION: Final = "SM4008"

CHECKS: Final[Mapping[str, str]] = {
    "service-exists": "SM5101",
    "service-findings": "SM5102",
    "service-endpoints": "SM5103",
    "selector": "SM5104",
    "network-policies": "SM5105",
    "flow": "SM5106",
    "service-policy": "SM5107",
    "node-port-addresses": "SM5108",
    "node-port-listener": "SM5109",
    "cluster-ip-on-node": "SM5110",
    "endpoints-from-node": "SM5111",
    "tries": "SM5112",
    "load": "SM5113",
    "process": "SM5201",
    "source": "SM5202",
    "node": "SM5203",
    "pods": "SM5204",
    "failover": "SM5205",
    "api-server": "SM5206",
    "ejected": "SM5207",
    "other-proxy": "SM5208",
    "mode": "SM5209",
    "rules": "SM5210",
    "lock": "SM5211",
    "number-of-rules": "SM5212",
    "mode-sysctls": "SM5213",
    "firewall": "SM5214",
    "rule-changes": "SM5215",
    "forwarding": "SM5216",
    "rp-filter": "SM5217",
    "route-localnet": "SM5218",
    "ephemeral-ports": "SM5219",
    "bridge-netfilter": "SM5220",
    "hairpin": "SM5221",
    "conntrack-table": "SM5222",
    "conntrack-failures": "SM5223",
    "conntrack-stale": "SM5224",
    "route": "SM5225",
    "overlay": "SM5226",
    "path-mtu": "SM5227",
    "pod-networks": "SM5228",
    "devices": "SM5229",
}
"""Codes of doctor's checks by name; docs/doctor.md has the table."""


class Remedy(NamedTuple):
    """A row of the table."""

    code: str
    """`SM` and four digits; "" for a problem of an unknown code."""
    name: str
    """One or several words with hyphens."""
    remedy: str
    """What to do."""
    docs: str
    """A page of the documentation, with the section if it has several."""


REMEDIES: Final = (
    Remedy(
        DEFECT,
        "defect",
        "Report it with the text and the object; rules that were in force stay in force. "
        "Changing the object slightly may avoid it.",
        "CONTRIBUTING.md",
    ),
    Remedy(
        REFUSED,
        "refused-by-the-kernel",
        "Read the kernel's error: a module is missing, or another program holds the name."
        " Run doctor on the node: its checks mode and other-proxy name the cause. It is "
        "retried.",
        "limits.md",
    ),
    Remedy(
        DESTINATION_HELD,
        "destination-held",
        "Two Services claim one address and port. Give one of them another address or "
        "node port; the holder keeps it until then.",
        "behaviour.md, section 3",
    ),
    Remedy(
        ADDRESS_OF_THE_NODE,
        "address-of-the-node",
        "Give the Service an address that no node has, or use a mode that assigns no "
        "Service addresses to the node.",
        "compatibility.md",
    ),
    Remedy(
        LIMIT,
        "limit",
        "A limit was passed and the rest is ignored. Divide the object, or correct the "
        "listed problems first.",
        "limits.md",
    ),
    Remedy(
        SCTP,
        "sctp",
        "Run these nodes in a mode that forwards SCTP; `steersman plan --proxy-mode MODE`"
        " shows what a switch would change.",
        "compatibility.md",
    ),
    Remedy(
        HEALTH_CHECK_PORT,
        "health-check-port",
        "Give one of the Services another port: until then load balancers may ask the wrong one.",
        "behaviour.md, section 4",
    ),
    Remedy(
        SOURCE_RANGES,
        "source-ranges",
        "Correct the list at once: it decides who may use the load balancer.",
        "behaviour.md, section 3",
    ),
    Remedy(
        ANNOTATION,
        "annotation",
        "Correct the value of the annotation, or remove it; the default is used meanwhile.",
        "configuration.md",
    ),
    Remedy(
        CLUSTER_IP,
        "cluster-ip",
        "Correct the address or the family. The API server never writes such a Service; "
        "look at what wrote it.",
        "behaviour.md, section 3",
    ),
    Remedy(
        SERVICE_FIELD,
        "service-field",
        "Correct the field; an error leaves this part of the Service unserved, a warning "
        "only the value.",
        "behaviour.md, section 3",
    ),
    Remedy(
        EJECTED,
        "ejected",
        "Look at the endpoint's pod and node: it did not answer this node. It returns "
        'once it does; steersman/eject: "false" on the Service keeps its endpoints in.',
        "failover.md",
    ),
    Remedy(
        MALFORMED,
        "malformed",
        "Correct the object, or its writer; its last good version stays in force.",
        "behaviour.md, section 4",
    ),
    Remedy(
        NO_ENDPOINT,
        "no-endpoint",
        "See why no pod is ready: `steersman explain SERVICE` lists the endpoints.",
        "doctor.md",
    ),
    Remedy(
        NO_LOCAL_ENDPOINT,
        "no-local-endpoint",
        "Run a pod there, or use policy Cluster, unless clients avoid nodes without endpoints.",
        "behaviour.md, section 5",
    ),
    Remedy(
        ONLY_DRAINING,
        "only-draining",
        "See why no new pod becomes ready.",
        "doctor.md",
    ),
    Remedy(
        UNPLANNED,
        "unplanned",
        "Add what the text names.",
        "behaviour.md, section 3",
    ),
    Remedy(
        SLICE_OF_NO_SERVICE,
        "slice-of-no-service",
        "Add the label kubernetes.io/service-name with the name of the Service.",
        "configuration.md",
    ),
    Remedy(
        ENDPOINT,
        "endpoint",
        "Correct the EndpointSlice, or the controller that wrote it; its other endpoints "
        "are served.",
        "behaviour.md, section 4",
    ),
    Remedy(
        ENDPOINTS_OBJECT,
        "endpoints-object",
        "Replace the Endpoints object by an EndpointSlice.",
        "configuration.md",
    ),
    Remedy(
        REWRITTEN_RULES,
        "rewritten-rules",
        "Stop the program that changes the rules: two proxies on one node fight for ever."
        " `steersman drift` on the node shows the objects.",
        "operate.md",
    ),
    Remedy(
        FALLBACK_MODE,
        "fallback-mode",
        "Install or load what the mode needs, then restart; doctor's check mode names the cause.",
        "compatibility.md",
    ),
    Remedy(
        MODE_OF_A_SWITCH,
        "mode-of-a-switch",
        "Write the mode into the configuration, so that a restart keeps it.",
        "operate.md",
    ),
    Remedy(
        LEFTOVERS,
        "leftovers",
        "Run doctor on the node; `steersman cleanup` removes the rules of modes that are not used.",
        "operate.md",
    ),
    Remedy(
        UNKNOWN_NODE,
        "unknown-node",
        "Give the name of the node by --hostname-override.",
        "configuration.md",
    ),
    Remedy(
        FAILOVER,
        "failover",
        "Load or install what the text names; until then failing endpoints keep their "
        "share of connections.",
        "failover.md",
    ),
    Remedy(
        POLLED_FILES,
        "polled-files",
        "Raise the sysctls fs.inotify.max_user_instances and max_user_watches; until then"
        " changed files are noticed later.",
        "configuration.md",
    ),
    Remedy(
        CONFIGURATION,
        "configuration",
        "Correct the configuration; `steersman config check FILE` checks a file before it is used.",
        "configuration.md",
    ),
    Remedy(
        FILE,
        "file",
        "Correct the file; the last good version of its objects stays in force.",
        "configuration.md",
    ),
    Remedy(
        UNREACHABLE,
        "unreachable",
        "See whether the node is up and its pod of steersman runs: its rules stay in "
        "force, but nobody updates them if the process has ended.",
        "ui.md",
    ),
    Remedy(
        DISAGREEMENT,
        "disagreement",
        "These nodes serve the Service differently from most others: see their lag and "
        "their connection to the API server, then restart steersman on one of them.",
        "ui.md",
    ),
    Remedy(
        DRIFT,
        "drift",
        "Rules are repaired by themselves. Find out why the program writes them: it may "
        "be another proxy, or a firewall that restores an old state.",
        "operate.md",
    ),
    Remedy(
        WAITING,
        "waiting",
        "Nothing is programmed before the first lists arrived: see the connection to the "
        "API server.",
        "operate.md",
    ),
    Remedy(
        SYNC_FAILED,
        "sync-failed",
        "The rules of the last good sync stay in force and it is retried. Run doctor on the node.",
        "operate.md",
    ),
    Remedy(
        NOT_CONNECTED,
        "not-connected",
        "Check the way from the node to the API server and the credentials; changes do "
        "not arrive meanwhile.",
        "doctor.md",
    ),
    Remedy(
        NOT_HEALTHY,
        "not-healthy",
        "A change waits too long: look at the node's timeline for slow or failed syncs.",
        "ui.md",
    ),
    Remedy(
        OTHER_CONDITION,
        "other-condition",
        "Run `steersman status` on the node, then doctor.",
        "operate.md",
    ),
)
_BY_CODE: Final[Mapping[str, Remedy]] = {each.code: each for each in REMEDIES}
_UNKNOWN: Final = Remedy(
    "", "unknown", "Read the text: the node runs another version of steersman.", "compatibility.md"
)


def remedy_of(code: str) -> Remedy:
    """Return the row of a code; a node of another version may have codes that are unknown here."""
    return _BY_CODE.get(code, _UNKNOWN)
