"""`make demo`: a small cluster on this machine, and what steersman does for it, step by step."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).parent))
from demo_cluster import CLIENT, NODE, POD_CIDR, PODS, Cluster, Pod, Stop, ask, missing, signals

WEB, CART, NODE_PORT = "10.96.0.10", "10.96.0.20", 30080
MANIFESTS = Path(__file__).parents[1] / "demo"
STEERSMAN = [sys.executable, "-m", "steersman"]
BOLD, GREEN, DIM = "1", "32", "2"
COLOURS = {"pod-1": "36", "pod-2": "33", "pod-3": "35"}

PICTURE = f"""
      client {CLIENT}            (outside the cluster)
        |
    ----+---------------------------+----------------
        |                           |
      node-a {NODE}            node-b 192.0.2.2
      steersman runs here           |
        |          |                |
      pod-1      pod-2            pod-3
      10.244.1.11  10.244.1.12    10.244.2.13
"""


class Demo:
    """The steps, in order; each says what it shows and checks that it is so."""

    def __init__(self, cluster: Cluster, manifests: Path) -> None:
        self._cluster = cluster
        self._manifests = manifests
        self._number = 0
        self._before = ""  # the EndpointSlices, with all pods
        self._flags = ["--hostname-override", "node-a", "--cluster-cidr", POD_CIDR]

    def play(self) -> None:
        """Show everything."""
        self._step("A cluster in network namespaces of this machine")
        self._cluster.build()
        say(PICTURE)
        self._start_steersman()
        self._cluster_ip()
        self._node_port()
        self._affinity()
        self._pod_goes_away()
        self._switch()
        self._pod_comes_back()
        self._explain()

    def _step(self, title: str) -> None:
        self._number += 1
        say(paint(f"\n{self._number}. {title}", BOLD))

    def _start_steersman(self) -> None:
        self._step("steersman reads two Services from demo/ and writes node-a's rules (iptables)")
        argv = [*STEERSMAN, "run", "--manifests", str(self._manifests), *self._flags]
        say(paint("   $ steersman run --manifests demo/ " + " ".join(self._flags), DIM))
        begun = time.monotonic()
        log = (self._manifests.parent / "steersman.log").open("wb")
        with log:
            process = self._cluster.start("node-a", "steersman", argv, log)
        self._until(lambda: self._rules("KUBE-SEP") > 0, process)
        took = time.monotonic() - begun
        say(f"   after {took:.1f} s there are {self._rules('KUBE-')} rules; they stay when it ends")

    def _until(
        self, condition: Callable[[], bool], process: subprocess.Popen[bytes] | None = None
    ) -> None:
        deadline = time.monotonic() + 15
        while not condition():
            if time.monotonic() > deadline or (process and process.poll() is not None):
                log = (self._manifests.parent / "steersman.log").read_text()
                raise RuntimeError(f"steersman did not do its work; it says:\n{log}")
            time.sleep(0.005)

    def _rules(self, word: str) -> int:
        """Number of rules on node-a with a word in them."""
        argv = self._cluster.argv("node-a", ["iptables-save"])
        done = subprocess.run(argv, capture_output=True, text=True, check=True)
        return sum(word in line for line in done.stdout.splitlines() if line.startswith("-A"))

    def _ask(self, name: str, address: str, port: int, times: int) -> Counter[tuple[str, str]]:
        work = lambda: Counter(ask(address, port) for _ in range(times))  # noqa: E731
        return self._cluster.inside(name, work)

    def _cluster_ip(self) -> None:
        self._step(f"pod-1 makes 90 connections to the Service shop/web, {WEB}:80")
        answers = self._ask("pod-1", WEB, 80, 90)
        chart(Counter({pod: answers_of(answers, pod) for pod in names()}))
        expect(all(answers_of(answers, pod) for pod in names()), "some pod got no connection")
        say("   (pod-1 reaches itself, too; node-b needs no steersman for this)")

    def _node_port(self) -> None:
        self._step(f"The client outside makes 90 connections to node-a, {NODE}:{NODE_PORT}")
        answers = self._ask("client", NODE, NODE_PORT, 90)
        chart(Counter({pod: answers_of(answers, pod) for pod in names()}))
        expect(all(answers_of(answers, pod) for pod in names()), "some pod got no connection")
        seen = ", ".join(sorted({address for _, address in answers}))
        say(f"   (the pods see a node-a address, {seen}, so that answers come back this way)")

    def _affinity(self) -> None:
        self._step(f"shop/cart, {CART}:80, has session affinity: 30 connections of each pod")
        for pod in PODS[:2]:
            answers = self._ask(pod.name, CART, 80, 30)
            (chosen,) = {name for name, _ in answers} if len(answers) == 1 else {""}
            expect(bool(chosen), f"{pod.name} was sent to several pods")
            say(f"   {pod.name} -> {chosen} 30 times")

    def _pod_goes_away(self) -> None:
        gone = PODS[2]
        self._step(f"{gone.name} is removed from the manifest while pod-1 keeps connecting")
        load = Load(self._cluster, "pod-1", WEB, 80)
        try:
            load.start()
            time.sleep(1.2)  # steersman syncs at most once a second: let it come to rest
            begun = time.monotonic()
            self._before = change_endpoints(self._manifests / "endpointslices.yaml", gone)
            self._until(lambda: not self._rules(gone.address))
            changed = time.monotonic()
            self._cluster.stop(gone.name)
            self._until(lambda: load.count(changed) >= 300)
        finally:
            load.stop()
        say(f"   {(changed - begun) * 1000:.0f} ms later no rule leads to it, and its process ends")
        say(f"   connections before the change: {len(load.answers) - load.count(changed)}")
        failed = paint(f"failed: {load.count(changed, '')}", GREEN)
        say(f"   connections after it: {load.count(changed)}, {failed}")
        chart(Counter({pod: load.count(changed, pod) for pod in names()}))
        expect(not load.count(changed, ""), "connections failed")
        expect(not load.count(changed, gone.name), f"{gone.name} still got connections")

    def _switch(self) -> None:
        self._step("steersman changes from iptables to nftables while pod-1 keeps connecting")
        words = ["switch", "--to", "nftables", "--watch-for", "1s"]
        say(paint(f"   $ steersman {' '.join(words)}", DIM))
        load = Load(self._cluster, "pod-1", WEB, 80)
        try:
            load.start()
            argv = self._cluster.argv("node-a", [*STEERSMAN, *words])
            done = subprocess.run(argv, capture_output=True, text=True, check=False)
        finally:
            load.stop()
        expect(done.returncode == 0, done.stdout + done.stderr)
        say("\n".join(f"   | {line}" for line in done.stdout.splitlines()))
        failed = paint(f"failed: {load.count(0, '')}", GREEN)
        say(f"   connections meanwhile: {load.count(0)}, {failed}")
        expect(not load.count(0, ""), "connections failed")

    def _pod_comes_back(self) -> None:
        back = PODS[2]
        self._step(f"{back.name} runs again, and the manifest has it again")
        self._cluster.serve(back)
        load = Load(self._cluster, "pod-1", WEB, 80)
        try:
            load.start()
            self._until(lambda: load.count(0) > 0)
            begun = time.monotonic()
            replace_file(self._manifests / "endpointslices.yaml", self._before)
            self._until(lambda: load.count(begun, back.name) > 0)
        finally:
            load.stop()
        first = next(at for at, who in load.answers if at >= begun and who == back.name)
        say(f"   {(first - begun) * 1000:.0f} ms later it gets its first connection: nftables maps")
        say("   are changed by elements, iptables chains by a restore, once a second at most")
        expect(not load.count(0, ""), "connections failed")

    def _explain(self) -> None:
        self._step("Why? steersman explains where a packet goes, from the same manifests")
        to = ["--from", "external", "--to", f"{NODE}:{NODE_PORT}"]
        say(paint(f"   $ steersman explain --manifests demo/ {' '.join(to)}", DIM))
        argv = [*STEERSMAN, "explain", "--manifests", str(self._manifests), *self._flags, *to]
        argv = self._cluster.argv("node-a", argv)
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        expect(done.returncode == 0, done.stderr)
        say("\n".join(f"   | {line}" for line in done.stdout.splitlines()))


class Load:
    """New connections without a pause, from one namespace, until stopped."""

    def __init__(self, cluster: Cluster, name: str, address: str, port: int) -> None:
        self.answers: list[tuple[float, str]] = []
        """When each connection was begun, and which pod answered; "" where it failed."""
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=cluster.inside,
            args=(name, lambda: self._connect(address, port)),
            daemon=True,
        )

    def _connect(self, address: str, port: int) -> None:
        while not self._stop.is_set():
            begun = time.monotonic()
            try:
                pod, _ = ask(address, port)
            except OSError:
                pod = ""
            self.answers.append((begun, pod))

    def count(self, since: float, pod: str | None = None) -> int:
        """Connections begun since a moment, of all pods or of one."""
        return sum(at >= since and pod in (None, who) for at, who in list(self.answers))

    def start(self) -> None:
        with signals.held():  # a thread that is interrupted while it begins raises KeyError
            self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread.ident:
            self._thread.join()


def names() -> list[str]:
    return [pod.name for pod in PODS]


def answers_of(answers: Counter[tuple[str, str]], pod: str) -> int:
    return sum(count for (name, _), count in answers.items() if name == pod)


def change_endpoints(path: Path, gone: Pod) -> str:
    """Take a pod out of all slices of a file; return the text that it had."""
    before = path.read_text()
    slices = list(yaml.safe_load_all(before))
    for each in slices:
        each["endpoints"] = [e for e in each["endpoints"] if gone.address not in e["addresses"]]
    replace_file(path, yaml.safe_dump_all(slices))
    return before


def replace_file(path: Path, text: str) -> None:
    """Write a file as an editor does: write beside it, then rename."""
    new = path.with_name(".new")
    new.write_text(text)
    new.rename(path)


def chart(counts: Counter[str]) -> None:
    total = counts.total() or 1
    for name in names():
        bar = paint("#" * round(45 * counts[name] / total), COLOURS[name])
        say(f"   {name}  {counts[name]:4}  {bar}")


def paint(text: str, code: str) -> str:
    """Return a text in a colour if a person looks at it (https://no-color.org)."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        return text
    return f"\x1b[{code}m{text}\x1b[0m"


def expect(truth: bool, otherwise: str) -> None:
    if not truth:
        raise RuntimeError(otherwise)


def say(text: str) -> None:
    print(text, flush=True)


def main() -> int:
    """Play the demo; clean up whatever happens. Returns the exit status."""
    if reason := missing("make demo"):
        print(reason, file=sys.stderr)
        return 1
    begun = time.monotonic()
    signals.watch()
    cluster = Cluster()
    with tempfile.TemporaryDirectory(prefix="sm-demo-") as directory:
        manifests = Path(directory) / "demo"  # a copy: one step edits it
        shutil.copytree(MANIFESTS, manifests)
        try:
            Demo(cluster, manifests).play()
        except Stop as why:
            say(f"\nstopped by {why}")
            return 130
        except RuntimeError as error:
            print(f"\nthe demo failed: {error}", file=sys.stderr)
            return 1
        finally:
            signals.ignore()
            cluster.close()
            say(f"\nAll cleaned up, after {time.monotonic() - begun:.0f} s.")
    say("`make demo-ui` keeps such a cluster running, and shows it on pages in a browser.")
    if sys.stdin.isatty():
        signals.default()
        if input("Show it now? [y/N] ").strip().lower() in ("y", "yes"):
            script = Path(__file__).with_name("demo_ui.py")
            os.execv(sys.executable, [sys.executable, str(script)])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
