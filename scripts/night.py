"""A night of an operator, as a terminal recording: docs/night.cast (asciinema's format).

    python scripts/night.py [FILE]      as root; `asciinema play docs/night.cast` shows it

Everything is real: a small cluster in network namespaces, steersman in iptables mode, and a
firewall agent that flushes its rules. Only the time that people need to type and to read is added.
"""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from demo_cluster import POD_CIDR, Cluster

ROOT = Path(__file__).parents[1]
WIDTH, HEIGHT = 110, 32
TYPING, READING = 0.07, 0.022
"""Seconds for a character that is typed, and for one that is read."""
PROMPT = "\x1b[1;32mnode-a\x1b[0m# "
ASK = "timeout 2 bash -c 'cat < /dev/tcp/10.96.0.10/80'"
STEERSMAN = [sys.executable, "-m", "steersman"]


class Recording:
    """The events of a terminal, on a clock of its own."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._events: list[tuple[float, str]] = []

    def show(self, text: str) -> None:
        """Add output at the present time."""
        self._events.append((self.seconds, text.replace("\r\n", "\n").replace("\n", "\r\n")))

    def type(self, text: str) -> None:
        """Add a line as somebody types it, behind the prompt."""
        self.show(PROMPT)
        self.seconds += 1.0
        for letter in text:
            self.seconds += TYPING
            self.show(letter)
        self.seconds += 0.4
        self.show("\n")

    def read(self, text: str) -> None:
        """Let time pass for the audience to read."""
        self.seconds += max(2.5, READING * len(text))

    def save(self, path: Path) -> None:
        """Write the recording."""
        header = {"version": 2, "width": WIDTH, "height": HEIGHT, "title": "A night with steersman"}
        lines = [json.dumps(header), *(json.dumps([round(t, 3), "o", x]) for t, x in self._events)]
        path.write_text("\n".join(lines) + "\n")


class Night:
    """The plot. Each step returns what was printed, for the checks."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self._cluster = cluster
        self._folder = folder
        self.recording = Recording()
        self.printed: dict[str, tuple[int, str]] = {}
        """Exit status and output by command line; of a repeated one, the last."""

    def play(self) -> None:
        """Play everything."""
        self._start()
        self._say(
            "03:12. The shop's web page is down, says the pager. First: the proxy of this node."
        )
        self._run("steersman status")
        self._until("shop/web fails", self._fails)
        self._say("It runs. Does the Service answer?")
        self._run(ASK)
        self._run(ASK)
        self._say("No. What is known about the Service?")
        self._run("steersman explain --from node --to shop/web")
        self._say("So the plan is right. What does the kernel do? Ask the doctor.")
        self._run("steersman doctor shop/web")
        self._say("Somebody flushes our rules. Who, and how often?")
        self._run("steersman drift", until=1)
        self._say("The firewall agent belongs to another team, asleep until nine.")
        self._say("nftables mode has a table that the agent does not know. What would change?")
        self._run("steersman plan --proxy-mode nftables")
        self._say("Established connections stay. Check first, then do it.")
        self._run("steersman switch nftables --dry-run")
        self._run("steersman switch nftables")
        self._say("Does the Service answer now, with the agent still running?")
        for _ in range(3):
            self._run(ASK)
        self._run("steersman trace node shop/web:http")
        self._run("steersman doctor shop/web")
        self._run("steersman status")
        self._run("steersman services")
        self._say(
            "Good. A note for the other team, the mode into the configuration file, and to bed."
        )

    def _start(self) -> None:
        manifests = self._folder / "manifests"
        manifests.mkdir()
        for path in (ROOT / "demo").glob("*.yaml"):
            (manifests / path.name).write_text(path.read_text())
        self._cluster.build()
        argv = [*STEERSMAN, "run", "--proxy-mode=iptables", "--hostname-override=node-a"]
        argv += [f"--manifests={manifests}", f"--cluster-cidr={POD_CIDR}"]
        argv += ["--iptables-sync-period=5s"]  # the comparisons that notice the agent
        log = (self._folder / "log").open("wb")
        with log:
            self._cluster.start("node-a", "steersman", argv, log)
        self._until("shop/web answers", lambda: not self._fails())
        agent = "while :; do iptables -t nat -F; sleep 0.5; done"
        self._cluster.start("node-a", "agent", ["sh", "-c", agent], subprocess.DEVNULL)

    def _fails(self) -> bool:
        argv = self._cluster.argv("node-a", ["sh", "-c", ASK])
        return subprocess.run(argv, capture_output=True, check=False).returncode != 0

    def _until(self, what: str, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            if time.monotonic() > deadline:
                raise RuntimeError(f"not so: {what}\n{(self._folder / 'log').read_text()}")
            time.sleep(0.05)

    def _say(self, text: str) -> None:
        self.recording.type(f"# {text}")
        self.recording.seconds += 1.5

    def _run(self, line: str, until: int | None = None) -> None:
        """Run a command on a terminal of its own, and record what it prints when it does.

        Args:
            line: the command.
            until: the exit status with which it ends, sooner or later: the rules are there for half
                a second of each five.
        """
        for _ in range(20):
            status = self._run_once(line)
            if until in (None, status):
                return
        raise RuntimeError(f"{line} never exits with {until}:\n{self.printed[line][1]}")

    def _run_once(self, line: str) -> int:
        self.recording.type(line)
        words = line.split() if line.startswith("steersman") else ["sh", "-c", line]
        if words[0] == "steersman":
            words[:1] = STEERSMAN
        master, slave = pty.openpty()
        environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(WIDTH)}
        environment["LINES"] = str(HEIGHT)
        process = subprocess.Popen(
            self._cluster.argv("node-a", words),
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environment,
            cwd=ROOT,
            start_new_session=True,
        )
        os.close(slave)
        began, text = time.monotonic(), ""
        start = self.recording.seconds
        while True:
            ready, _, _ = select.select([master], [], [], 0.1)
            if ready:
                try:
                    piece = os.read(master, 65536).decode(errors="replace")
                except OSError:  # the last writer has closed the terminal
                    break
                text += piece
                self.recording.seconds = start + time.monotonic() - began
                self.recording.show(piece)
            elif process.poll() is not None:
                break
        os.close(master)
        status = process.wait()
        self.recording.seconds = start + time.monotonic() - began
        if text and not text.endswith("\n"):
            self.recording.show("\n")
        self.printed[line] = (status, text)
        self.recording.read(text)
        return status


def record(path: Path) -> Night:
    """Play the night and write the recording; return it for checks."""
    cluster = Cluster()
    with tempfile.TemporaryDirectory(prefix="sm-night-") as folder:
        night = Night(cluster, Path(folder))
        try:
            night.play()
        finally:
            cluster.close()
    night.recording.save(path)
    return night


if __name__ == "__main__":
    assert threading.current_thread() is threading.main_thread()
    record(Path(sys.argv[1]) if sys.argv[1:] else ROOT / "docs/night.cast")
