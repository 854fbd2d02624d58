"""Pages and `steersman nodes` about real processes: by the local socket, and at URLs."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from steersman.host.peers import CONTROL
from steersman.model.names import ObjectName
from steersman.ui.fleet import Fleet
from steersman.ui.nodes import Finder, FixedNodes, Token
from steersman.ui.pages import PAGES
from steersman.ui.site import Site
from tests.support.apiserver.reading import service, slice_
from tests.support.fleet import followed
from tests.support.lab.namespace import in_namespace, sh
from tests.support.pages import serving
from tests.support.processes.steersman import command, manifests, steersman, world
from tests.support.waiting import until

pytestmark = pytest.mark.kernel

JSON = {"Accept": "application/json"}


def following(finder: Finder) -> AbstractAsyncContextManager[Fleet]:
    return followed(Fleet(finder, grace=1.0, compare=0.5))


async def when(fleet: Fleet, true: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        version = 0
        while not true():
            version = await fleet.changed(version)


async def listening() -> bool:
    return f"@{CONTROL}" in sh("ss -xl")


def test_this_node_through_the_local_socket(tmp_path: Path) -> None:
    async def scenario() -> None:
        folder = manifests(tmp_path / "world", *world())
        async with steersman(tmp_path, "--proxy-mode=nftables", f"--manifests={folder}") as process:
            await process.said("sync 1 (start)")
            await until(listening)
            status, out, err = await command("nodes", "-o", "json")
            assert (status, err) == (0, "")
            (row,) = json.loads(out)["rows"]
            assert (row["name"], row["mode"], row["health"]) == ("node-a", "nftables", "ok")
            assert row["services"] == 1
            async with following(FixedNodes()) as fleet, serving(Site(fleet, PAGES)) as client:
                await when(fleet, lambda: "node-a" in fleet.nodes)
                revision = fleet.nodes["node-a"].revision
                listed = await (await client.get("/services", headers=JSON)).json()
                assert [each["service"] for each in listed["rows"]] == ["shop/web"]
                more = (service("cart", "10.96.0.2"), slice_("cart-1", "cart", "10.244.0.7"))
                manifests(folder, *world(), *more)
                await when(fleet, lambda: fleet.nodes["node-a"].revision > revision)
                await when(fleet, lambda: fleet.nodes["node-a"].services == 2)
                view = await (await client.get("/services", headers=JSON)).json()
                assert [each["service"] for each in view["rows"]] == ["shop/cart", "shop/web"]
                one = await fleet.world("node-a", (ObjectName("shop", "cart"),))
                assert ObjectName("shop", "cart") in one.snapshot.services
                # It ends: its last state stays, and the reason is said.
                await process.stop()
                await when(fleet, lambda: fleet.seen[0].problem != "")
                assert "no steersman runs in this network namespace" in fleet.seen[0].problem
                assert fleet.nodes["node-a"].services == 2

    in_namespace(scenario)


def test_a_stranger_on_the_local_socket_is_not_believed() -> None:
    script = (
        "import os, socket, sys; os.setgid(65534); os.setuid(65534)\n"
        f"s = socket.socket(socket.AF_UNIX); s.bind('\\0{CONTROL}'); s.listen()\n"
        "print('bound', flush=True); sys.stdin.read()"
    )

    async def scenario() -> None:
        pipe = asyncio.subprocess.PIPE
        words = (sys.executable, "-c", script)
        stranger = await asyncio.create_subprocess_exec(*words, stdin=pipe, stdout=pipe)
        try:
            assert stranger.stdout is not None
            await stranger.stdout.readline()
            status, out, _ = await command("nodes")
            assert status == 1
            assert f"belongs to process {stranger.pid} of user 65534" in out
        finally:
            await stranger.communicate(b"")

    in_namespace(scenario)


def test_two_nodes_at_their_urls(tmp_path: Path) -> None:
    """Two processes in namespaces of their own, one of which is reached over a link."""
    token = tmp_path / "token"
    token.write_text("a token of sixteen characters\n")
    state = ("--state-bind-address=0.0.0.0:10259", f"--state-token-file={token}")

    async def scenario() -> None:
        folder = manifests(tmp_path / "world", *world())
        other = manifests(tmp_path / "other world", *world())
        flags = ("--metrics-bind-address=", *state)
        first = ("--proxy-mode=nftables", f"--manifests={folder}")
        second = ("--proxy-mode=iptables", "--hostname-override=node-b", f"--manifests={other}")
        async with (
            steersman(tmp_path, *first, *flags) as a,
            steersman(
                tmp_path, *flags, *second, name="second log", through=("unshare", "--net")
            ) as b,
        ):
            await b.said("sync 1 (start)")
            pid = b.process.pid
            sh(f"ip link add sm-a type veth peer name sm-b netns {pid}")
            sh("ip addr add 192.0.2.1/24 dev sm-a && ip link set sm-a up")
            inside = f"nsenter --target {pid} --net"
            sh(f"{inside} ip addr add 192.0.2.2/24 dev sm-b && {inside} ip link set sm-b up")
            await a.said("sync 1 (start)")
            urls = {"node-a": "http://127.0.0.1:10259", "node-b": "http://192.0.2.2:10259"}
            words = [f"--node={name}={url}" for name, url in urls.items()]

            async def well() -> bool:
                return (await command("nodes", *words, f"--token-file={token}"))[0] == 0

            await until(well, 60)
            finder = FixedNodes(urls, Token(str(token)))
            async with following(finder) as fleet, serving(Site(fleet, PAGES)) as client:
                await when(fleet, lambda: len(fleet.nodes) == 2)
                view = await (await client.get("/?sort=name", headers=JSON)).json()
                assert [(row["name"], row["mode"]) for row in view["rows"]] == [
                    ("node-a", "nftables"),
                    ("node-b", "iptables"),
                ]
                listed = await (await client.get("/services?node=node-b", headers=JSON)).json()
                assert [each["service"] for each in listed["rows"]] == ["shop/web"]
                # It hears of an endpoint that the other one does not: both are named.
                manifests(other, *world("10.244.0.6"))
                await when(fleet, lambda: fleet.disagreements != ())
                (found,) = fleet.disagreements
                assert found.services == ("shop/web",)
                assert {*found.nodes, found.reference} == {"node-a", "node-b"}
                page = await (await client.get("/")).text()
                assert '<a href="/services/shop/web">' in page
                manifests(other, *world())
                await when(fleet, lambda: fleet.disagreements == ())
                # One node ends: the other one is shown as before.
                await b.stop()
                await when(fleet, lambda: any(each.problem for each in fleet.seen))
                assert [each.name for each in fleet.seen if each.problem] == ["node-b"]
            token.with_name("wrong").write_text("another token of a node\n")
            wrong = f"--token-file={token.with_name('wrong')}"
            status, out, _ = await command("nodes", *words, wrong)
            assert status == 1
            assert "refuses the token" in out

    in_namespace(scenario)


def test_without_a_process_the_command_says_what_to_give() -> None:
    async def scenario() -> None:
        status, out, _ = await command("nodes")
        assert status == 1
        assert "no steersman runs in this network namespace; give --node" in out

    in_namespace(scenario)
