"""Objects as an API server has them, for hypothesis: every field that is read, and some others."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from hypothesis import strategies as st

from tests.support.apiserver.world import Object

names = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=300)
texts = st.text(max_size=200).filter(bool)
int32 = st.integers(1, (1 << 31) - 1)
# Go takes the first second of the year 1 for no time; JSON has null there.
times = st.datetimes(datetime(2, 1, 1)).map(
    lambda when: when.replace(microsecond=0).isoformat() + "Z"
)
maps = st.dictionaries(
    st.sampled_from([
        "kubernetes.io/service-name", "service.kubernetes.io/headless", "app", "a" * 200,
        "endpoints.kubernetes.io/last-change-trigger-time", "steersman/weight", "steersman/probe",
        "topology.kubernetes.io/zone",
    ]),
    st.text(max_size=150), min_size=1,
)  # fmt: skip


def record(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Object]:
    """Objects of some of these fields."""
    return st.fixed_dictionaries({}, optional=fields)


def full(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Object]:
    return st.fixed_dictionaries(fields)


def many(item: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    return st.lists(item, min_size=1, max_size=3)


meta = st.builds(
    lambda needed, more: {**needed, **more},
    full(name=names, namespace=names, uid=texts, resourceVersion=texts),
    record(
        generateName=texts, creationTimestamp=times, deletionTimestamp=times,
        labels=maps, annotations=maps, generation=int32,
    ),
)  # fmt: skip
references = full(kind=texts, namespace=texts, name=texts)
zones = many(full(name=texts))
endpoints = st.builds(
    lambda needed, more: {**needed, **more},
    full(conditions=record(ready=st.booleans(), serving=st.booleans(), terminating=st.booleans())),
    record(
        addresses=many(texts), hostname=texts, targetRef=references, nodeName=texts, zone=texts,
        hints=record(forZones=zones, forNodes=zones),
    ),
)  # fmt: skip
slices = st.builds(
    lambda needed, more: {**needed, **more},
    full(metadata=meta, addressType=texts),
    record(
        endpoints=many(endpoints),
        ports=many(record(name=texts, protocol=texts, port=st.integers(-5, 70000))),
    ),
)
ports = st.builds(
    lambda needed, more: {**needed, **more},
    full(port=int32, targetPort=st.one_of(int32, texts)),
    record(name=texts, protocol=texts, nodePort=int32),
)
services = full(
    metadata=meta,
    spec=record(
        ports=many(ports), selector=maps, clusterIP=texts, type=texts, externalIPs=many(texts),
        sessionAffinity=texts, loadBalancerSourceRanges=many(texts), externalName=texts,
        externalTrafficPolicy=texts, healthCheckNodePort=int32, clusterIPs=many(texts),
        ipFamilies=many(texts), internalTrafficPolicy=texts, ipFamilyPolicy=texts,
        sessionAffinityConfig=record(clientIP=record(timeoutSeconds=int32)),
    ),
    status=full(
        loadBalancer=record(ingress=many(record(ip=texts, hostname=texts, ipMode=texts)))
    ),
)  # fmt: skip
nodes = full(
    metadata=meta,
    spec=record(
        podCIDR=texts, podCIDRs=many(texts), taints=many(full(key=texts, value=texts, effect=texts))
    ),
    status=record(addresses=many(full(type=texts, address=texts))),
)
cidrs = full(metadata=meta, spec=record(cidrs=many(texts)))
objects = st.one_of(
    st.tuples(st.just("EndpointSlice"), slices),
    st.tuples(st.just("Service"), services),
    st.tuples(st.just("Node"), nodes),
    st.tuples(st.just("ServiceCIDR"), cidrs),
)
