"""What pasted documents would change on a node: as kubectl apply would, without an API server."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from steersman.model.names import ObjectName
from steersman.model.world import World
from steersman.modes.specs import SPECS
from steersman.operate.answer import QuestionError
from steersman.operate.plan_answer import PlanAnswer
from steersman.operate.plan_text import MOST_BYTES, MOST_LINES, PlanQuestion, plan_text
from tests.support.builders.pasted import CART, MODE, SERVICE, SLICE, USER, service, world


async def ask(text: str = "", /, of: World | None = None, **asked: Any) -> PlanAnswer:
    return await plan_text(of or world(CART, USER), PlanQuestion(text, **asked))


def reasons(answer: PlanAnswer) -> dict[str, tuple[str, ...]]:
    return {each.reason: each.services for each in answer.treatments}


async def test_applying_what_is_there_changes_nothing() -> None:
    answer = await ask(SERVICE % ("cart", "ClusterIP", ""))
    assert (answer.objects, answer.treatments, answer.findings) == ((), (), ())
    assert answer.exit_code == 0
    assert answer.compared_with == "the rules as the process on worker-1 wrote them"


async def test_a_changed_field_changes_only_its_service() -> None:
    text = (SERVICE % ("cart", "ClusterIP", "")) + "  sessionAffinity: ClientIP\n"
    answer = await ask(text)
    assert {name for each in answer.treatments for name in each.services} == {"shop/cart"}
    assert answer.exit_code == 1
    assert answer.before == answer.after == f"{MODE} mode"


async def test_a_new_service_gets_an_address_as_the_api_server_would_give() -> None:
    text = (SERVICE % ("new", "NodePort", "")) + SLICE % ("new-1", "new", 9)
    answer = await ask(text)
    assert "Service shop/new: the cluster IP 10.96.0.254 is assumed" in answer.notes
    assert "Service shop/new: the node port 32767 is assumed" in answer.notes
    places = {place for each in answer.treatments for place in each.places}
    assert any("10.96.0.254:80" in place for place in places)
    assert answer.findings == ()


async def test_addresses_are_taken_from_the_range_of_services() -> None:
    of = world(service("cart", "10.0.1.254"), cidrs=("10.0.0.0/23",))
    answer = await ask(SERVICE % ("new", "ClusterIP", ""), of=of)
    assert "Service shop/new: the cluster IP 10.0.1.253 is assumed" in answer.notes
    assert "Service shop/new has no EndpointSlice here yet" in " ".join(answer.notes)
    empty = await ask(SERVICE % ("new", "ClusterIP", ""), of=world())
    assert "give spec.clusterIP, no range is known for it" in " ".join(empty.notes)


async def test_node_ports_of_a_service_stay_and_others_are_free_ones() -> None:
    port = {"name": "http", "port": 80, "protocol": "TCP", "nodePort": 32767}
    of = world(service("cart", "10.96.0.10", type="NodePort", ports=[port]), USER)
    same = await ask(SERVICE % ("cart", "NodePort", ""), of=of)
    assert same.exit_code == 0
    assert not any("assumed" in note for note in same.notes)
    other = await ask(SERVICE % ("user", "NodePort", ""), of=of)
    assert "Service shop/user: the node port 32766 is assumed" in other.notes
    given = await ask(SERVICE % ("user", "NodePort", ", nodePort: 30123"), of=of)
    assert not any("assumed" in note for note in given.notes)


async def test_the_whole_of_the_manifests_deletes_others() -> None:
    answer = await ask(SERVICE % ("cart", "ClusterIP", ""), whole=True)
    assert {name for each in answer.treatments for name in each.services} == {"shop/user"}
    assert sum(each.removed for each in answer.objects) > 0


async def test_a_service_that_is_no_longer_served() -> None:
    text = "kind: Service\nmetadata: {name: cart, namespace: shop}\nspec: {type: ExternalName,"
    answer = await ask(text + " externalName: example.org}")
    assert {name for each in answer.treatments for name in each.services} == {"shop/cart"}
    assert "Service shop/cart is not served: it has no cluster IP" in answer.notes


async def test_a_headless_service_that_gets_an_address() -> None:
    of = msgspec.structs.replace(
        world(USER),
        unserved={ObjectName("shop", "cart"): service("cart", "None", clusterIPs=["None"])},
    )
    answer = await ask(SERVICE % ("cart", "ClusterIP", ""), of=of)
    assert "Service shop/cart: the cluster IP 10.96.0.254 is assumed" in answer.notes


async def test_a_slice_may_move_to_another_service() -> None:
    answer = await ask(SLICE % ("cart-1", "user", 7))
    assert "shop/cart" in {name for each in answer.treatments for name in each.services}
    orphan = (SLICE % ("user-1", "user", 7)).replace("kubernetes.io/service-name: user", "a: b")
    answer = await ask(orphan)
    assert "shop/user" in {name for each in answer.treatments for name in each.services}
    assert any("belongs to no Service" in finding for finding in answer.findings)


async def test_lists_and_json_are_read() -> None:
    text = '{"kind": "List", "items": [{"kind": "Service", "apiVersion": "v1", "metadata":'
    text += '{"name": "cart", "namespace": "shop"}, "spec": {"ports": [{"port": 81}]}}]}'
    assert (await ask(text)).exit_code == 1


async def test_bad_fields_are_findings_that_name_the_object() -> None:
    answer = await ask((SERVICE % ("cart", "ClusterIP", "")).replace("80", "70000"))
    assert any(f.startswith("Service shop/cart spec.ports[0].port") for f in answer.findings)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "nothing to plan: give manifests"),
        (" \n", "nothing to plan"),
        ("a: [", "the text cannot be read: line 2: is not YAML"),
        ("kind: Pod", "the text has no Service, EndpointSlice or KubeProxyConfiguration"),
        ("hello", "the text line 1 kind: is missing: this is not a Kubernetes object"),
        (
            "kind: Service\nmetadata: {name: a, namespace: b}\nspec: {ports: [{port: x}]}",
            r"Service b/a spec.ports\[0\].port: Expected `int`, got `str`",
        ),
        ("x" * (MOST_BYTES + 1), "more than 1,048,576: divide it"),
        ("é" * (MOST_BYTES // 2 + 1), "more than 1,048,576"),
        (
            "kind: KubeProxyConfiguration\napiVersion: kubeproxy.config.k8s.io/v1alpha1\n"
            "detectLocalMode: Foo",
            "the configuration is invalid: .*DetectLocalMode: Unsupported",
        ),
        ("kind: KubeProxyConfiguration\nmode: [", "the configuration cannot be read: "),
        ('{"mode": "x", "kind": "KubeProxyConfiguration"}', "the configuration cannot be read: "),
        ("kind: KubeProxyConfiguration\n---\nkind: Service", "plan one after the other"),
        (
            "kind: ConfigMap\ndata:\n  c: |\n    kind: KubeProxyConfiguration",
            "the text has no Service, EndpointSlice or KubeProxyConfiguration",
        ),
        ("a: &a [*a]\nkind: Service", "the text cannot be read: line 1"),
    ],
)
async def test_errors_say_what_is_wrong_with_what(text: str, error: str) -> None:
    with pytest.raises(QuestionError, match=error):
        await ask(text)


async def test_a_mode_that_does_not_exist() -> None:
    with pytest.raises(QuestionError, match="there is no mode fast; known: "):
        await ask(mode="fast")


@pytest.mark.parametrize("mode", sorted(SPECS))
async def test_another_mode(mode: str) -> None:
    answer = await ask(mode=mode, lines=True)
    if mode == MODE:
        assert answer.exit_code == 0
    else:
        assert (answer.before, answer.after) == (f"{MODE} mode", f"{mode} mode")
        assert answer.exit_code == 1
        assert answer.details[0].startswith("# ")


@pytest.mark.parametrize("mode", sorted(SPECS))
async def test_every_mode_plans_manifests(mode: str) -> None:
    of = world(CART, USER, mode=mode)
    text = (SERVICE % ("new", "ClusterIP", "")) + SLICE % ("new-1", "new", 9)
    answer = await ask(text, of=of)
    assert "shop/new" in {name for each in answer.treatments for name in each.services}
    assert (await ask(SERVICE % ("cart", "ClusterIP", ""), of=of)).exit_code == 0


async def test_a_configuration() -> None:
    text = f"""
apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: {MODE}
clusterCIDR: 10.244.0.0/16
%s
"""
    same = await ask(text % "")
    assert same.exit_code == 0
    other = await ask(text % "nodePortAddresses: [192.0.2.0/24]\nnovel: 1")
    assert other.after == f"{MODE} mode"
    assert any("novel" in note for note in other.notes)
    masquerade = await ask(text % "iptables: {masqueradeAll: true}")
    assert masquerade.treatments


async def test_kernel_objects_are_listed_up_to_a_number() -> None:
    text = "".join(
        "---" + SERVICE % (f"n{i}", "ClusterIP", "") + SLICE % (f"n{i}-1", f"n{i}", 9)
        for i in range(200)
    )
    answer = await ask(text, lines=True)
    assert len(answer.details) == MOST_LINES + 1
    assert "more lines" in answer.details[-1]
    assert len(answer.notes) <= 25
    assert any("more notes" in note for note in answer.notes)
