"""Reaching an API server: TLS, credentials, proxies, several servers."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import ssl
import stat
import threading
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from steersman.source.kubeconfig import ClusterAccess, Material, load_cluster_access
from tests.support.apiserver.certificates import Authority
from tests.support.apiserver.reading import WORLD, reading, service, timing
from tests.support.apiserver.server import ApiServer
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("each_http")


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


def kubeconfig(folder: Path, cluster: dict[str, Any], user: dict[str, Any]) -> Path:
    path = folder / "kubeconfig"
    value = {
        "clusters": [{"name": "c", "cluster": cluster}],
        "users": [{"name": "u", "user": user}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    path.write_text(yaml.safe_dump(value))
    return path


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


async def test_ca_data_and_client_certificate(tmp_path: Path, authority: Authority) -> None:
    certificate, key = authority.issue("system:kube-proxy")
    async with ApiServer(WORLD, tls=authority.server_context(tmp_path)) as server:
        file = kubeconfig(
            tmp_path,
            {"server": server.url, "certificate-authority-data": b64(authority.pem)},
            {"client-certificate-data": b64(certificate), "client-key-data": b64(key)},
        )
        async with reading(load_cluster_access(file)) as r:
            await r.synced()
        assert {request.subject for request in server.log} == {"system:kube-proxy"}


async def test_a_rotated_client_certificate_is_used(tmp_path: Path, authority: Authority) -> None:
    def rotate(name: str) -> None:
        certificate, key = authority.issue(name)
        (tmp_path / "tls.crt").write_bytes(certificate)
        (tmp_path / "tls.key").write_bytes(key)

    rotate("before")
    (tmp_path / "ca.crt").write_bytes(authority.pem)
    async with ApiServer(WORLD, tls=authority.server_context(tmp_path)) as server:
        file = kubeconfig(
            tmp_path,
            {"server": server.url, "certificate-authority": "ca.crt"},
            {"client-certificate": "tls.crt", "client-key": "tls.key"},
        )
        async with reading(load_cluster_access(file)) as r:
            await r.synced()
            rotate("after")
            server.drop("Service")
            await until(lambda: server.requests("Service")[-1].subject == "after")
        assert server.requests("Service")[0].subject == "before"


async def test_an_unknown_authority_is_refused(tmp_path: Path, authority: Authority) -> None:
    async with ApiServer(WORLD, tls=authority.server_context(tmp_path)) as server:
        access = ClusterAccess(servers=(server.url,), ca=Material(data=Authority("other").pem))
        async with reading(access) as r:
            await until(lambda: r.errors("tls") >= 2)
        assert not server.log


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("expired", ": certificate has expired"),
        ("other name", ": IP address mismatch, certificate is not valid for '127.0.0.1'"),
        ("no TLS", ": WRONG_VERSION_NUMBER"),
        ("old TLS", "127.0.0.1:"),
    ],
)
async def test_servers_that_cannot_be_trusted_are_not_asked(
    case: str, words: str, tmp_path: Path, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    names = ("192.0.2.1",) if case == "other name" else ()
    context = authority.server_context(tmp_path, *names, days=case != "expired")
    if case == "old TLS":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            context.maximum_version = ssl.TLSVersion.TLSv1_1
    async with ApiServer(WORLD, tls=None if case == "no TLS" else context) as server:
        url = server.url.replace("http:", "https:")
        access = ClusterAccess(servers=(url,), ca=Material(data=authority.pem), token="secret")
        async with reading(access) as r:
            await until(lambda: r.errors("tls") + r.errors("connect") >= 4)
        assert not server.log
    assert words in caplog.text
    assert "ssl.SSLContext" not in caplog.text


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("expired", "it has expired"),
        ("other authority", "it does not know its authority"),
        ("none", "the server requires a client certificate"),
    ],
)
async def test_a_refused_client_certificate_is_said_in_words(
    case: str, words: str, tmp_path: Path, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    context = authority.server_context(tmp_path)
    context.verify_mode = ssl.CERT_REQUIRED
    issuer = Authority("other") if case == "other authority" else authority
    certificate, key = issuer.issue("me", days=case != "expired") if case != "none" else (b"", b"")

    def refuse(listening: socket.socket) -> None:
        # A server of asyncio closes the connection without sending the alert.
        with suppress(OSError):
            while True:
                sock, _ = listening.accept()
                with sock, suppress(OSError):  # of one connection
                    context.wrap_socket(sock, server_side=True)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=refuse, args=(listening,), daemon=True).start()
        access = ClusterAccess(
            servers=(f"https://127.0.0.1:{listening.getsockname()[1]}",),
            ca=Material(data=authority.pem),
            client_certificate=Material(data=certificate),
            client_key=Material(data=key),
        )
        async with reading(access) as r:
            await until(lambda: r.errors("tls") >= 4)
        listening.shutdown(socket.SHUT_RDWR)  # wakes the thread
    assert words in caplog.text


async def test_tls_server_name(tmp_path: Path, authority: Authority) -> None:
    context = authority.server_context(tmp_path, "kubernetes.default")
    ca = Material(data=authority.pem)
    async with ApiServer(WORLD, tls=context) as server:
        async with reading(ClusterAccess(servers=(server.url,), ca=ca)) as r:
            await until(lambda: r.errors("tls") >= 1)
        access = ClusterAccess(servers=(server.url,), ca=ca, tls_server_name="kubernetes.default")
        async with reading(access) as r:
            await r.synced()


async def test_insecure(tmp_path: Path, authority: Authority) -> None:
    async with ApiServer(WORLD, tls=authority.server_context(tmp_path, "elsewhere")) as server:
        access = ClusterAccess(servers=(server.url,), insecure=True)
        async with reading(access) as r:
            await r.synced()


async def test_a_broken_ca_is_a_retry(tmp_path: Path, authority: Authority) -> None:
    (tmp_path / "ca.crt").write_text("not PEM")
    async with ApiServer(WORLD, tls=authority.server_context(tmp_path)) as server:
        access = ClusterAccess(servers=(server.url,), ca=Material(path=str(tmp_path / "ca.crt")))
        async with reading(access) as r:
            await until(lambda: r.errors("credentials") >= 2)
            (tmp_path / "ca.crt").write_bytes(authority.pem)
            await r.synced()


async def test_token_files_are_read_again(
    tmp_path: Path, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    token = tmp_path / "token"
    token.write_text("one\n")
    async with ApiServer(WORLD, tls=authority.server_context(tmp_path)) as server:
        server.tokens = frozenset({"one"})
        access = ClusterAccess(
            servers=(server.url,), ca=Material(data=authority.pem), token_file=str(token)
        )
        async with reading(access) as r:
            await r.synced()
            server.tokens = frozenset({"two"})
            server.drop()
            await until(lambda: r.errors("http_401") >= 2)
            assert f"sent: the token of {token}" in caplog.text
            token.write_text("two\n")
            server.add(service("new"))
            await until(lambda: "new" in r.store.services)


async def test_a_token_file_that_comes_late(tmp_path: Path, authority: Authority) -> None:
    token = tmp_path / "token"
    async with ApiServer(WORLD, tls=authority.server_context(tmp_path)) as server:
        access = ClusterAccess(
            servers=(server.url,), ca=Material(data=authority.pem), token_file=str(token)
        )
        async with reading(access) as r:
            await until(lambda: r.errors("credentials") >= 2)
            assert not server.log
            token.write_text("one")
            await r.synced()


async def test_basic_authentication_and_impersonation(tmp_path: Path, authority: Authority) -> None:
    async with ApiServer(WORLD, tls=authority.server_context(tmp_path)) as server:
        access = ClusterAccess(
            servers=(server.url,),
            ca=Material(data=authority.pem),
            username="me",
            password="secret",
            impersonate=(("Impersonate-User", "proxy"),),
        )
        async with reading(access) as r:
            await r.synced()
        headers = server.log[0].headers
        assert headers["Authorization"] == "Basic " + b64(b"me:secret")
        assert headers["Impersonate-User"] == "proxy"


CREDENTIALS: dict[str, dict[str, Any]] = {
    "token": {"token": "hidden"},
    "token file": {"tokenFile": "token"},
    "password": {"username": "me", "password": "hidden"},
    "certificate": {"client-certificate": "tls.crt", "client-key": "tls.key"},
    "exec": {"exec": {"apiVersion": "client.authentication.k8s.io/v1", "command": "/bin/false"}},
    "impersonation": {"as": "me"},
}


@pytest.mark.parametrize("name", CREDENTIALS)
async def test_plain_http_carries_no_credentials(
    name: str, tmp_path: Path, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    """As with client-go: anybody on the way could read them."""
    (tmp_path / "token").write_text("hidden")
    certificate, key = authority.issue("me")
    (tmp_path / "tls.crt").write_bytes(certificate)
    (tmp_path / "tls.key").write_bytes(key)
    async with ApiServer(WORLD) as server:
        file = kubeconfig(tmp_path, {"server": server.url}, CREDENTIALS[name])
        async with reading(load_cluster_access(file)) as r:
            await r.synced()
        for request in server.log:
            assert not {name for name in request.headers if "Auth" in name or "Imper" in name}
    warnings = [record.getMessage() for record in caplog.records]
    assert len([text for text in warnings if "is plain http, so" in text]) == 1
    assert "hidden" not in caplog.text


async def test_plain_http_without_credentials_is_no_matter(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with ApiServer(WORLD) as server, reading(server) as r:
        await r.synced()
    assert "plain http" not in caplog.text


async def test_a_password_in_a_url_is_used_and_not_shown(
    tmp_path: Path, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    async with ApiServer(WORLD, tls=authority.server_context(tmp_path)) as server:
        host = server.url.removeprefix("https://")
        urls = (f"https://me:s3%40cret@{host}", f"https://me:s3%40cret@{host}/")
        (tmp_path / "kubeconfig").write_text("{}")
        access = load_cluster_access(tmp_path / "kubeconfig", masters=urls)
        assert (access.username, access.password) == ("me", "s3@cret")
        assert access.servers == (server.url, server.url)
        async with reading(msgspec.structs.replace(access, ca=Material(data=authority.pem))) as r:
            await r.synced()
            assert r.source.stats.server == server.url
        assert server.log[0].headers["Authorization"] == "Basic " + b64(b"me:s3@cret")
    assert "cret" not in caplog.text


PLUGIN = """#!/bin/sh
cd "$(dirname "$0")"
echo run >> runs
printf %s "$KUBERNETES_EXEC_INFO" > request
cat <<END
{"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential",
 "status": {"token": "$PREFIX-$1-$(cat secret)"}}
END
"""


async def test_exec_plugin(tmp_path: Path, authority: Authority) -> None:
    plugin = tmp_path / "plugin.sh"
    plugin.write_text(PLUGIN)
    plugin.chmod(plugin.stat().st_mode | stat.S_IXUSR)
    (tmp_path / "secret").write_text("s")
    exec_section = {
        "apiVersion": "client.authentication.k8s.io/v1",
        "command": "./plugin.sh",
        "args": ["a"],
        "env": [{"name": "PREFIX", "value": "p"}],
        "provideClusterInfo": True,
        "interactiveMode": "Never",
    }
    async with ApiServer(WORLD, tls=authority.server_context(tmp_path)) as server:
        server.tokens = frozenset({"p-a-s"})
        ca = b64(authority.pem)
        cluster = {"server": server.url, "certificate-authority-data": ca}
        file = kubeconfig(tmp_path, cluster, {"exec": exec_section})
        async with reading(load_cluster_access(file)) as r:
            await r.synced()
            assert (tmp_path / "runs").read_text() == "run\n"
            request = json.loads((tmp_path / "request").read_text())
            assert request["kind"] == "ExecCredential"
            assert request["spec"] == {"interactive": False, "cluster": cluster}


def down() -> str:
    """A URL where nobody listens: port 1 of loopback."""
    return "http://127.0.0.1:1"


async def test_several_servers_fail_over() -> None:
    async with ApiServer(WORLD) as first, ApiServer(WORLD) as second:
        access = ClusterAccess(servers=(down(), first.url, second.url))
        in_order = timing(random=lambda: 0.5)  # each node has its own order, by chance
        async with reading(access, timing=in_order) as r:
            await r.synced()
            assert r.source.stats.server == first.url
            assert not second.log
            await first.stop_listening()
            second.add(service("new"))
            await until(lambda: "new" in r.store.services)
            assert r.source.stats.server == second.url
            await first.listen_again()
            second.drop()
            second.add(service("newer"))
            await until(lambda: "newer" in r.store.services)


async def test_a_server_that_answers_nonsense_is_left() -> None:
    async with ApiServer(WORLD) as sick, ApiServer(WORLD) as well:
        sick.fault("status", status=503, times=-1)
        async with reading(ClusterAccess(servers=(sick.url, well.url))) as r:
            await r.synced()
            assert r.source.stats.server == well.url


async def test_no_server_at_all_is_a_counted_retry(caplog: pytest.LogCaptureFixture) -> None:
    async with reading(ClusterAccess(servers=(down(),))) as r:
        await until(lambda: r.errors("connect") >= 8)
        assert not r.store.synced
        assert not r.source.stats.connected
    assert "cannot connect to 127.0.0.1:1: Connection refused" in caplog.text
    assert "ssl" not in caplog.text


async def test_proxy() -> None:
    async with ApiServer(WORLD) as server:  # takes requests for any host, as a proxy does
        access = ClusterAccess(servers=("http://api.invalid:6443",), proxy_url=server.url)
        async with reading(access) as r:
            await r.synced()
        assert {request.headers["Host"] for request in server.log} == {"api.invalid:6443"}


async def test_proxy_with_tls(tmp_path: Path, authority: Authority) -> None:
    """An https server is reached by CONNECT."""
    asked: list[str] = []
    async with ApiServer(WORLD, tls=authority.server_context(tmp_path)) as server:
        port = int(server.url.rpartition(":")[2])

        async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while data := await reader.read(65536):
                writer.write(data)
            writer.close()

        async def tunnel(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            head = await reader.readuntil(b"\r\n\r\n")
            asked.append(head.split()[1].decode())
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            await asyncio.gather(
                pump(reader, far_writer), pump(far_reader, writer), return_exceptions=True
            )

        proxy = await asyncio.start_server(tunnel, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{proxy.sockets[0].getsockname()[1]}"
        access = ClusterAccess(
            servers=("https://localhost:6443",), ca=Material(data=authority.pem), proxy_url=url
        )
        async with reading(access) as r:
            await r.synced()
            proxy.close()
    assert set(asked) == {"localhost:6443"}
