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

POD = "10.244.0.5"


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
    assert (data["protocol"], data["endpoints"]) == (protocol.upper(), [])


def test_a_service_in_words_and_as_json(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = explained(capsys, "shop/web", f"--manifests={world}")
    assert text.startswith("Service shop/web\n")
    assert f"{POD}:8080" in text
    data = json.loads(explained(capsys, "shop/web", f"--manifests={world}", "--output=json"))
    assert data["service"] == "shop/web"
    assert data["ports"][0]["frontends"][0]["address"] == "10.96.0.1"


def test_a_service_that_is_not_there_is_a_failure(
    world: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", f"--manifests={world}", "shop/nobody"]) == 1
    assert "Service shop/nobody\n  is not known: check namespace" in capsys.readouterr().out


async def test_an_api_server_is_asked_by_kubeconfig(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with ApiServer([service("web"), slice_("web-1", "web", POD)]) as server:
        config: dict[str, Any] = {
            "current-context": "c",
            "contexts": [{"name": "c", "context": {"cluster": "c"}}],
            "clusters": [{"name": "c", "cluster": {"server": server.url}}],
        }
        (tmp_path / "config").write_text(json.dumps(config))
        words = (f"--kubeconfig={tmp_path / 'config'}", "--to=10.96.0.1:80", "--output=json")
        out = await asyncio.to_thread(explained, capsys, *words)
    assert json.loads(out)["endpoints"] == [f"{POD}:8080"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "give a Service"),
        (("web",), "NAMESPACE/NAME"),
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
