"""What manifest files mean: documents, kinds, faults, and many files together."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steersman.compile.service import service_ports
from steersman.model.findings import Severity
from steersman.model.kube import EndpointSlice, Service
from steersman.model.names import Family, ObjectName
from steersman.source import documents
from steersman.source.documents import BrokenFileError, read_documents
from steersman.source.manifests import Manifest, combine_manifests, read_manifest

CART = """\
apiVersion: v1
kind: Service
metadata: {name: cart, namespace: shop}
spec: {clusterIP: 10.96.0.1, ports: [{port: 80}]}
"""
SLICE = """\
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: cart-1, namespace: shop, labels: {kubernetes.io/service-name: cart}}
addressType: IPv4
ports: [{port: 8080}]
endpoints: [{addresses: [10.0.0.1]}]
"""
KUBECTL = """\
apiVersion: v1
items:
- apiVersion: v1
  kind: Service
  metadata:
    annotations:
      kubectl.kubernetes.io/last-applied-configuration: |
        {"kind":"Service"}
    creationTimestamp: 2026-11-21T03:38:27Z
    managedFields:
    - {apiVersion: v1, fieldsType: FieldsV1, fieldsV1: {"f:spec": {}}, manager: kubectl}
    name: cart
    namespace: shop
    resourceVersion: "157631"
  spec:
    clusterIP: 10.96.0.1
    clusterIPs: [10.96.0.1]
    ports:
    - {name: http, port: 80, protocol: TCP, targetPort: web}
  status:
    loadBalancer: {}
- apiVersion: v1
  kind: Node
  metadata: {name: node-a}
  status: {addresses: [{type: InternalIP, address: 192.0.2.1}]}
- apiVersion: networking.k8s.io/v1
  kind: ServiceCIDR
  metadata: {name: kubernetes}
  spec: {cidrs: [10.96.0.0/12]}
kind: List
metadata:
  resourceVersion: ""
"""


def read(text: str, path: str = "a.yaml") -> Manifest:
    return read_manifest(path, text.encode())


def names(manifest: Manifest) -> list[str]:
    return [f"{kind} {obj.metadata.object_name}" for kind, obj, _ in manifest.objects]


def one_service(text: str) -> Service:
    ((_, obj, _),) = read(text).objects
    assert isinstance(obj, Service)
    return obj


def test_several_documents_in_a_file() -> None:
    manifest = read(f"# head\n---\n{CART}---\n---\n{SLICE}...\n")
    assert names(manifest) == ["Service shop/cart", "EndpointSlice shop/cart-1"]
    assert manifest.findings == ()


def test_what_kubectl_prints() -> None:
    manifest = read(KUBECTL)
    assert names(manifest) == ["Service shop/cart", "Node node-a", "ServiceCIDR kubernetes"]
    assert manifest.findings == ()
    service = manifest.objects[0].obj
    assert service.metadata.creation_timestamp == "2026-11-21T03:38:27Z"


def test_json_objects_in_a_row() -> None:
    service = json.dumps({"kind": "Service", "metadata": {"name": "a"}, "spec": {"clusterIP": "1"}})
    assert names(read(f"{service}\n\t{service}", "a.json")) == ["Service default/a"] * 2
    assert names(read(f"{service}\n{service}", "a.yaml")) == ["Service default/a"] * 2


def test_yaml_that_begins_like_json() -> None:
    text = "{kind: Service, metadata: {name: a}, spec: {clusterIP: 10.0.0.1}}"
    assert names(read(text)) == ["Service default/a"]


@pytest.mark.parametrize(
    ("listed", "version"),
    [("ServiceList", "v1"), ("EndpointSliceList", "discovery.k8s.io/v1"), ("List", "v1")],
)
def test_lists_of_any_kind(listed: str, version: str) -> None:
    kind = listed.removesuffix("List")
    item: dict[str, Any] = {"metadata": {"name": "a"}, "spec": {"clusterIP": "10.0.0.1"}}
    if not kind:
        kind = item["kind"] = "Service"
    text = json.dumps({"kind": listed, "apiVersion": version, "items": [item]})
    assert names(read(text)) == [f"{kind} default/a"]


@pytest.mark.parametrize("items", ["null", "[]"])
def test_empty_lists(items: str) -> None:
    assert read(f"kind: ServiceList\nitems: {items}\n") == Manifest()


def test_lists_in_lists() -> None:
    inner = {"kind": "List", "items": [{"kind": "Node", "metadata": {"name": "a"}}]}
    assert names(read(json.dumps({"kind": "List", "items": [inner]}))) == ["Node a"]


LEVELS = "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 12))
MERGES = "".join(
    f"a{i}: &a{i}\n  b{i}: 1\n  <<: [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 12)
)
BOMBS = {
    "itself": "&a\nkind: List\nitems: [*a]\n",
    "itself, often": f"&a\nkind: List\nitems: [{', '.join(['*a'] * 30)}]\n",
    "itself, as a key": "&a\n? *a\n: 1\n",
    "levels": "kind: List\na0: &a0 [1]\n" + LEVELS,
    "items": f"kind: List\na0: &a0 [1]\n{LEVELS}items: *a11\n",
    "merges": "kind: List\na0: &a0 {x: 1}\n" + MERGES,
    "typed": "kind: List\na0: &a0 [1]\n" + LEVELS.replace("[", "!!pairs [{k: ").replace(
        ", ", "}, {k: ").replace("]", "}]"),
    "text": f'kind: List\na0: &a0 "{"x" * 100_000}"\n' + LEVELS,
    "chain": "a0: &a0 [1]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, 300)),
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_aliases_do_not_grow_without_limit(name: str) -> None:
    with pytest.raises(BrokenFileError, match=r"by its aliases|holds itself"):
        read(BOMBS[name])
    with pytest.raises(BrokenFileError, match=r"by its aliases|holds itself"):
        read(f"{CART}---\n{BOMBS[name]}")


def test_many_small_bombs_are_one_large_bomb() -> None:
    bomb = "---\na0: &a0 [1]\n" + "".join(LEVELS.splitlines(keepends=True)[:5])
    assert read(bomb).objects == ()
    with pytest.raises(BrokenFileError, match="grows too large"):
        read("".join(f"{bomb}# {i}\n" for i in range(20)))


def test_aliases_as_people_use_them() -> None:
    shared = CART.replace("ports: [", "ports: &p [") + "---\n"
    many = "".join(f"- {{<<: *d, name: p{i}, port: {i + 1}}}\n" for i in range(1000))
    text = f"{shared}kind: ConfigMap\nd: &d {{protocol: TCP, name: x}}\nports:\n{many}"
    assert names(read(text)) == ["Service shop/cart"]


def test_a_text_of_too_many_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "_NODES", 100)
    assert read(CART + "x: [" + "1, " * 90 + "]\n").objects
    with pytest.raises(BrokenFileError, match="too many values"):
        read(CART + "x: [" + "1, " * 2000 + "]\n")


def test_other_kinds_are_passed_over() -> None:
    text = "kind: Deployment\n---\napiVersion: serving.knative.dev/v1\nkind: Service\n---\n" + CART
    manifest = read(text)
    assert names(manifest) == ["Service shop/cart"]
    assert manifest.findings == ()


def test_an_old_version_of_our_kind_is_told() -> None:
    (finding,) = read("apiVersion: discovery.k8s.io/v1beta1\nkind: EndpointSlice\n").findings
    assert finding.field == "apiVersion"
    assert "use discovery.k8s.io/v1" in finding.reason


def test_a_malformed_object_leaves_the_others_in() -> None:
    bad = CART.replace("port: 80", "port: 0o129").replace("cart", "bad")
    manifest = read(f"{bad}---\n{CART}")
    assert names(manifest) == ["Service shop/cart"]
    (finding,) = manifest.findings
    assert finding.object == "Service shop/bad"
    assert finding.field == "spec.ports[0].port"
    assert "a.yaml line 1" in finding.reason


def test_lines_of_objects_in_lists() -> None:
    text = KUBECTL.replace("cidrs: [10.96.0.0/12]", "cidrs: 7")
    (finding,) = read(text).findings
    line = text.splitlines().index("- apiVersion: networking.k8s.io/v1") + 1
    assert f"a.yaml line {line})" in finding.reason


@pytest.mark.parametrize("text", ["7", "[]", "just words", "kind: 7", "metadata: {name: a}"])
def test_what_is_no_object(text: str) -> None:
    (finding,) = read(f"\n{text}\n").findings
    assert finding.object == "a.yaml line 2"
    assert finding.field == "kind"


def test_a_service_without_cluster_ip() -> None:
    manifest = read(CART.replace("clusterIP: 10.96.0.1, ", ""))
    (finding,) = manifest.findings
    assert (finding.object, finding.field) == ("Service shop/cart", "spec.clusterIP")
    assert finding.severity is Severity.ERROR


@pytest.mark.parametrize("spec", ["clusterIP: None", "type: ExternalName, externalName: x.example"])
def test_services_that_need_no_cluster_ip(spec: str) -> None:
    assert read(CART.replace("clusterIP: 10.96.0.1", spec)).findings == ()


def test_a_slice_of_no_service() -> None:
    (finding,) = read(SLICE.replace(", labels: {kubernetes.io/service-name: cart}", "")).findings
    assert finding.object == "EndpointSlice shop/cart-1"


def test_cluster_ip_and_families_follow_from_cluster_ips() -> None:
    both = "clusterIPs: [10.96.0.1, 'fd00::1']"
    spec = one_service(CART.replace("clusterIP: 10.96.0.1", both)).spec
    assert spec.cluster_ip == "10.96.0.1"
    assert spec.ip_families == ["IPv4", "IPv6"]


def test_families_count_also_without_cluster_ips() -> None:
    families = "clusterIP: 10.96.0.1, ipFamilyPolicy: SingleStack, ipFamilies: [IPv4]"
    service = one_service(CART.replace("clusterIP: 10.96.0.1", families))
    assert list(service_ports(service, Family.IPV4))


def test_a_service_without_a_type_has_the_usual_one() -> None:
    outside = "spec: {externalIPs: [192.0.2.1], externalTrafficPolicy: Local, "
    service = one_service(CART.replace("spec: {", outside))
    (spec,) = service_ports(service, Family.IPV4).values()
    assert spec.external_policy_local


def test_nothing_assigns_node_ports_to_a_manifest() -> None:
    text = CART.replace("spec: {", "spec: {type: NodePort, ")
    (finding,) = read(text).findings
    assert (finding.object, finding.field) == ("Service shop/cart", "spec.ports[0].nodePort")
    assert "a.yaml line 1" in finding.reason
    assert read(text.replace("port: 80", "port: 80, nodePort: 30080")).findings == ()


def test_affinity_without_a_timeout_has_the_usual_one() -> None:
    spec = one_service(CART.replace("spec: {", "spec: {sessionAffinity: ClientIP, ")).spec
    assert spec.session_affinity_config is not None
    assert spec.session_affinity_config.client_ip is not None
    assert spec.session_affinity_config.client_ip.timeout_seconds == 10800


def test_an_affinity_timeout_that_is_given_stays() -> None:
    given_one = "sessionAffinity: ClientIP, sessionAffinityConfig: {clientIP: {timeoutSeconds: 5}}"
    spec = one_service(CART.replace("spec: {", f"spec: {{{given_one}, ")).spec
    assert spec.session_affinity_config is not None
    assert spec.session_affinity_config.client_ip is not None
    assert spec.session_affinity_config.client_ip.timeout_seconds == 5


@pytest.mark.parametrize(
    ("port", "name", "protocol"),
    [("port: 53", "", "TCP"), ("port: 53, name: dns, protocol: UDP", "dns", "UDP")],
)
def test_ports_of_slices_are_named_and_tcp_by_default(port: str, name: str, protocol: str) -> None:
    ((_, obj, _),) = read(SLICE.replace("port: 8080", port)).objects
    assert isinstance(obj, EndpointSlice)
    assert obj.ports is not None
    assert (obj.ports[0].name, obj.ports[0].protocol) == (name, protocol)


def test_a_slice_without_ports() -> None:
    assert names(read(SLICE.replace("ports: [{port: 8080}]", ""))) == ["EndpointSlice shop/cart-1"]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a: 1\nb: [\n", 3),
        ("a: 1\n\tb: 2\n", 2),
        ("a: &x 1\nb: *y\n", 2),
        ("a: \x01\n", 1),
        ("a: 1\n---\nb: !!int x\n", 3),
        ('{"a": 1}\n{"a": \n', 2),
    ],
)
def test_a_broken_file_names_the_line(text: str, line: int) -> None:
    with pytest.raises(BrokenFileError) as caught:
        read(text)
    assert caught.value.line == line
    assert str(line) in str(caught.value)


@pytest.mark.parametrize(
    "text", ['{"a": NaN}', '{"a": "\\ud800"}', "a: 1", '{"a": 1} x', "[" * 9999]
)
def test_what_is_not_json_in_a_json_file(text: str) -> None:
    with pytest.raises(BrokenFileError, match="line 1: is not JSON"):
        read(text, "a.json")


def test_bytes_that_are_not_text() -> None:
    with pytest.raises(BrokenFileError) as caught:
        read_manifest("a.yaml", b"a: 1\nb: \xff\n")
    assert caught.value.line == 2


def test_a_byte_order_mark_is_no_content() -> None:
    assert names(read("\ufeff" + CART)) == ["Service shop/cart"]


@pytest.mark.parametrize(
    "text",
    ["[" * 90000, "a: " + "[" * 900 + "]" * 900, "- " * 9000, '{"a":' * 999, "a: {b: " * 90000],
)
def test_nesting_without_end_is_a_fault_of_the_file(text: str) -> None:
    with pytest.raises(BrokenFileError, match=r"nested too deeply|not YAML"):
        read(text)


@pytest.mark.parametrize("text", ["a: '" + "[" * 900 + "'", "a: |\n" + " " * 900 + "text"])
def test_what_only_looks_deep_is_read(text: str) -> None:
    assert [document.line for document in read_documents(text.encode())] == [1]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2026-11-21T03:38:27Z", "2026-11-21T03:38:27Z"),
        ("2026-11-21", "2026-11-21"),
        ("1:20:30", "1:20:30"),
        ("0o10", 8),
        ("010", 8),
        ("0x10", 16),
        ("80", 80),
        ("1.5", 1.5),
        ("yes", True),
        ("off", False),
        ("~", None),
        ("10.0.0.1", "10.0.0.1"),
        ("fd00::1", "fd00::1"),
    ],
)
def test_plain_scalars_are_read_as_kubectl_does(text: str, value: object) -> None:
    (document,) = read_documents(f"a: {text}".encode())
    assert document.value == {"a": value}


def test_merge_keys() -> None:
    (document,) = read_documents(b"{<<: {b: 1}, c: 2}")
    assert document.value == {"b": 1, "c": 2}


def test_the_same_object_in_two_files() -> None:
    files = {"b.yaml": read(CART.replace("10.96.0.1", "10.96.0.2"), "b.yaml"), "a.yaml": read(CART)}
    world = combine_manifests(files)
    service = world.objects["Service"][ObjectName("shop", "cart")]
    assert isinstance(service, Service)
    assert service.spec.cluster_ip == "10.96.0.1"
    (finding,) = world.findings["b.yaml"]
    assert finding.object == "Service shop/cart"
    assert "a.yaml line 1" in finding.reason
    assert "a.yaml" not in world.findings


def test_every_kind_has_an_entry() -> None:
    assert combine_manifests({}).objects == {
        "Service": {},
        "EndpointSlice": {},
        "Node": {},
        "ServiceCIDR": {},
    }


ENDPOINTS = """\
apiVersion: v1
kind: Endpoints
metadata: {name: cart, namespace: shop}
subsets: [{addresses: [{ip: 10.0.0.1}]}]
"""


def test_endpoints_are_told_to_become_slices() -> None:
    (finding,) = combine_manifests({"a.yaml": read(ENDPOINTS)}).findings["a.yaml"]
    assert finding.object == "Endpoints shop/cart"
    assert "EndpointSlice" in finding.reason


def test_endpoints_beside_their_slices_are_no_fault() -> None:
    assert combine_manifests({"a.yaml": read(ENDPOINTS), "b.yaml": read(SLICE)}).findings == {}


@pytest.mark.parametrize("line", ["metadata: {name: cart, namespace: shop}\n", "subsets: [{"])
def test_endpoints_without_endpoints_are_passed_over(line: str) -> None:
    text = "\n".join(kept for kept in ENDPOINTS.splitlines() if not kept.startswith(line.strip()))
    assert combine_manifests({"a.yaml": read(text)}).findings == {}


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["kind", "items", "metadata", "spec", "apiVersion", "ports", "name"])
            | st.text(max_size=4),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)
KIND = st.sampled_from(["Service", "EndpointSlice", "Node", "ServiceCIDR", "Endpoints", "List"])


def line_of_fault(path: str, data: bytes) -> int | None:
    """The line where reading fails, or None where it does not (the objects unite with any)."""
    try:
        combine_manifests({path: read_manifest(path, data)})
    except BrokenFileError as error:
        return error.line
    return None


@given(
    st.binary(max_size=64) | st.text("{}[]:,-&*!|>'\"#%@ \t\nakd01", max_size=40).map(str.encode)
)
def test_any_bytes_are_objects_findings_or_a_broken_file(data: bytes) -> None:
    for path in ("a.yaml", "a.json"):
        line = line_of_fault(path, data)
        assert line is None or 1 <= line <= data.count(b"\n") + data.count(b"\r") + 2


@given(st.dictionaries(st.sampled_from(["metadata", "spec", "items", "subsets"]), VALUES), KIND)
def test_any_values_are_objects_or_findings(value: dict[str, Any], kind: str) -> None:
    text = json.dumps({**value, "kind": kind})  # NaN is not JSON, and a lone surrogate no text
    assert line_of_fault("a.yaml", text.encode()) in (None, 1)
