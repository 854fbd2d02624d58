"""The client of the local socket: whatever a process sends, or does not, is a sentence."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from steersman.config import UsageError, parse_command_line
from steersman.model.switch import SwitchRequest
from steersman.operate.answer import QuestionError
from steersman.operate.client import Client, HungError
from steersman.operate.drift import find_drift
from steersman.operate.load import load_world
from steersman.operate.switch import switch
from steersman.operate.top import ask
from steersman.operate.top_model import Question

_LENGTH = b"content-length:"
STEP = b'{"name": "check", "text": "it can serve"}\n'


@contextmanager
def listening() -> Iterator[tuple[socket.socket, Client]]:
    name = f"steersman-client-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{name}")
        listener.listen(0)
        yield listener, Client(name)


@contextmanager
def process_that_answers(body: bytes) -> Iterator[Client]:
    """Answer one request so, and end."""
    with listening() as (listener, client):

        def serve() -> None:
            connection = listener.accept()[0]
            with connection, connection.makefile("rb") as request:
                headers = [line.lower().split() for line in iter(request.readline, b"\r\n")]
                request.read(sum(int(rest[0]) for key, *rest in headers if key == _LENGTH))
                connection.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + body)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield client
        finally:
            thread.join()


def to_ebpf(client: Client) -> Awaitable[object]:
    return switch(SwitchRequest("ebpf"), client=client)


@pytest.mark.parametrize("body", [b"", b"\x81\xa1a\x01", b'{"mode": 5}', b'{"new": "field"}\n'])
@pytest.mark.parametrize("question", [find_drift, lambda client: ask(Question(), client)])
async def test_an_answer_of_another_version_is_said_to_be_one(
    body: bytes, question: Callable[[Client], Awaitable[Any]]
) -> None:
    with (
        process_that_answers(body) as client,
        pytest.raises(QuestionError, match=r"is not understood .* another version"),
    ):
        await question(client)


@pytest.mark.parametrize("line", [b"{\n", b'{"name": 5}\n', b'{"outcome": "new"}\n'])
async def test_a_step_of_another_version_is_said_to_be_one(line: bytes) -> None:
    with (
        process_that_answers(STEP + line) as client,
        pytest.raises(QuestionError, match=r"is not understood .* another version"),
    ):
        await to_ebpf(client)


@pytest.mark.parametrize("rest", [b"", b'{"name": "ser'])
async def test_a_process_that_is_killed_in_the_middle_has_ended(rest: bytes) -> None:
    with (
        process_that_answers(STEP + rest) as client,
        pytest.raises(QuestionError, match="the process ended during the switch"),
    ):
        await to_ebpf(client)


async def test_a_stopped_process_with_many_clients_is_said_to_hang() -> None:
    with listening() as (listener, client), socket.socket(socket.AF_UNIX) as waiting:
        waiting.connect(listener.getsockname())
        with pytest.raises(QuestionError, match="accepts no connections: it is stopped, or hangs"):
            await asyncio.to_thread(client.get, "/status")


SERVER = """
import socket, sys, time
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1].replace("@", chr(0)))
listener.listen()
print("ready", flush=True)
time.sleep(600)
"""


@contextmanager
def process_that_sleeps(*flags: str) -> Iterator[tuple[subprocess.Popen[str], Client]]:
    """A process that serves the socket and answers nobody."""
    name = f"steersman-sleeps-{os.getpid()}"
    argv = [sys.executable, "-c", SERVER, f"@{name}", *flags]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        try:
            yield process, Client(name)
        finally:
            process.kill()


def stop(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)


def test_the_state_of_a_process_that_does_not_answer_is_said() -> None:
    with process_that_sleeps() as (process, client):
        with pytest.raises(HungError, match=r"it has used no CPU time for 5 s, state S") as hung:
            client.get("/world")
        assert hung.value.pid == process.pid
        stop(process)
        with pytest.raises(HungError, match=rf"pid {process.pid}\) does not answer: it is stopped"):
            client.get("/status")


async def test_the_flags_of_a_process_that_does_not_answer_name_the_world(tmp_path: Path) -> None:
    manifests = tmp_path / "objects.yaml"
    manifests.write_text("")
    flags = f"--manifests={manifests}", "--hostname-override=node-b", "--proxy-mode=userspace"
    with process_that_sleeps(*flags) as (process, client):
        stop(process)
        world = await load_world(parse_command_line([]), client)
        with pytest.raises(UsageError, match="--cluster-cidr is for --manifests and --kubeconfig"):
            await load_world(parse_command_line(["--cluster-cidr=10.0.0.0/8"]), client)
    assert (world.mode, world.config.node_name) == ("userspace", "node-b")
    assert f"(pid {process.pid}) does not answer: it is stopped" in world.origin.hung
    assert world.origin.text == f"the manifests in {manifests}, since {world.origin.hung}"
    with process_that_sleeps("--unknown") as (process, client):
        stop(process)
        with pytest.raises(HungError, match="it is stopped"):
            await load_world(parse_command_line([]), client)
