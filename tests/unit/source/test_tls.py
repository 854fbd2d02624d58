from __future__ import annotations

import ssl
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from steersman.source.kubeconfig import ClusterAccess, Material
from steersman.source.tls import KeyPair, TlsContexts, TlsError
from tests.support.apiserver.certificates import Authority


def test_contexts_are_made_anew_only_when_something_changed() -> None:
    authority = Authority()
    contexts = TlsContexts(ClusterAccess(servers=("https://x",), ca=Material(data=authority.pem)))
    pair = KeyPair(*authority.issue("me"))
    first = contexts.current(pair)
    assert contexts.current(KeyPair(*pair)) is first
    assert contexts.current(KeyPair(*authority.issue("me"))) is not first
    assert contexts.current(None) is not first


def test_keys_that_cannot_be_used() -> None:
    authority = Authority()
    contexts = TlsContexts(ClusterAccess(servers=("https://x",)))
    certificate, key = authority.issue("me")
    locked = serialization.load_pem_private_key(key, None).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"secret"),
    )
    for wrong in (b"no PEM", locked, authority.issue("other")[1]):
        with pytest.raises(TlsError, match="client certificate or key cannot be used"):
            contexts.current(KeyPair(certificate, wrong))


def test_an_authority_that_cannot_be_read() -> None:
    contexts = TlsContexts(ClusterAccess(servers=("https://x",), ca=Material(path="/nowhere/ca")))
    with pytest.raises(TlsError, match="certificate authority"):
        contexts.current(None)


@pytest.mark.parametrize("text", ["", "\n"])
def test_an_emptied_authority_does_not_make_everybody_trusted(tmp_path: Path, text: str) -> None:
    file = tmp_path / "ca.crt"
    file.write_text(text)
    contexts = TlsContexts(ClusterAccess(servers=("https://x",), ca=Material(path=str(file))))
    with pytest.raises(TlsError, match=r"ca\.crt is empty"):
        contexts.current(None)
    file.write_bytes(Authority().pem)
    assert len(contexts.current(None).get_ca_certs()) == 1


def test_without_verification_no_authority_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = []
    monkeypatch.setattr(ssl.SSLContext, "load_default_certs", lambda *args: loaded.append(args))
    context = TlsContexts(ClusterAccess(servers=("https://x",), insecure=True)).current(None)
    assert (context.verify_mode, context.check_hostname) == (ssl.CERT_NONE, False)
    assert not loaded
    TlsContexts(ClusterAccess(servers=("https://x",))).current(None)
    assert len(loaded) == 1


@pytest.mark.parametrize(
    ("http2", "disabled", "offered"), [(True, "", True), (False, "", False), (True, "1", False)]
)
def test_http_2_is_offered_unless_disabled(
    http2: bool, disabled: str, offered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISABLE_HTTP2", disabled)
    offers: list[list[str]] = []
    monkeypatch.setattr(ssl.SSLContext, "set_alpn_protocols", lambda _, names: offers.append(names))
    TlsContexts(ClusterAccess(servers=("https://x",))).current(None, http2=http2)
    assert offers == ([["h2", "http/1.1"]] if offered else [])
