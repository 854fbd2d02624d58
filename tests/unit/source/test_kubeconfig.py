from __future__ import annotations

import base64
import copy
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from steersman.source.kubeconfig import (
    ClusterAccess,
    ExecPlugin,
    KubeconfigError,
    Material,
    load_cluster_access,
)
from steersman.source.proxies import environment_proxy

PEM = base64.b64encode(b"PEM").decode()
EXEC = {"apiVersion": "client.authentication.k8s.io/v1", "command": "get-token"}
CONFIG: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "Config",
    "clusters": [
        {"name": "c", "cluster": {"server": "https://10.0.0.1:6443/"}},
        {"name": "d", "cluster": {"server": "https://10.0.0.2:6443"}},
    ],
    "users": [{"name": "u", "user": {"token": "t"}}],
    "contexts": [
        {"name": "x", "context": {"cluster": "c", "user": "u"}},
        {"name": "y", "context": {"cluster": "d", "user": "u"}},
    ],
    "current-context": "x",
}


def write(
    folder: Path, *, cluster: dict[str, Any] | None = None, user: Any = None, **top: Any
) -> Path:
    config = copy.deepcopy(CONFIG)
    config["clusters"][0]["cluster"] |= cluster or {}
    if user is not None:
        config["users"][0]["user"] = user
    config |= {name.replace("_", "-"): value for name, value in top.items()}
    path = folder / "config"
    path.write_text(yaml.safe_dump(config))
    return path


def load(folder: Path, **changes: Any) -> ClusterAccess:
    return load_cluster_access(write(folder, **changes))


def test_the_current_context(tmp_path: Path) -> None:
    access = load(tmp_path)
    assert access == ClusterAccess(
        servers=("https://10.0.0.1:6443",), origin=str(tmp_path / "config"), token="t"
    )


def test_a_given_context_and_masters(tmp_path: Path) -> None:
    path = write(tmp_path)
    assert load_cluster_access(path, context="y").servers == ("https://10.0.0.2:6443",)
    access = load_cluster_access(path, masters=["http://a:1", "b.example:2"])
    assert access.servers == ("http://a:1", "https://b.example:2")
    assert access.token == "t"


def test_masters_alone() -> None:
    assert load_cluster_access(masters=["http://[::1]:80/x/"]).servers == ("http://[::1]:80/x",)


def test_passwords_in_urls_are_taken_out(tmp_path: Path) -> None:
    access = load_cluster_access(masters=["https://a:b%2Fc@x:6443/", "https://y"])
    assert access.servers == ("https://x:6443", "https://y")
    assert (access.username, access.password) == ("a", "b/c")
    access = load(tmp_path, cluster={"server": "https://a:b@[::1]:6443"}, user={})
    assert (access.servers, access.username) == (("https://[::1]:6443",), "a")
    user = {"username": "u", "password": "p"}
    access = load(tmp_path, cluster={"server": "https://a:b@x"}, user=user)
    assert (access.username, access.password) == ("u", "p")
    with pytest.raises(KubeconfigError, match="different users"):
        load_cluster_access(masters=["https://a:b@x", "https://c:d@y"])


@pytest.mark.parametrize("cluster", [{"server": "ftp://a:hidden@x"}, {"server": "http://a:hidden@"},
                                     {"proxy-url": "ftp://a:hidden@x"}])  # fmt: skip
def test_errors_do_not_show_passwords(tmp_path: Path, cluster: dict[str, Any]) -> None:
    with pytest.raises(KubeconfigError) as caught:
        load(tmp_path, cluster=cluster)
    assert "hidden" not in str(caught.value)


def test_every_field(tmp_path: Path) -> None:
    for name in ("crt", "key"):
        (tmp_path / name).write_text(name)
    access = load(
        tmp_path,
        cluster={
            "certificate-authority-data": PEM,
            "tls-server-name": "kubernetes",
            "proxy-url": "http://proxy:3128",
            "disable-compression": True,
        },
        user={
            "tokenFile": "sub/token",
            "username": "me",
            "password": "pw",
            "client-certificate": "crt",
            "client-key": str(tmp_path / "key"),
            "as": "someone",
            "as-uid": "7",
            "as-groups": ["a", "b"],
            "as-user-extra": {"scopes": ["view", "edit"], "example.org/Über%": ["1"]},
        },
    )
    assert access.ca == Material(data=b"PEM")
    assert access.ca.read() == b"PEM"
    assert access.client_certificate.read() == b"crt"
    assert access.client_key == Material(path=str(tmp_path / "key"))
    assert access.token_file == str(tmp_path / "sub/token")
    assert (access.username, access.password) == ("me", "pw")
    assert access.tls_server_name == "kubernetes"
    assert access.proxy_url == "http://proxy:3128"
    assert access.disable_compression
    assert access.impersonate == (
        ("Impersonate-User", "someone"),
        ("Impersonate-Uid", "7"),
        ("Impersonate-Group", "a"),
        ("Impersonate-Group", "b"),
        ("Impersonate-Extra-example.org%2F%C3%9Cber%25", "1"),
        ("Impersonate-Extra-scopes", "view"),
        ("Impersonate-Extra-scopes", "edit"),
    )


def test_data_beats_files(tmp_path: Path) -> None:
    cluster = {"certificate-authority-data": PEM, "certificate-authority": "/nowhere"}
    assert load(tmp_path, cluster=cluster).ca == Material(data=b"PEM")


def test_exec(tmp_path: Path) -> None:
    (tmp_path / "ca").write_text("PEM")
    extension = {"name": "client.authentication.k8s.io/exec", "extension": {"audience": "x"}}
    plugin = load(
        tmp_path,
        cluster={
            "certificate-authority": "ca",
            "extensions": [{"name": "other", "extension": 1}, extension],
        },
        user={
            "exec": {
                **EXEC,
                "command": "bin/get",
                "args": ["a"],
                "env": [{"name": "A", "value": "1"}],
                "installHint": "get it",
                "provideClusterInfo": True,
            }
        },
    ).exec_plugin
    assert plugin == ExecPlugin(
        command=str(tmp_path / "bin/get"),
        args=("a",),
        env={"A": "1"},
        install_hint="get it",
        cluster={
            "server": "https://10.0.0.1:6443/",
            "certificate-authority-data": PEM,
            "config": {"audience": "x"},
        },
    )


@pytest.mark.parametrize("value", ["{null: 1}", "{true: 2020-01-01}", ".nan"])
def test_extensions_that_no_json_can_hold_are_for_others(tmp_path: Path, value: str) -> None:
    path = write(tmp_path, cluster={"extensions": [{"name": "other", "extension": "VALUE"}]})
    path.write_text(path.read_text().replace("VALUE", value))
    assert load_cluster_access(path).servers == ("https://10.0.0.1:6443",)


def test_a_rewritten_file_is_read_again(tmp_path: Path) -> None:
    assert load(tmp_path).token == "t"
    assert load(tmp_path, user={"token": "new"}).token == "new"


@pytest.mark.parametrize("token", ["2024-01-01", "2024-01-01T10:20:30Z", "1:20:30"])
def test_a_token_that_looks_like_a_date_or_a_time(tmp_path: Path, token: str) -> None:
    path = write(tmp_path, user={"token": "TOKEN"})
    path.write_text(path.read_text().replace("TOKEN", token))
    assert load_cluster_access(path).token == token


def test_null_is_absence(tmp_path: Path) -> None:
    user = {"exec": {**EXEC, "args": None, "env": None}, "token": None}
    plugin = load(tmp_path, user=user, preferences=None).exec_plugin
    assert plugin is not None
    assert plugin.command == "get-token"


@pytest.mark.parametrize(
    ("changes", "field", "words"),
    [
        ({"current_context": ""}, "current-context", "not set"),
        ({"current_context": "z"}, "contexts", "'z' (there is: x, y)"),
        ({"clusters": []}, "clusters", "'c' (there is: none)"),
        ({"users": None}, "users", "'u'"),
        ({"contexts": [{"name": "x", "context": {}}]}, "contexts[x].cluster", "name a cluster"),
        ({"cluster": {"server": ""}}, "clusters[c].server", "not a URL"),
        ({"cluster": {"server": "ftp://x"}}, "clusters[c].server", "not a URL"),
        ({"cluster": {"server": "https://x:port"}}, "clusters[c].server", "not a URL"),
        ({"cluster": {"proxy-url": "socks5://x"}}, "clusters[c].proxy-url", "http and https"),
        ({"cluster": {"certificate-authority": "none"}}, "clusters[c].certificate-authority",
         "no such file"),
        ({"cluster": {"certificate-authority-data": "?"}},
         "clusters[c].certificate-authority-data", "base64"),
        ({"cluster": {"certificate-authority-data": PEM, "insecure-skip-tls-verify": True}},
         "clusters[c].insecure-skip-tls-verify", "drop one"),
        ({"user": {"token": 7}}, "users[0].user.token", "Expected `str`"),
        ({"user": {"client-key-data": PEM}}, "users[u].client-certificate", "missing"),
        ({"user": {"client-certificate-data": PEM}}, "users[u].client-key", "missing"),
        ({"user": {"auth-provider": {"name": "gcp"}}}, "users[u].auth-provider", "exec plugin"),
        ({"user": {"exec": {**EXEC, "apiVersion": "v0"}}}, "users[u].exec.apiVersion", "v1beta1"),
        ({"user": {"exec": {**EXEC, "interactiveMode": "Always"}}},
         "users[u].exec.interactiveMode", "Never"),
        ({"user": {"exec": {"apiVersion": "v1"}}}, "users[0].user.exec", "command"),
    ],
)  # fmt: skip
def test_errors_name_file_and_field(
    tmp_path: Path, changes: dict[str, Any], field: str, words: str
) -> None:
    with pytest.raises(KubeconfigError) as caught:
        load(tmp_path, **changes)
    assert caught.value.file == str(tmp_path / "config")
    assert caught.value.field == field
    assert words in caught.value.problem
    assert str(caught.value).startswith(f"{tmp_path}/config: {field}: ")


BOMB = "x0: &x0 [1]\n" + "".join(
    f"x{i}: &x{i} [{', '.join([f'*x{i - 1}'] * 10)}]\n" for i in range(1, 12)
)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (BOMB, "grows too large by its aliases"),
        ("&a [*a]", "holds itself by an alias"),
        ("a: " + "[" * 100_000, "nested too deeply"),
        ("a: " + "[" * 60 + "]" * 60, "nested too deeply"),
        ("a: \xff\xfe", "is not YAML"),
        ("a: 1\n---\nb: 2\n", "line 3: a second YAML document"),
        ("a token\n", "bad: is no kubeconfig"),
    ],
)
def test_files_that_are_no_kubeconfig(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "bad").write_bytes(text.encode("latin-1"))
    with pytest.raises(KubeconfigError, match=words):
        load_cluster_access(tmp_path / "bad")


def test_what_is_no_regular_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1_500_000_000)
    for name, words in (("fifo", "not a regular file"), ("sparse", "longer than"), (".", "dir")):
        with pytest.raises(KubeconfigError, match=f"cannot be read: .*{words}"):
            load_cluster_access(tmp_path / name)
    with pytest.raises(KubeconfigError, match="not a regular file"):
        load_cluster_access("/dev/zero")


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(KubeconfigError, match="cannot be read: No such file"):
        load_cluster_access(tmp_path / "none")
    (tmp_path / "bad").write_text("a: [")
    with pytest.raises(KubeconfigError, match="is not YAML"):
        load_cluster_access(tmp_path / "bad")


@given(text=st.binary(max_size=60) | st.from_regex(rb"(clusters|users): [\[\]{}a-z:, \n-]*"))
def test_any_file_is_access_or_a_kubeconfig_error(
    tmp_path_factory: pytest.TempPathFactory, text: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed"
    path.write_bytes(text)
    with pytest.raises(KubeconfigError):
        load_cluster_access(path)


def test_in_cluster(tmp_path: Path) -> None:
    environ = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}
    with pytest.raises(KubeconfigError, match=r"token: no such file"):
        load_cluster_access(environ=environ, service_account=tmp_path)
    (tmp_path / "token").write_text("t")
    access = load_cluster_access(environ=environ, service_account=tmp_path)
    assert access.servers == ("https://10.96.0.1:443",)
    assert access.token_file == str(tmp_path / "token")
    assert not access.ca
    (tmp_path / "ca.crt").write_text("PEM")
    environ["KUBERNETES_SERVICE_HOST"] = "fd00::1"
    access = load_cluster_access(environ=environ, service_account=tmp_path)
    assert access.servers == ("https://[fd00::1]:443",)
    assert access.ca.read() == b"PEM"


def test_neither_file_nor_pod(tmp_path: Path) -> None:
    with pytest.raises(KubeconfigError, match="give --kubeconfig"):
        load_cluster_access(environ={}, service_account=tmp_path)


@pytest.mark.parametrize(
    ("server", "no_proxy", "proxy"),
    [
        ("https://10.0.0.1:6443", "", "http://p:1"),
        ("http://10.0.0.1:6443", "", None),
        ("https://127.0.0.1:6443", "", None),
        ("https://[::1]:6443", "", None),
        ("https://localhost:6443", "", None),
        ("https://10.0.0.1:6443", "10.0.0.0/8", None),
        ("https://10.0.0.1:6443", "192.168.0.0/16, 10.0.0.1", None),
        ("https://10.0.0.1:6443", "192.168.0.0/16", "http://p:1"),
        ("https://api.example.org", "example.org", None),
        ("https://api.example.org", ".example.org", None),
        ("https://api.example.org", "ample.org", "http://p:1"),
        ("https://api.example.org", "*", None),
        ("https://10.0.0.1:6443", "10.0.0.1:6443", None),
        ("https://10.0.0.1:6443", "10.0.0.1:443, 10.0.0.2:6443", "http://p:1"),
        ("https://10.0.0.1", "10.0.0.1:443", None),
        ("https://[fd00::1]:6443", "[fd00::1]:6443", None),
        ("https://[fd00::1]:6443", "[fd00::1]:443", "http://p:1"),
        ("https://[fd00::1]:6443", "fd00:0::1", None),
        ("https://api.example.org:6443", "example.org:6443", None),
        ("https://api.example.org:6443", "example.org:443", "http://p:1"),
    ],
)
def test_proxies_of_the_environment(server: str, no_proxy: str, proxy: str | None) -> None:
    environ = {"HTTPS_PROXY": "p:1", "no_proxy": no_proxy}
    assert environment_proxy(server, environ) == proxy


@pytest.mark.parametrize("names", [("HTTPS_PROXY", "https_proxy"), ("https_proxy", "HTTPS_PROXY")])
def test_variables_in_upper_case_count_before_others_unless_they_are_empty(
    names: tuple[str, str],
) -> None:
    server, given = "https://10.0.0.1:6443", {"HTTPS_PROXY": "p:1", "https_proxy": "q:1"}
    environ = {name: given[name] for name in names}
    assert environment_proxy(server, environ) == "http://p:1"
    assert environment_proxy(server, environ | {"HTTPS_PROXY": ""}) == "http://q:1"


def test_a_proxy_of_an_unknown_kind_is_refused_at_the_start(tmp_path: Path) -> None:
    environ = {"HTTPS_PROXY": "socks5://me:secret@p:1"}
    with pytest.raises(KubeconfigError, match="HTTPS_PROXY: 'socks5://") as caught:
        load_cluster_access(masters=["https://10.0.0.1:6443"], environ=environ)
    assert "secret" not in str(caught.value)
    for unused in ({"NO_PROXY": "10.0.0.0/8"}, {"HTTPS_PROXY": "http://p:1"}):
        load_cluster_access(masters=["https://10.0.0.1:6443"], environ={**environ, **unused})
