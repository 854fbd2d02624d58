"""`steersman explain`, as typed: both forms, both outputs, files and an API server."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from steersman.cli.main import main
from tests.support.apiserver.reading import service, slice_
from tests.support.apiserver.server import ApiServer
from tests.support.builders import kube

POD = "10.244.0.5"
DEMO = Path(__file__).parents[3] / "demo"


@pytest.fixture
def world(tmp_path: Path) -> Path:
    items = [service("web"), slice_("web-1", "web", POD)]
    (tmp_path / "world.json").write_text(json.dumps({"kind": "List", "items": items}))
    return tmp_path


def explained(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    status = main(["explain", "--cluster-cidr=10.244.0.0/16", "--hostname-override=n", *words])
    out, err = capsys.readouterr()
    assert (status, err) == (0, "")
    return out


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("pod", "the client is a pod of this cluster"),
        ("node", "the client is this node itself"),
        ("external", "the client is no pod of this cluster"),
        ("10.244.7.7", "the client 10.244.7.7 is a pod of this cluster"),
    ],
)
def test_a_flow_in_words(
    world: Path, capsys: pytest.CaptureFixture[str], source: str, reason: str
) -> None:
    out = explained(capsys, f"--manifests={world}", f"--from={source}", "--to=10.96.0.1:80")
    first, *reasons, origin = out.splitlines()
    assert origin == f"from the manifests in {world}"
    assert f"forwarded to {POD}:8080" in first
    assert any(reason in line for line in reasons)


@pytest.mark.parametrize("protocol", ["udp", "sctp"])
def test_another_protocol_is_another_destination(
    world: Path, capsys: pytest.CaptureFixture[str], protocol: str
) -> None:
    to = f"--to=10.96.0.1:80/{protocol}"
    data = json.loads(explained(capsys, f"--manifests={world}", to, "--output=json"))
    (flow,) = data["flows"]
    assert (flow["protocol"], flow["hops"][0]["endpoints"]) == (protocol.upper(), [])


def test_a_service_in_words_and_as_json(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = explained(capsys, "shop/web", f"--manifests={world}")
    assert text.startswith("Service shop/web (ClusterIP), as node n serves it\n")
    assert f"{POD}:8080" in text
    data = json.loads(explained(capsys, "shop/web", f"--manifests={world}", "--output=json"))
    assert data["service"] == "shop/web"
    assert data["ports"][0]["frontends"][0]["address"] == "10.96.0.1"


def test_a_node_port_of_the_demo_is_right_on_any_machine(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for flags in (["--hostname-override=node-a"], []):
        to = ("--from=external", "--to=192.0.2.1:30080")
        assert main(["explain", f"--manifests={DEMO}", *flags, *to]) == 0
        first, where, *_ = capsys.readouterr().out.splitlines()
        assert first.startswith("from outside to 192.0.2.1:30080/TCP: forwarded to one of 3")
        assert where == "  on node node-a:"


def test_all_problems_are_listed_and_bad_news(
    world: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (world / "more.json").write_text(json.dumps(service("empty", "10.96.0.9")))
    flags = (f"--manifests={world}", "--hostname-override=n")
    assert main(["explain", *flags, "--problems", "-n", "shop"]) == 1
    out = capsys.readouterr().out
    assert "error    Service shop/empty" in out
    assert "shop/web" not in out


async def test_an_api_server_is_asked_by_kubeconfig(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = {"kind": "Pod", "namespace": "shop", "name": "web-abc"}
    value = {"addresses": [POD], "nodeName": "node-b", "targetRef": target}
    slices = kube.endpoint_slice("web-1", "web", value)
    async with ApiServer([service("web"), slices]) as server:
        config: dict[str, Any] = {
            "current-context": "c",
            "contexts": [{"name": "c", "context": {"cluster": "c"}}],
            "clusters": [{"name": "c", "cluster": {"server": server.url}}],
        }
        (tmp_path / "config").write_text(json.dumps(config))
        words = (f"--kubeconfig={tmp_path / 'config'}", "--to=10.96.0.1:80", "--output=json")
        out = await asyncio.to_thread(explained, capsys, *words)
    (end,) = json.loads(out)["flows"][0]["hops"][0]["endpoints"]
    assert end == {"address": f"{POD}:8080", "pod": "shop/web-abc", "node": "node-b", "zone": ""}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "give a Service"),
        (("shop/web", "--to=shop/web"), "not both"),
        (("web",), "no Service, pod or node 'web' is known; similar: shop/web"),
        (("--to=nonsense",), "nonsense"),
        (("--to=10.96.0.1:80/icmp",), "icmp"),
        (("--from=nobody", "--to=10.96.0.1:80"), "nobody"),
    ],
)
def test_what_cannot_be_explained_says_why(
    world: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
) -> None:
    assert main(["explain", f"--manifests={world}", *words]) == 2
    assert message.lower() in capsys.readouterr().err.lower()
