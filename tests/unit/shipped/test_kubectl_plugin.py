"""The kubectl plugin, with a kubectl that answers from a script."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from contextlib import suppress
from itertools import accumulate
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[3]
PLUGIN = ROOT / "deploy/krew/kubectl-steersman"
KUBECTL = """#!/bin/sh
printf "%s\\n" "$*" >>"$0.log"
case "$*" in
*"get pods"*) printf 'node-b\\tkube-system\\tsm-b\\nnode-a\\tkube-system\\tsm-a\\n' ;;
*"get pod --namespace shop web-1"*) printf node-b ;;
*"get pod "*) echo "not found" >&2; exit 1 ;;
*sm-a*json*) echo '{"ok": true}' ;;
*sm-b*json*) echo '{"ok": false}'; exit 1 ;;
*sm-a*) echo "answer of a" ;;
*sm-b*) echo "answer of b"; exit 1 ;;
esac
"""


class Plugin:
    def __init__(self, folder: Path) -> None:
        self.kubectl = folder / "kubectl"
        self.kubectl.write_text(KUBECTL)
        self.kubectl.chmod(0o755)

    def run(self, *words: str, **environment: str) -> tuple[int, str, str]:
        done = subprocess.run(
            ["sh", str(PLUGIN), *words],
            env={"PATH": "/usr/bin:/bin", "KUBECTL": str(self.kubectl), **environment},
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout, done.stderr

    @property
    def calls(self) -> list[str]:
        return Path(f"{self.kubectl}.log").read_text().splitlines()


@pytest.fixture
def plugin(tmp_path: Path) -> Plugin:
    return Plugin(tmp_path)


@pytest.mark.parametrize("words", [["status"], ["connections", "shop/web"]])
def test_a_question_about_the_cluster_goes_to_every_node(plugin: Plugin, words: list[str]) -> None:
    status, out, _ = plugin.run(*words)
    assert status == 1  # the worst
    assert out.splitlines() == ["node node-a:", "  answer of a", "node node-b:", "  answer of b"]


def test_json_of_every_node_is_one_document(plugin: Plugin) -> None:
    status, out, _ = plugin.run("status", "-o", "json")
    assert (status, json.loads(out)) == (1, {"node-a": {"ok": True}, "node-b": {"ok": False}})


def test_the_node_of_the_client_is_asked(plugin: Plugin) -> None:
    status, out, err = plugin.run("explain", "--from", "shop/web-1", "--to", "shop/cart")
    assert (status, out, err) == (1, "answer of b\n", "node node-b:\n")
    assert plugin.calls[-1].endswith(
        "sm-b --container steersman -- steersman explain --from shop/web-1 --to shop/cart"
    )


def test_a_node_can_be_named(plugin: Plugin) -> None:
    assert plugin.run("--node", "node-b", "services")[1] == "answer of b\n"
    assert plugin.run("services")[1] == "answer of a\n"
    assert plugin.run("--all-nodes", "services")[1].count("answer") == 2


def test_flags_of_kubectl_reach_every_call(plugin: Plugin) -> None:
    plugin.run("--context", "prod", "--kubeconfig=/k", "explain", "shop/web")
    assert plugin.calls
    assert all(call.startswith("--context=prod --kubeconfig=/k ") for call in plugin.calls)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--node", "node-c", "status"), "no pod of steersman runs on node node-c"),
        (("explain", "--from", "shop/gone"), "the pod shop/gone cannot be read"),
        (("--nonsense", "status"), "unknown flag --nonsense"),
        (("--node", "a", "--all-nodes", "status"), "not both"),
        (("status", "--watch"), "--watch shows one node: give --node NODE"),
    ],
)
def test_failures_say_why(plugin: Plugin, words: tuple[str, ...], message: str) -> None:
    status, out, err = plugin.run(*words)
    assert (status, out) == (2, "")
    assert message in err


MANY_NODES = """#!/bin/sh
case "$*" in
*"get pods"*)
    for number in $(seq 40); do printf 'node-%s\\tkube-system\\tsm-%s\\n' $number $number; done ;;
*)
    echo begin >>"$0.log"
    until [ "$(grep -c begin "$0.log")" -ge 16 ]; do sleep 0.02; done
    echo end >>"$0.log"
esac
"""


def test_sixteen_nodes_are_asked_at_a_time(plugin: Plugin) -> None:
    plugin.kubectl.write_text(MANY_NODES)
    status, out, _ = plugin.run("status")
    assert (status, len(out.splitlines())) == (0, 40)
    at_once = list(accumulate(1 if each == "begin" else -1 for each in plugin.calls))
    assert (max(at_once), at_once[-1]) == (16, 0)


SILENT_NODES = """#!/bin/sh
case "$*" in
*"get pods"*) printf 'node-a\\tkube-system\\tsm-a\\nnode-b\\tkube-system\\tsm-b\\n' ;;
*) echo $$ >>"$0.log"; exec sleep 600 ;;
esac
"""


def runs(pid: str) -> bool:
    try:
        return Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_an_interrupt_ends_all_of_it_and_leaves_no_file(plugin: Plugin, tmp_path: Path) -> None:
    plugin.kubectl.write_text(SILENT_NODES)
    log, temporary = Path(f"{plugin.kubectl}.log"), tmp_path / "temporary"
    temporary.mkdir()
    with subprocess.Popen(
        ["env", "--default-signal=INT", "sh", str(PLUGIN), "status"],
        env={"PATH": "/usr/bin:/bin", "KUBECTL": str(plugin.kubectl), "TMPDIR": str(temporary)},
        start_new_session=True,  # as a terminal does it
        stdout=subprocess.PIPE,
    ) as process:
        try:
            while not log.exists() or len(log.read_text().splitlines()) < 2:
                assert process.poll() is None
            asked = plugin.calls
            assert all(map(runs, asked))
            os.killpg(process.pid, signal.SIGINT)
            assert process.communicate(timeout=60)[0] == b""
            while any(map(runs, asked)):
                time.sleep(0.01)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 130
    assert list(temporary.iterdir()) == []


def test_help_is_the_head_of_the_script(plugin: Plugin) -> None:
    status, out, _ = plugin.run("--help")
    assert status == 0
    assert "kubectl steersman [--node NODE | --all-nodes]" in out
    assert plugin.run()[0] == 2


def test_the_manifest_names_the_archive(tmp_path: Path) -> None:
    url = "https://example.org/kubectl-steersman.tar.gz"
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        script = str(ROOT / "scripts/krew.py")
        subprocess.run([sys.executable, script, url, str(folder)], check=True)
    (path,) = folders[0].glob("*.tar.gz")
    assert path.read_bytes() == (folders[1] / path.name).read_bytes()
    manifest = yaml.safe_load((folders[0] / "steersman.yaml").read_text())
    (platform,) = manifest["spec"]["platforms"]
    assert platform["uri"] == url
    assert platform["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    with tarfile.open(path) as tar:
        assert tar.getmember(platform["bin"]).mode & 0o111
        assert "LICENSE" in tar.getnames()
