"""What a listener does with a client: whom it asks for endpoints, whom it tells what came of it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from steersman.model.addresses import canonical_ip
from steersman.model.plan import Endpoint, Verdict
from steersman.proxy.balance import Balancer
from steersman.proxy.budget import DescriptorBudget, Reservation
from steersman.proxy.dials import DialRegistry
from steersman.proxy.listeners import ListenerPlan
from steersman.proxy.sockets import OpenSocket
from steersman.proxy.traffic import EndpointCounters, Traffic


class Route:
    """A listener's plan, which may be replaced at any time, and what is shared around it."""

    def __init__(
        self,
        plan: ListenerPlan,
        balancer: Balancer,
        traffic: Traffic,
        budget: DescriptorBudget,
        open_socket: OpenSocket,
        *,
        dials: DialRegistry,
        destination: tuple[str, int],
    ) -> None:
        """Take the plan, what the ServicePort's listeners share, and what all listeners share.

        The destination is the one that clients use; "" is its address where that may be any.
        """
        self.plan = plan
        self.balancer = balancer
        self.budget = budget
        self.open_socket = open_socket
        self.dials = dials
        self.destination = destination
        self._traffic = traffic
        self.shared = False
        """Another process accepts from the same socket: what waits there is not lost."""

    def endpoints(self, client: str, interface: str = "") -> list[Endpoint]:
        """The endpoints to try for a new connection of a client, in order; [] to turn it away."""
        plan = self.plan
        address = canonical_ip(client) or client
        choice = plan.decide(address, interface)
        if choice.verdict is not Verdict.FORWARD:
            return []
        return self.balancer.order(
            address,
            choice.endpoints,
            time.monotonic(),
            affinity_seconds=plan.affinity_seconds,
            least_connections=plan.least_connections,
        )

    @contextmanager
    def dialling(self) -> Iterator[bool]:
        """Count one that dials; False where the ServicePort has as many as it may."""
        balancer = self.balancer
        may = balancer.dialling < self.budget.dial_limit
        self.budget.refused += not may
        balancer.dialling += may
        try:
            yield may
        finally:
            balancer.dialling -= may

    def serves(self, endpoint: Endpoint) -> bool:
        """Whether some client may still be sent to an endpoint."""
        plan = self.plan
        return any(endpoint in c.endpoints for c in (plan.external, plan.node, plan.pod))

    def reached(self, client: str, endpoint: Endpoint, seconds: float) -> EndpointCounters:
        """Note a connection that was made; return where its bytes are counted."""
        now = time.monotonic()
        address = canonical_ip(client) or client
        self.balancer.reached(address, endpoint, now, self.plan.affinity_seconds)
        counters = self._traffic.of(self.plan.owner, endpoint)
        counters.dialled(seconds)
        return counters

    def failed(self, endpoint: Endpoint) -> None:
        """Note an endpoint that could not be reached."""
        self.balancer.failed(endpoint, time.monotonic())
        self._traffic.of(self.plan.owner, endpoint).failed()

    def ended(self, balancer: Balancer, endpoint: Endpoint, reservation: Reservation) -> None:
        """Note the end of a connection, to the Balancer that chose its endpoint."""
        balancer.ended(endpoint)
        self.budget.release(reservation)


def spread(endpoints: Sequence[Endpoint], attempts: int) -> list[Endpoint]:
    """The endpoints over and over, as many times as there are attempts."""
    return [endpoints[i % len(endpoints)] for i in range(attempts)]
