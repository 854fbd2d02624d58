"""Outlines of lists and events, and TLS contexts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from cryptography.hazmat.primitives import serialization

from steersman.source.credentials import KeyPair
from steersman.source.kubeconfig import ClusterAccess, Material
from steersman.source.transport import TlsContexts, TlsError
from steersman.source.wire import ApiError, Status, decode_event, decode_list, initial_end
from tests.support.apiserver.certificates import Authority


def page(**changes: Any) -> bytes:
    value = {"kind": "NodeList", "metadata": {"resourceVersion": "7"}, "items": []}
    return msgspec.json.encode(value | changes)


def test_an_empty_list_of_go_is_null() -> None:
    assert bytes(decode_list("Node", page(items=None)).items) == b"[]"
    assert bytes(decode_list("Node", page(items=[{}])).items) == b"[{}]"


@pytest.mark.parametrize("changes", [{"kind": "PodList"}, {"metadata": {}}, {"kind": "Node"}])
def test_what_is_no_list(changes: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as caught:
        decode_list("Node", page(**changes))
    assert caught.value.reason == "malformed"


@pytest.mark.parametrize(
    ("code", "reason"),
    [(403, "http_403"), (599, "http_599"), (1234, "http_other"), (0, "http_other")],
)
def test_only_real_statuses_are_reasons_of_their_own(code: int, reason: str) -> None:
    assert Status(code=code).error().reason == reason


@pytest.mark.parametrize(
    ("meta", "reason"),
    [
        ({"resourceVersion": "7"}, "no_watch_list"),
        ({"resourceVersion": "7", "annotations": []}, "no_watch_list"),
        ({"annotations": {"k8s.io/initial-events-end": "true"}}, "malformed"),
    ],
)
def test_bookmarks_that_end_no_list(meta: dict[str, Any], reason: str) -> None:
    event = {"type": "BOOKMARK", "object": {"metadata": meta}}
    with pytest.raises(ApiError) as caught:
        initial_end(decode_event(msgspec.json.encode(event)))
    assert caught.value.reason == reason


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
