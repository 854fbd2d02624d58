"""How to reach the API server: a kubeconfig file, or the service account of a pod.

This module parses and validates; it opens no connection. Key files are only named, as they rotate:
they are read whenever they are used.
"""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, unquote, urlsplit

import msgspec

from steersman.host.files import read_file
from steersman.model.addresses import without_password
from steersman.source.proxies import PROXY_SCHEMES, environment_proxy

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
EXEC_VERSIONS = ("client.authentication.k8s.io/v1", "client.authentication.k8s.io/v1beta1")
_MAX_BYTES = 8 << 20
_MAX_NODES = 100_000  # of YAML, aliases expanded
_MAX_DEPTH = 50
_HEADER_SAFE = "!#$&'*+-.^_`|~"  # characters that the name of a header may have
# Reserved name of the extension with the plugin's settings for a cluster.
_EXEC_EXTENSION = "client.authentication.k8s.io/exec"


class KubeconfigError(Exception):
    """The access to the API server is misconfigured; the message has the file, field and remedy."""

    def __init__(self, file: str, field: str, problem: str) -> None:
        super().__init__(f"{file}: {field}: {problem}" if field else f"{file}: {problem}")
        self.file = file
        self.field = field
        self.problem = problem


class Material(msgspec.Struct, frozen=True):
    """PEM text, or the path of a file with it."""

    data: bytes = b""
    path: str = ""

    def __bool__(self) -> bool:
        return bool(self.data or self.path)

    def read(self) -> bytes:
        """Return the current PEM text; OSError if the file cannot be read."""
        return self.data or read_file(self.path, _MAX_BYTES)


class ExecPlugin(msgspec.Struct, frozen=True):
    """A program that prints credentials (client.authentication.k8s.io)."""

    command: str
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = {}
    api_version: str = EXEC_VERSIONS[0]
    install_hint: str = ""
    """Message for people if there is no such program."""
    cluster: Mapping[str, Any] | None = None
    """`spec.cluster` of the request, if provideClusterInfo is set."""


class ClusterAccess(msgspec.Struct, frozen=True):
    """The servers of one cluster and the credentials for them."""

    servers: tuple[str, ...]
    """URLs of the API servers, without a final slash, tried in turn."""
    origin: str = "--master"
    """The file or flag that this comes from, for messages."""
    ca: Material = Material()
    """Certificate authorities of the servers; falsy for those of the system."""
    insecure: bool = False
    tls_server_name: str = ""
    proxy_url: str = ""
    disable_compression: bool = False
    accepted: str = "application/vnd.kubernetes.protobuf,application/json"
    """Content types of lists and watches, as in an Accept header."""
    content_type: str = "application/vnd.kubernetes.protobuf"
    """Of Events."""
    token: str = ""
    token_file: str = ""
    """Takes precedence over `token`; read again for every request."""
    username: str = ""
    password: str = ""
    client_certificate: Material = Material()
    client_key: Material = Material()
    exec_plugin: ExecPlugin | None = None
    impersonate: tuple[tuple[str, str], ...] = ()
    """`Impersonate-*` headers; those for groups and extra attributes may be repeated."""


# The file format (clientcmd.v1); fields that are not used here are skipped.


class _Kebab(msgspec.Struct, frozen=True, rename="kebab"):
    pass


class _Cluster(_Kebab, frozen=True):
    server: str = ""
    certificate_authority: str = ""
    certificate_authority_data: str = ""
    insecure_skip_tls_verify: bool = False
    tls_server_name: str = ""
    proxy_url: str = ""
    disable_compression: bool = False
    extensions: list[dict[str, Any]] = []


class _Variable(msgspec.Struct, frozen=True):
    name: str
    value: str = ""


class _Exec(msgspec.Struct, frozen=True, rename="camel"):
    command: str
    api_version: str
    args: list[str] = []
    env: list[_Variable] = []
    install_hint: str = ""
    provide_cluster_info: bool = False
    interactive_mode: str = ""


class _User(_Kebab, frozen=True):
    client_certificate: str = ""
    client_certificate_data: str = ""
    client_key: str = ""
    client_key_data: str = ""
    token: str = ""
    token_file: str = msgspec.field(name="tokenFile", default="")
    username: str = ""
    password: str = ""
    exec: _Exec | None = None
    auth_provider: Any = None
    as_: str = msgspec.field(name="as", default="")
    as_uid: str = ""
    as_groups: list[str] = []
    as_user_extra: dict[str, list[str]] = {}


class _Context(_Kebab, frozen=True):
    cluster: str = ""
    user: str = ""


class _NamedCluster(msgspec.Struct, frozen=True):
    name: str
    cluster: _Cluster = _Cluster()


class _NamedUser(msgspec.Struct, frozen=True):
    name: str
    user: _User = _User()


class _NamedContext(msgspec.Struct, frozen=True):
    name: str
    context: _Context = _Context()


_Named = TypeVar("_Named", _NamedCluster, _NamedUser, _NamedContext)


class _File(_Kebab, frozen=True):
    clusters: list[_NamedCluster] = []
    users: list[_NamedUser] = []
    contexts: list[_NamedContext] = []
    current_context: str = ""


def load_cluster_access(
    path: str | os.PathLike[str] | None = None,
    *,
    masters: Sequence[str] = (),
    context: str = "",
    environ: Mapping[str, str] = os.environ,
    service_account: Path = SERVICE_ACCOUNT,
) -> ClusterAccess:
    """Determine how to reach the API server.

    Args:
        path: a kubeconfig file; if there is none, `masters` are used alone, else the environment
            and service account of the pod.
        masters: URLs that override the server, tried in turn (`--master`).
        context: the context to use; "" for the current one of the file.

    Raises:
        KubeconfigError: something is missing or malformed.
    """
    if path:
        access = _from_file(Path(path), tuple(masters), context)
    elif masters:
        access = ClusterAccess(**_servers("--master", "", masters))
    else:
        access = _in_cluster(environ, service_account)
    for server in () if access.proxy_url else access.servers:
        proxy = environment_proxy(server, environ)
        if proxy and urlsplit(proxy).scheme not in PROXY_SCHEMES:
            variable = f"{urlsplit(server).scheme.upper()}_PROXY"
            problem = f"{without_password(proxy)!r}: only http and https proxies are supported"
            raise KubeconfigError("environment", variable, problem)
    return access


def _in_cluster(environ: Mapping[str, str], folder: Path) -> ClusterAccess:
    host = environ.get("KUBERNETES_SERVICE_HOST", "")
    port = environ.get("KUBERNETES_SERVICE_PORT", "")
    if not host or not port:
        raise KubeconfigError(
            "environment",
            "KUBERNETES_SERVICE_HOST",
            "is not set, so this is no pod; give --kubeconfig, --master or --manifests",
        )
    token, ca = folder / "token", folder / "ca.crt"
    if not token.is_file():
        raise KubeconfigError(str(token), "", "no such file; mount the service account's token")
    authority = f"[{host}]" if ":" in host else host
    return ClusterAccess(
        servers=(f"https://{authority}:{port}",),
        origin=str(folder),
        ca=Material(path=str(ca)) if ca.is_file() else Material(),
        token_file=str(token),
    )


def _from_file(path: Path, masters: tuple[str, ...], context: str) -> ClusterAccess:
    file = str(path)
    config = _parse(path)

    # Context, cluster and user; only --master can replace a cluster.
    name = context or config.current_context
    if not name and (config.contexts or not masters):
        raise KubeconfigError(file, "current-context", "is not set; set it or name a context")
    chosen = _find(file, "contexts", config.contexts, name).context if name else _Context()
    clusters = config.clusters
    cluster = _find(file, "clusters", clusters, chosen.cluster).cluster if chosen.cluster else None
    user = _find(file, "users", config.users, chosen.user).user if chosen.user else _User()
    if cluster is None and not masters:
        raise KubeconfigError(file, f"contexts[{name}].cluster", "is not set; name a cluster")
    cluster = cluster or _Cluster()

    # A user name of the kubeconfig takes precedence over one in the URL of a server.
    field = f"clusters[{chosen.cluster}]"
    if masters:
        fields = _servers("--master", "", masters)
    else:
        fields = _servers(file, f"{field}.server", (cluster.server,))
    reader = _Reader(file, path.resolve().parent)
    given = reader.user(f"users[{chosen.user}]", user, cluster)
    if given["username"]:
        fields |= {"username": given["username"], "password": given["password"]}
    return ClusterAccess(**{**given, **fields}, origin=file, **reader.cluster(field, cluster))


def _parse(path: Path) -> _File:
    file = str(path)
    try:
        return _decoded(read_file(path, _MAX_BYTES), file)
    except OSError as error:
        reason = error.strerror or str(error)
        raise KubeconfigError(file, "", f"cannot be read: {reason}") from error


def _decoded(content: bytes, file: str) -> _File:
    # 1.5 MB, not in a pod that uses its service account
    from steersman.model.yaml_reader import Budget, YamlError, read_yaml  # noqa: PLC0415

    try:
        text = content.decode("utf-8-sig")
        documents = list(read_yaml(text, Budget(_MAX_NODES, _MAX_DEPTH)))
    except (YamlError, UnicodeDecodeError) as error:
        raise KubeconfigError(file, "", f"is not YAML: {error}") from error
    if len(documents) > 1:
        line = documents[1].line
        raise KubeconfigError(file, "", f"line {line}: a second YAML document; remove it")
    value = (documents[0].value if documents else None) or {}
    if not isinstance(value, dict):
        raise KubeconfigError(file, "", "is no kubeconfig: that begins with apiVersion: v1")
    try:
        return msgspec.convert(_without_null(value), _File)
    except msgspec.ValidationError as error:
        reason, _, field = str(error).partition(" - at `$")
        raise KubeconfigError(file, field.rstrip("`").lstrip("."), reason) from error


def _without_null(value: Any) -> Any:
    """Remove null values, which mean the same as absence (`args: null` is common)."""
    if isinstance(value, dict):
        return {key: _without_null(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_null(item) for item in value]
    return value


def _find(file: str, section: str, entries: Sequence[_Named], name: str) -> _Named:
    for entry in entries:
        if entry.name == name:
            return entry
    known = ", ".join(sorted(entry.name for entry in entries)) or "none"
    raise KubeconfigError(file, section, f"there is no {name!r} (there is: {known})")


def _servers(file: str, field: str, urls: Sequence[str]) -> dict[str, Any]:
    """Return the fields of a ClusterAccess that follow from URLs of API servers.

    User and password are removed from the URLs, so that no log and no page ever shows them.
    """
    servers = []
    users = set()
    for url in urls:
        try:
            parts = urlsplit(url if "://" in url else f"https://{url}")
            usable = bool(url and parts.hostname) and parts.scheme in ("http", "https")
            usable = usable and parts.port != 0
        except ValueError:
            usable = False
        if not usable or parts.query or parts.fragment:
            shown = without_password(url)
            problem = f"{shown!r} is not a URL such as https://10.0.0.1:6443"
            raise KubeconfigError(file, field, problem)
        if parts.username is not None:
            users.add((unquote(parts.username), unquote(parts.password or "")))
        servers.append(parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl().rstrip("/"))
    if len(users) > 1:
        raise KubeconfigError(
            file, field, "the URLs name different users; all servers get the same credentials"
        )
    username, password = next(iter(users), ("", ""))
    return {"servers": tuple(servers), "username": username, "password": password}


class _Reader:
    """Converts the sections of one file; paths in it are relative to the file's directory."""

    def __init__(self, file: str, folder: Path) -> None:
        self._file = file
        self._folder = folder

    def cluster(self, field: str, cluster: _Cluster) -> dict[str, Any]:
        if cluster.proxy_url and urlsplit(cluster.proxy_url).scheme not in PROXY_SCHEMES:
            shown = without_password(cluster.proxy_url)
            problem = f"{shown!r}: only http and https proxies are supported"
            raise KubeconfigError(self._file, f"{field}.proxy-url", problem)
        ca = self._material(f"{field}.certificate-authority", cluster.certificate_authority_data,
                            cluster.certificate_authority)  # fmt: skip
        if ca and cluster.insecure_skip_tls_verify:
            problem = "cannot be given together with a certificate authority; drop one"
            raise KubeconfigError(self._file, f"{field}.insecure-skip-tls-verify", problem)
        return {
            "ca": ca,
            "insecure": cluster.insecure_skip_tls_verify,
            "tls_server_name": cluster.tls_server_name,
            "proxy_url": cluster.proxy_url,
            "disable_compression": cluster.disable_compression,
        }

    def user(self, field: str, user: _User, cluster: _Cluster) -> dict[str, Any]:
        if user.auth_provider is not None:
            problem = "was removed from Kubernetes in 1.26; use an exec plugin"
            raise KubeconfigError(self._file, f"{field}.auth-provider", problem)
        certificate = self._material(
            f"{field}.client-certificate", user.client_certificate_data, user.client_certificate
        )
        key = self._material(f"{field}.client-key", user.client_key_data, user.client_key)
        if bool(certificate) != bool(key):
            lone, missing = ("certificate", "key") if certificate else ("key", "certificate")
            problem = f"is missing, there is only a client-{lone}"
            raise KubeconfigError(self._file, f"{field}.client-{missing}", problem)
        return {
            "token": user.token,
            "token_file": self._path(user.token_file),
            "username": user.username,
            "password": user.password,
            "client_certificate": certificate,
            "client_key": key,
            "exec_plugin": self._plugin(f"{field}.exec", user.exec, cluster),
            "impersonate": tuple(
                (name, value)
                for name, value in (
                    ("Impersonate-User", user.as_),
                    ("Impersonate-Uid", user.as_uid),
                    *(("Impersonate-Group", group) for group in user.as_groups),
                    *(
                        (f"Impersonate-Extra-{quote(key, safe=_HEADER_SAFE)}", value)
                        for key, values in user.as_user_extra.items()
                        for value in values
                    ),
                )
                if value
            ),
        }

    def _path(self, text: str) -> str:
        return str(self._folder / text) if text else ""

    def _material(self, field: str, data: str, path: str) -> Material:
        if not data:
            file = Path(self._path(path)) if path else None
            if file is not None and not file.is_file():
                raise KubeconfigError(self._file, field, f"{file}: no such file")
            return Material(path=str(file)) if file else Material()
        try:
            return Material(data=base64.b64decode("".join(data.split()), validate=True))
        except (binascii.Error, ValueError) as error:
            raise KubeconfigError(self._file, f"{field}-data", "is not base64") from error

    def _plugin(self, field: str, plugin: _Exec | None, cluster: _Cluster) -> ExecPlugin | None:
        if plugin is None:
            return None
        if plugin.api_version not in EXEC_VERSIONS:
            problem = f"{plugin.api_version!r} is not one of {', '.join(EXEC_VERSIONS)}"
            raise KubeconfigError(self._file, f"{field}.apiVersion", problem)
        if plugin.interactive_mode == "Always":
            problem = "is Always, but there is no terminal; use IfAvailable or Never"
            raise KubeconfigError(self._file, f"{field}.interactiveMode", problem)
        info: dict[str, Any] | None = None
        if plugin.provide_cluster_info:
            # As client-go does, pass the content of a CA file.
            data = cluster.certificate_authority_data
            if not data and cluster.certificate_authority:
                authority = Path(self._path(cluster.certificate_authority))
                data = base64.b64encode(read_file(authority, _MAX_BYTES)).decode()
            extensions = {each.get("name"): each.get("extension") for each in cluster.extensions}
            info = {
                "server": cluster.server,
                "tls-server-name": cluster.tls_server_name,
                "insecure-skip-tls-verify": cluster.insecure_skip_tls_verify,
                "certificate-authority-data": data,
                "proxy-url": cluster.proxy_url,
                "disable-compression": cluster.disable_compression,
                "config": extensions.get(_EXEC_EXTENSION),
            }
            info = {field: value for field, value in info.items() if value}
        has_path = os.sep in plugin.command
        return ExecPlugin(
            command=self._path(plugin.command) if has_path else plugin.command,
            args=tuple(plugin.args),
            env={variable.name: variable.value for variable in plugin.env},
            api_version=plugin.api_version,
            install_hint=plugin.install_hint,
            cluster=info,
        )
