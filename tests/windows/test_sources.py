"""What the winuserspace mode does on Windows' Python follows an API server, reached by TLS."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import yaml

from tests.support.apiserver.certificates import Authority
from tests.support.apiserver.server import ApiServer
from tests.support.builders import kube
from tests.support.modes.userspace_proxy import answering, ask, endpoint
from tests.support.waiting import PATIENCE, until
from tests.windows.node import HOST, OTHER, VIP, Node, on_a_node, windows_path, world

pytestmark = [pytest.mark.kernel, pytest.mark.slow(seconds=40)]


def test_it_follows_an_api_server_by_tls_with_a_client_certificate(tmp_path: Path) -> None:
    authority = Authority()

    def issue(name: str) -> None:
        for suffix, data in zip(("crt", "key"), authority.issue(name), strict=True):
            (tmp_path / f"client.{suffix}").write_bytes(data)

    async def body(node: Node) -> None:
        issue("before")
        (tmp_path / "ca.crt").write_bytes(authority.pem)
        tls = authority.server_context(tmp_path)
        async with (
            endpoint(answering(b"1"), HOST) as one,
            endpoint(answering(b"2"), HOST) as two,
            ApiServer([kube.node("win-1", HOST), *world(one)], tls=tls) as server,
        ):
            # Names of files are relative to the kubeconfig.
            cluster = {"server": server.url, "certificate-authority": "ca.crt"}
            user = {"client-certificate": "client.crt", "client-key": "client.key"}
            config = {
                "clusters": [{"name": "c", "cluster": cluster}],
                "users": [{"name": "u", "user": user}],
                "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
                "current-context": "x",
            }
            (tmp_path / "kubeconfig").write_text(yaml.safe_dump(config))
            flag = f"--kubeconfig={windows_path(tmp_path / 'kubeconfig')}"
            async with node.steersman(flag) as process:
                await process.said("kernel objects")
                assert await ask(80, b"!", VIP) == b"1!"
                assert {request.subject for request in server.log} == {"before"}
                # An endpoint changes while a connection is open.
                reader, writer = await asyncio.open_connection(VIP, 80)
                assert await reader.readexactly(1) == b"1"
                server.update(world(two)[1])
                async with asyncio.timeout(PATIENCE):
                    while await ask(80, b"!", VIP) != b"2!":
                        pass
                writer.write(b"on")
                assert await reader.readexactly(2) == b"on"
                writer.close()
                # The certificate is renewed, and the watches begin again.
                issue("after")
                server.drop()
                await until(lambda: "after" in {request.subject for request in server.log})
                server.update(world(two, OTHER)[0])
                await until(lambda: node.service_addresses() == {OTHER})
                server.delete("Service", "web", "shop")
                await until(lambda: node.service_addresses() == set())

    on_a_node(tmp_path, body)
