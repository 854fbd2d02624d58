"""Plans with numbered endpoints, at their default address, and as hypothesis strategies."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st
from msgspec.structs import replace

from steersman.model.names import Family, PlanKey, Protocol, ServicePortName
from steersman.model.plan import (
    Endpoint,
    FamilySettings,
    Frontend,
    FrontendKind,
    LocalDetector,
    NodeSettings,
    ServicePlan,
    Traits,
)
from tests.support.builders.plans import (
    CLUSTER,
    DROPPED,
    EXTERNAL_LOCAL,
    INTERNAL_LOCAL,
    MASQUERADED,
    NONE_HERE,
    PLAIN,
    REJECTED,
    Actions,
    plan,
)

BOTH = (Family.IPV4, Family.IPV6)
SETTINGS = NodeSettings(
    node_name="here",
    families=BOTH,
    ipv4=FamilySettings(
        detector=LocalDetector(cidr="10.244.0.0/16"),
        node_port_addresses=("192.0.2.1",),
        service_cidrs=("10.96.0.0/12", "10.96.0.0/16"),
    ),
    ipv6=FamilySettings(
        detector=LocalDetector(cidr="fd00:244::/48"), service_cidrs=("fd00:96::/108",)
    ),
    traits=Traits(True, True, True, True),
)
NO_DETECTOR = NodeSettings(families=BOTH, masquerade_all=True, masquerade_bit=3)
INTERFACES = NodeSettings(
    families=BOTH,
    ipv4=FamilySettings(detector=LocalDetector(interface="br0")),
    ipv6=FamilySettings(detector=LocalDetector(interface_prefix="veth"), node_port_addresses=()),
)

UNMASQUERADED: Actions = (CLUSTER,) * 3


def key(
    name: str = "web", family: Family = Family.IPV4, protocol: Protocol = Protocol.TCP
) -> PlanKey:
    return PlanKey(ServicePortName("shop", name, "http", protocol), family)


def pods(numbers: Sequence[int], family: Family = Family.IPV4) -> tuple[Endpoint, ...]:
    """Endpoints by number; even ones are local."""
    form = "10.244.{}.{}" if family is Family.IPV4 else "fd00:244::{:x}:{:x}"
    return tuple(Endpoint(form.format(n >> 8, n & 255), 8080, n % 2 == 0) for n in numbers)


def cluster_ip(actions: Actions = PLAIN, address: str = "10.96.0.10", port: int = 80) -> Frontend:
    return Frontend(FrontendKind.CLUSTER_IP, address, port, *actions)


def port(
    numbers: Sequence[int] = (0, 1, 2),
    *,
    of: PlanKey | None = None,
    frontends: Sequence[Frontend] = (),
    affinity: int = 0,
) -> ServicePlan:
    """A ServicePort with these endpoints, at a clusterIP unless other frontends are given."""
    of = of or key()
    ends = pods(numbers, of.family)
    local = tuple(end for end in ends if end.local)
    return plan(of, *frontends or (cluster_ip(),), cluster=ends, local=local, affinity=affinity)


def moved(plan: ServicePlan) -> ServicePlan:
    """The same endpoints, each where it was not."""
    ends = tuple(replace(end, local=not end.local) for end in plan.cluster)
    return replace(plan, cluster=ends, local=tuple(end for end in ends if end.local))


def _address(kind: FrontendKind, family: Family, number: int) -> str:
    if kind is FrontendKind.NODE_PORT:
        return ""
    third = {"clusterIP": 96, "externalIP": 97, "loadBalancerIP": 98}[kind]
    return f"10.{third}.0.{number}" if family is Family.IPV4 else f"fd00:{third}::{number:x}"


_WITH_ENDPOINTS = (PLAIN, UNMASQUERADED, MASQUERADED, INTERNAL_LOCAL, EXTERNAL_LOCAL, NONE_HERE)
_RANGES = {
    Family.IPV4: ((), ("192.0.2.0/24",), ("10.0.0.0/8", "10.1.0.0/16", "198.51.100.7/32")),
    Family.IPV6: ((), ("2001:db8::/32",), ("fd00::/8", "2001:db8::7/128")),
}


@st.composite
def plans(draw: st.DrawFn, number: int) -> ServicePlan:
    """The plan of ServicePort `number`; its frontends never clash with another's."""
    family = BOTH[number % 2]
    protocol = draw(st.sampled_from(list(Protocol)))
    of = PlanKey(ServicePortName("shop", f"svc-{number // 4}", f"p{number}", protocol), family)
    numbers = draw(st.lists(st.integers(0, 12), unique=True, max_size=7))
    local = any(n % 2 == 0 for n in numbers)
    usable = [a for a in _WITH_ENDPOINTS if local or a not in (INTERNAL_LOCAL, EXTERNAL_LOCAL)]
    choices = usable if numbers else [REJECTED, DROPPED]
    frontends = []
    for kind in FrontendKind:
        if kind is FrontendKind.CLUSTER_IP or draw(st.booleans()):
            ranges = draw(st.sampled_from(_RANGES[family]))
            frontends.append(
                Frontend(
                    kind,
                    _address(kind, family, number // 4 + 1),  # four ports share their addresses
                    (30000 if kind is FrontendKind.NODE_PORT else 80) + number,
                    *draw(st.sampled_from(choices)),
                    ranges if kind is FrontendKind.LOAD_BALANCER_IP else (),
                )
            )
    affinity = draw(st.sampled_from([0, 0, 0, 60, 10800]))
    return port(numbers, of=of, frontends=frontends, affinity=affinity)


def worlds(count: int = 8) -> st.SearchStrategy[dict[PlanKey, ServicePlan]]:
    """Some ServicePorts, in both families."""
    some = st.sets(st.integers(0, count - 1)).flatmap(
        lambda numbers: st.tuples(*(plans(number) for number in sorted(numbers)))
    )
    return some.map(lambda chosen: {each.key: each for each in chosen})


RELAYING = Traits(localhost_node_ports=True, relays_localhost=True)


ON = NodeSettings(
    families=BOTH,
    ipv4=FamilySettings(localhost_node_ports=True),
    ipv6=FamilySettings(localhost_node_ports=True),
    traits=RELAYING,
)
