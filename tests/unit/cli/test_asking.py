"""Commands that only ask: help, the version, and how the running process is."""

from __future__ import annotations

import http.server
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from steersman import __version__
from steersman.cli.main import main
from steersman.run import mode_transition
from steersman.run.state import State, state_json


@pytest.mark.parametrize("command", [["cleanup"], ["status"], ["config", "show"], ["explain"]])
@pytest.mark.parametrize("flag", ["--help", "-h", "--version"])
def test_who_asks_for_help_or_the_version_gets_only_that(
    command: list[str],
    flag: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[object] = []
    monkeypatch.setattr(mode_transition, "clean_up", done.append)
    assert main([*command, flag]) == 0
    out, err = capsys.readouterr()
    asked = f"steersman {__version__}\n" if flag == "--version" else "Usage: steersman "
    assert (out.startswith(asked), err, done) == (True, "", [])


class _State(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"".join(state_json(State(mode="nftables"), None, 10.0, 0.0)))

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def answering() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _State)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_the_process_is_asked_directly_though_the_node_has_a_proxy(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # where nobody listens
    monkeypatch.delenv("no_proxy", raising=False)
    with answering() as address:
        assert main(["status", f"--metrics-bind-address={address}"]) == 0
    assert "nftables mode" in capsys.readouterr().out


def test_somebody_else_at_the_address_is_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def talk() -> None:
            other, _ = listener.accept()
            with other:
                other.recv(1000)
                other.sendall(b"SSH-2.0-none\r\n")

        thread = threading.Thread(target=talk)
        thread.start()
        assert main(["status", f"--metrics-bind-address=127.0.0.1:{port}"]) == 1
        thread.join()
    err = capsys.readouterr().err
    assert f"no answer from 127.0.0.1:{port}" in err
