"""The steps before the loop, each done once."""

from __future__ import annotations

from pathlib import Path

import pytest

from steersman.config import parse_command_line
from steersman.run.process.startup import StartError, load_store
from tests.support.apiserver.reading import WORLD, node
from tests.support.apiserver.server import ApiServer


@pytest.mark.parametrize(
    ("flag", "says"),
    [
        (
            "--master=http://u:s3cret@127.0.0.1:1",
            r"API server http://127\.0\.0\.1:1: cannot connect to 127\.0\.0\.1:1: .* refused",
        ),
        (
            "--manifests=/nowhere/a,/nowhere/b",
            "no Services were read from /nowhere/a, /nowhere/b: /nowhere/a: cannot be read",
        ),
    ],
)
async def test_a_source_that_is_not_there_is_named(flag: str, says: str) -> None:
    config = parse_command_line([flag, "--hostname-override=n"]).config
    with pytest.raises(StartError, match=says) as failure:
        await load_store(config)
    assert "s3cret" not in str(failure.value)


async def test_a_blank_name_in_the_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    head = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"
    file.write_text(f'{head}hostnameOverride: " "\n')
    with pytest.raises(StartError, match="hostnameOverride is blank"):
        await load_store(parse_command_line([f"--config={file}"]).config)


async def test_a_source_that_is_slow_is_given_up() -> None:
    async with ApiServer(WORLD) as server:
        server.fault("stall", kind="Service", times=-1)
        flags = [f"--master={server.url}", "--hostname-override=n"]
        with pytest.raises(StartError, match=r"no Services were read from the API server in 0\.2"):
            await load_store(parse_command_line(flags).config, seconds=0.2)


async def test_an_api_server_is_read_with_this_node_and_the_others() -> None:
    async with ApiServer((*WORLD, node("node-b"))) as server:
        flags = [f"--master={server.url}", "--hostname-override=node-b"]
        store = await load_store(parse_command_line(flags).config)
    assert store.snapshot.node is not None
    assert store.snapshot.node.metadata.name == "node-b"
    assert len(store.nodes) == 2


async def test_manifests_are_read_once(tmp_path: Path) -> None:
    (tmp_path / "node.yaml").write_text("{kind: Node, apiVersion: v1, metadata: {name: node-b}}")
    flags = [f"--manifests={tmp_path}", "--hostname-override=n"]
    store = await load_store(parse_command_line(flags).config)
    assert store.synced
    assert [each.metadata.name for each in store.nodes] == ["node-b"]
