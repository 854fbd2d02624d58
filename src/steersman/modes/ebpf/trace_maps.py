"""What the maps say about a traced packet, in words."""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

from steersman.model.plan import SourceClass
from steersman.modes.ebpf import layout
from steersman.modes.ebpf.bpf import Object, SumMap
from steersman.modes.ebpf.dump import describe
from steersman.modes.ebpf.layout import FrontendValue, Kind
from steersman.modes.ebpf.lookup import MAPS, Lookup

_VERDICTS = ("forward", "drop", "reject")
_VERDICT_MASK = 3


class Ruling(NamedTuple):
    """What the maps have for a destination and a class of clients."""

    verdict: str
    """`forward`, `drop`, `reject`; "" if the destination is no Service's."""
    text: str
    """The object in the maps, in words."""
    why: str = ""
    """Why it is dropped or rejected, or not balanced at the socket."""
    service: int = 0
    """Number of the ServicePort."""


class TraceMaps(Lookup):
    """The mode's pinned maps, read beside the daemon."""

    def __init__(self, directory: Path) -> None:
        """Open the maps, and remember the affinities that clients have now."""
        self._pinned = {name: Object.pinned(directory / name) for name in (*MAPS, "counters")}
        super().__init__({name: each.fd for name, each in self._pinned.items()})
        self._affinities = dict(self.maps["affinities"].items())
        self._counters = SumMap(self._pinned["counters"].fd)
        self._dropped = self._count_drops()

    def close(self) -> None:
        """Close the maps."""
        for each in self._pinned.values():
            each.close()

    def _count_drops(self) -> dict[str, int]:
        return {
            name: self._counters.sum(layout.number_key(number))
            for number, name in enumerate(layout.COUNTERS)
            if name.startswith("dropped_")
        }

    def new_drops(self) -> list[str]:
        """Return the reasons for which packets were dropped since then, not only of one flow."""
        now = self._count_drops()
        return [name for name, count in now.items() if count > self._dropped[name]]

    def rule(self, protocol: int, source: bytes, destination: bytes, client: SourceClass) -> Ruling:
        """Look up a destination for a client, as the programs do."""
        own = client is SourceClass.NODE
        match = self.find_frontend(protocol, destination, own=own)
        if match is None:
            return self._without_frontend(destination)
        # First its source ranges, then its action for the class.
        name = layout.unpack_name(self.maps["names"].get(layout.number_key(match.service)) or b"")
        value = FrontendValue(match.actions, match.flags, name)
        text, why = describe((Kind.FRONTEND + match.key, value.pack())), ""
        if match.flags & layout.FRONTEND_RANGES:
            why = "" if own else "the client's address is only known in its packets"
            known = any(source[: layout.ADDRESS_SIZE])
            if known and not self.in_prefixes(match.service, source):
                why = "the client is in none of the Service's source ranges"
                return Ruling("drop", text, why, match.service)
        action = match.action(client)
        verdict = _VERDICTS[action & _VERDICT_MASK]
        if verdict == "forward" and action & layout.ACTION_MASQUERADE and not own:
            why = "its source has to change"
        elif verdict != "forward":
            why = "the Service has no endpoint for this client"
        return Ruling(verdict, text, why, match.service)

    def _without_frontend(self, destination: bytes) -> Ruling:
        address, port = layout.split_endpoint(destination)
        at = layout.print_address(address)
        if self.maps["frontends"].get(layout.FRONTEND_KEY.pack(address, 0, 0)):
            return Ruling("reject", f"clusterIP {at}", f"its Service has no port {port}")
        if self.in_prefixes(layout.PREFIXES_SERVICE_CIDRS, address):
            return Ruling("drop", f"{at} is in a ServiceCIDR", "no Service has this address")
        return Ruling("", "")

    def chosen_by(self, service: int, client: bytes, endpoint: bytes) -> str:
        """Say how an endpoint was chosen for a client: an address, or a network namespace."""
        if not self.maps["services"].get(layout.number_key(service)):
            return ""
        seconds = self.affinity_seconds(service)
        if not seconds:
            maglev = self.maps["maglevs"].get(layout.number_key(service))
            return "chosen by the Maglev table" if maglev else "chosen at random"
        known = self._affinities.get(layout.AFFINITY_KEY.pack(client, service))
        if known:
            address, last, port = layout.AFFINITY.unpack(known)
            age = time.monotonic_ns() - last
            if address + port == endpoint and age < seconds * 1_000_000_000:
                return f"the client had it {age // 1_000_000_000} s ago (affinity, {seconds} s)"
        return f"chosen at random; the client keeps it for {seconds} s"
