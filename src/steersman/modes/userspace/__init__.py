"""The userspace mode: a proxy that really proxies, with or without rules that lead to it."""

from __future__ import annotations

from steersman.model.names import Family
from steersman.modes.specs import ModeOptions

NAT, FILTER = "nat", "filter"
# Upstream's names: clients on other machines and in pods, and clients on this node.
CONTAINER, HOST = "KUBE-PORTALS-CONTAINER", "KUBE-PORTALS-HOST"
# Ours: what a client may not reach.
FIREWALL = "KUBE-PORTALS-FIREWALL"
CHAINS = {NAT: (CONTAINER, HOST), FILTER: (FIREWALL,)}
ALL_CHAINS = frozenset((table, name) for table, names in CHAINS.items() for name in names)
TABLE = "kube-portals"
"""The table of nftables."""


def may_have_left(options: ModeOptions) -> bool:
    """Return whether chains or a table of a kind of portals are left, or may be.

    See `registry.may_have_left`.
    """
    # Not at the top: the mode of Windows imports this package, too.
    from steersman.netfilter.iptables.tool import legacy_left  # noqa: PLC0415
    from steersman.netfilter.nft.tables import known_chains_left, table_left  # noqa: PLC0415

    families = tuple(Family)
    if options.portals == "nftables":
        return bool(table_left(TABLE, families))
    if options.portals == "iptables" and options.iptables_variant == "legacy":
        return bool(legacy_left(families))
    if options.portals == "direct":
        return False  # an interface of its own is looked up by its name, which the mode knows
    return options.portals != "iptables" or bool(known_chains_left(ALL_CHAINS, families))
