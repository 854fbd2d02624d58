from __future__ import annotations

import asyncio
import base64
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from steersman.host.exec import Exec, Result
from steersman.source.credentials import CredentialError, Credentials
from steersman.source.kubeconfig import ClusterAccess, ExecPlugin
from steersman.source.tls import KeyPair
from tests.support.modes.scripted import OnLoop

V1 = "client.authentication.k8s.io/v1"


class FakeExec(OnLoop):
    def __init__(self, answers: Sequence[Any]) -> None:
        self.answers = list(answers)
        self.environment: Mapping[str, str] = {}
        self.runs: list[tuple[str, ...]] = []

    def make(self, environment: Mapping[str, str]) -> Exec:
        self.environment = environment
        return self

    async def run(
        self, argv: Sequence[str], stdin: bytes = b"", *, timeout: float = 60.0
    ) -> Result:
        self.runs.append(tuple(argv))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer if isinstance(answer, Result) else Result(0, answer, b"")


def credential(**status: str) -> bytes:
    value = {"apiVersion": V1, "kind": "ExecCredential", "status": status}
    return json.dumps(value).encode()


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000_000.0

    def __call__(self) -> float:
        return self.now


def plugged(clock: Clock, *answers: Any) -> tuple[Credentials, FakeExec]:
    plugin = ExecPlugin("get", ("a",), {"X": "1"}, install_hint="apt install get")
    fake = FakeExec(answers)
    access = ClusterAccess(servers=("http://x",), exec_plugin=plugin)
    return Credentials(access, fake.make, clock), fake


async def test_a_plugin_is_asked_once_until_its_credential_expires() -> None:
    clock = Clock()
    first = credential(token="one", expirationTimestamp="2001-09-09T02:46:40Z")  # 3600 s later
    credentials, fake = plugged(clock, first, credential(token="two"))
    for _ in range(3):
        assert await credentials.headers() == [("Authorization", "Bearer one")]
    assert fake.runs == [("get", "a")]
    assert fake.environment["X"] == "1"
    request = json.loads(fake.environment["KUBERNETES_EXEC_INFO"])
    assert request == {"apiVersion": V1, "kind": "ExecCredential", "spec": {"interactive": False}}
    clock.now += 3595  # within the margin
    assert await credentials.headers() == [("Authorization", "Bearer two")]


@pytest.mark.parametrize("later", [60.0, -8 * 3600.0])  # the clock may be set back
async def test_a_refused_credential_is_asked_for_again_but_not_at_once(later: float) -> None:
    clock = Clock()
    credentials, fake = plugged(clock, credential(token="one"), credential(token="two"))
    await credentials.headers()
    credentials.refused()
    assert await credentials.headers() == [("Authorization", "Bearer one")]
    clock.now += later
    credentials.refused()
    assert await credentials.headers() == [("Authorization", "Bearer two")]
    assert len(fake.runs) == 2


async def test_a_plugin_can_give_a_certificate() -> None:
    answer = credential(clientCertificateData="C", clientKeyData="K")
    credentials, _ = plugged(Clock(), answer)
    assert await credentials.key_pair() == KeyPair(b"C", b"K")
    assert await credentials.headers() == []


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (FileNotFoundError(), "no such program; apt install get"),
        (TimeoutError("did not end"), "did not end"),
        (Result(3, b"", b"log in\nfirst"), "ended with status 3: log in first"),
        (b"<html>", "not an ExecCredential"),
        (b'{"apiVersion": "v9", "kind": "ExecCredential"}', "got v9 ExecCredential"),
        (credential(), "neither a token nor a certificate"),
        (credential(token="t", clientCertificateData="C"), "must come together"),
        (credential(token="t", expirationTimestamp="soon"), "not an ExecCredential"),
    ],
)
async def test_what_a_plugin_can_do_wrong(answer: Any, words: str) -> None:
    credentials, _ = plugged(Clock(), answer)
    with pytest.raises(CredentialError, match=words):
        await credentials.headers()


class SlowExec(FakeExec):
    """Answers once `end` is set."""

    def __init__(self, answers: Sequence[Any]) -> None:
        super().__init__(answers)
        self.end = asyncio.Event()

    async def run(
        self, argv: Sequence[str], stdin: bytes = b"", *, timeout: float = 60.0
    ) -> Result:
        self.end.clear()
        await self.end.wait()
        return await super().run(argv, stdin, timeout=timeout)


async def test_all_that_wait_for_a_plugin_share_its_failure() -> None:
    """Or a plugin that hangs would hold up each kind for a minute, one after the other."""
    fake = SlowExec([TimeoutError("did not end"), credential(token="one")])
    access = ClusterAccess(servers=("http://x",), exec_plugin=ExecPlugin("get"))
    credentials = Credentials(access, fake.make, Clock())
    waiting = [asyncio.create_task(credentials.headers()) for _ in range(4)]
    await asyncio.sleep(0)
    fake.end.set()
    failures = await asyncio.gather(*waiting, return_exceptions=True)
    assert [str(each) for each in failures] == ["exec plugin get: did not end"] * 4
    assert len(fake.runs) == 1
    later = asyncio.create_task(credentials.headers())
    await asyncio.sleep(0)
    fake.end.set()
    assert await later == [("Authorization", "Bearer one")]


async def test_a_plugin_that_writes_without_end_is_killed() -> None:
    plugin = ExecPlugin("yes", ("x" * 1000,))
    credentials = Credentials(ClusterAccess(servers=("http://x",), exec_plugin=plugin))
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(CredentialError, match="it wrote more than 1048576 bytes"):
        await credentials.headers()
    assert set(os.listdir("/proc/self/fd")) <= before


async def test_a_token_file_beats_the_token_and_keeps_the_last_one(tmp_path: Path) -> None:
    path = tmp_path / "token"
    access = ClusterAccess(servers=("http://x",), token="old", token_file=str(path))
    credentials = Credentials(access)
    for text, wanted in ((None, "old"), ("new\n", "new"), ("", "new"), ("newer", "newer")):
        if text is not None:
            path.write_text(text)
        assert await credentials.headers() == [("Authorization", f"Bearer {wanted}")]
    path.unlink()
    assert await credentials.headers() == [("Authorization", "Bearer newer")]


async def test_a_token_beats_a_password() -> None:
    access = ClusterAccess(servers=("http://x",), token="t", username="u", password="p")
    assert await Credentials(access).headers() == [("Authorization", "Bearer t")]
    basic = Credentials(ClusterAccess(servers=("http://x",), username="u", password="p"))
    word = base64.b64encode(b"u:p").decode()
    assert await basic.headers() == [("Authorization", f"Basic {word}")]
