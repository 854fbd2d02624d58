"""`make demo-ui`: the demo's cluster keeps running with traffic, and pages show it until Ctrl-C."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).parent))
from demo_cluster import NODE, POD_CIDR, SECOND_NODE, Cluster, Stop, ask, missing, signals

MANIFESTS = Path(__file__).parents[1] / "demo"
STEERSMAN = [sys.executable, "-m", "steersman"]
PORT, STATE_PORT = 8470, 10270
MODES = {"node-a": "nftables", "node-b": "iptables"}
ADDRESSES = {"node-a": NODE, "node-b": SECOND_NODE}
TRAFFIC = (
    # From, to, port, connections a second.
    ("pod-1", "10.96.0.10", 80, 12),
    ("pod-1", "10.96.0.20", 80, 4),
    ("pod-2", "10.96.0.30", 80, 8),
    ("pod-2", "10.96.0.40", 80, 2),
    ("pod-3", "10.96.0.10", 80, 6),
    ("client", NODE, 30080, 6),
    ("client", SECOND_NODE, 30080, 4),
    ("client", SECOND_NODE, 30050, 2),
)
FLIP = 15.0
"""Seconds between two changes of a pod's readiness."""


class DemoUi:
    """Two nodes that run steersman, their traffic, and the server of the pages."""

    def __init__(self, cluster: Cluster, folder: Path, port: int) -> None:
        self._cluster = cluster
        self._folder = folder
        self._listening = socket.create_server(("127.0.0.1", port))
        self._port: int = self._listening.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}/"
        self._manifests = folder / "demo"
        self._token = folder / "token"
        self._stop = threading.Event()

    def start(self) -> None:
        """Make everything, and return when the pages can be opened."""
        shutil.copytree(MANIFESTS, self._manifests)
        (self._manifests / "ui" / "world.yaml").rename(self._manifests / "world.yaml")
        self._token.write_text(secrets.token_urlsafe(24))
        self._cluster.build()
        for node, mode in MODES.items():
            flags = ["--hostname-override", node, "--cluster-cidr", POD_CIDR]
            flags += ["--proxy-mode", mode, "--manifests", str(self._manifests)]
            flags += ["--state-bind-address", f"{ADDRESSES[node]}:{STATE_PORT}"]
            flags += ["--state-token-file", str(self._token)]
            self._start(node, "steersman-" + node, ["run", *flags])
        nodes = [f"--node={n}=http://{a}:{STATE_PORT}" for n, a in ADDRESSES.items()]
        flags = ["--token-file", str(self._token), "--listen", f"127.0.0.1:{self._port}"]
        ui = self._start("client", "ui", ["ui", *nodes, *flags])
        # The pages are served in the client's namespace; a browser is in the machine's.
        self._until_served(ui)
        self._in_background(lambda: asyncio.run(relay(self._listening, self._connect)))
        for name, address, port, rate in TRAFFIC:
            load = partial(self._load, address, port, rate)
            self._in_background(partial(self._cluster.inside, name, load))
        self._in_background(self._flip)

    def close(self) -> None:
        """End the traffic; the cluster's `close` ends the processes."""
        self._stop.set()
        self._listening.close()

    def log(self) -> str:
        """What the processes have said so far."""
        return "\n".join(path.read_text() for path in sorted(self._folder.glob("*.log")))

    def _start(self, name: str, key: str, words: list[str]) -> subprocess.Popen[bytes]:
        with (self._folder / f"{key}.log").open("wb") as log:
            return self._cluster.start(name, key, [*STEERSMAN, *words], log)

    def _in_background(self, work: Callable[[], object]) -> None:
        threading.Thread(target=work, daemon=True).start()

    def _connect(self) -> socket.socket:
        """Connect to the server of the pages, from inside its namespace."""

        def connect() -> socket.socket | OSError:
            try:
                return socket.create_connection(("127.0.0.1", self._port), 5)
            except OSError as error:
                return error

        connected = self._cluster.inside("client", connect)
        if isinstance(connected, OSError):
            raise connected
        return connected

    def _until_served(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError):
                self._connect().close()
                return
            if time.monotonic() > deadline or process.poll() is not None:
                raise RuntimeError(f"the pages are not served; the processes say:\n{self.log()}")
            time.sleep(0.05)

    def _load(self, address: str, port: int, rate: int) -> None:
        """Connect again and again, so many times a second."""
        while not self._stop.wait(1 / rate):
            with contextlib.suppress(OSError):
                ask(address, port)

    def _flip(self) -> None:
        """Let a pod of shop/search become unready, and ready again."""
        path = self._manifests / "world.yaml"
        while not self._stop.wait(FLIP):
            objects = list(yaml.safe_load_all(path.read_text()))
            conditions = next(
                each["endpoints"][0]["conditions"]
                for each in objects
                if each["kind"] == "EndpointSlice" and each["metadata"]["name"] == "search-1"
            )
            conditions["ready"] = not conditions["ready"]
            new = path.with_name(".new")
            new.write_text(yaml.safe_dump_all(objects))
            new.rename(path)


async def relay(listening: socket.socket, connect: Callable[[], socket.socket]) -> None:
    """Pass each connection on to one that `connect` makes."""

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            inner = await asyncio.to_thread(connect)
        except OSError:
            writer.close()
            return
        far_reader, far_writer = await asyncio.open_connection(sock=inner)
        await asyncio.gather(pump(reader, far_writer), pump(far_reader, writer))

    async with await asyncio.start_server(pass_on, sock=listening) as server:
        await server.serve_forever()


def open_browser(url: str) -> None:
    """Open the page for the person at the screen, if there is one."""
    opener = shutil.which("xdg-open")
    if not opener or not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        return
    user = os.environ.get("SUDO_USER")  # browsers do not like to run as root
    argv = ["sudo", "--preserve-env", "--user", user, opener, url] if user else [opener, url]
    subprocess.Popen(
        argv, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def say(text: str) -> None:
    print(text, flush=True)


def main() -> int:
    """Run until a signal; clean up whatever happens. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=PORT, help="of the pages; 0 for any")
    arguments = parser.parse_args()
    if reason := missing("make demo-ui"):
        print(reason, file=sys.stderr)
        return 1
    signals.watch()
    cluster = Cluster()
    with tempfile.TemporaryDirectory(prefix="sm-demo-ui-") as folder:
        demo = None
        try:
            demo = DemoUi(cluster, Path(folder), arguments.port)
            say("Two nodes with steersman, three pods, nine Services and some traffic ...")
            demo.start()
            say(f"Open {demo.url} ; Ctrl-C ends everything.")
            open_browser(demo.url)
            while True:
                time.sleep(3600)
        except Stop as why:
            say(f"\nstopped by {why}")
        except (RuntimeError, OSError) as error:
            print(f"\nthe demo failed: {error}", file=sys.stderr)
            return 1
        finally:
            signals.ignore()
            if demo:
                demo.close()
            cluster.close()
            say("All cleaned up.")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
