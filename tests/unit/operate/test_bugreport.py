"""`steersman bugreport`: parts and their limits, and no secret in any of them."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from steersman.host.exec import Result, SubprocessExec
from steersman.operate import bugreport
from steersman.operate.answer import Line, QuestionError, Table
from steersman.operate.bugreport import TOOLS, describe_process, parts_of, write_report
from steersman.operate.client import Client, NotRunningError
from steersman.operate.secrets import REMOVED, safe_environment, safe_kubeconfig, without_secrets

PEM = "-----BEGIN PRIVATE KEY-----\nplantedKeyMaterial\n-----END PRIVATE KEY-----\n"
JWT = "eyJhbGciOiJSUzI1NiJ9.eyJwbGFudGVkIjoxfQ.plantedSignature"
KUBECONFIG = f"""
apiVersion: v1
kind: Config
current-context: here
clusters:
- name: prod
  cluster:
    server: https://planted-user:planted-password@192.0.2.1:6443
    certificate-authority-data: {base64.b64encode(PEM.encode()).decode()}
contexts:
- name: here
  context: {{cluster: prod, user: me}}
users:
- name: me
  user:
    token: planted-token
    password: planted-password
    client-key-data: {base64.b64encode(PEM.encode()).decode()}
    client-key: /etc/kubernetes/pki/key.pem
    auth-provider: {{name: oidc, config: {{id-token: planted-token}}}}
    exec:
      command: aws-iam-authenticator
      args: [planted-token]
      env: [{{name: A, value: planted}}]
"""
NAMES = (
    *("api-token", "PASSWD", "pass-passphrase", "clientSecret", "credential", "x-credentials"),
    *("apikey", "API-Key", "api_key", "privateKey", "private-key", "private_key"),
    *("client-key-data", "client_data"),
)
"""Of values that are secrets."""
PLANTED = ("planted", "cGxhbnRlZ", "LS0tLS1CRUdJTiB")
"""Parts of every secret, also in base64."""


class PlantedClient(Client):
    """A running process whose pages have secrets."""

    def __init__(self, pid: int, kubeconfig: str) -> None:
        super().__init__()
        self._pid, self._kubeconfig = pid, kubeconfig

    def server_pid(self) -> int:
        return self._pid

    def get(self, path: str) -> bytes:
        if path == "/configz":
            connection = {"kubeconfig": self._kubeconfig, "clientSecret": "planted"}
            return json.dumps({"kubeproxy": {"clientConnection": connection}}).encode()
        if path == "/history":
            return json.dumps({"said": f"GET https://a:planted@b/ Bearer {JWT}"}).encode()
        raise NotRunningError("no steersman runs in this network namespace")


class PlantedTools(SubprocessExec):
    """Prints rules with secrets, unless a tool is to fail."""

    async def run(
        self, argv: Sequence[str], stdin: bytes = b"", *, timeout: float = 60.0
    ) -> Result:
        del stdin, timeout
        if argv[0] == "ipset":
            raise FileNotFoundError(2, "No such file or directory", "ipset")
        if argv[0] == "ss":
            return Result(1, b"", b"password: planted-in-a-message")
        if argv[0] == "iptables-nft-save":
            return Result(0, b"# api-token: planted\n*nat\n:PREROUTING ACCEPT [0:0]\nCOMMIT\n", b"")
        if argv[-1] == "gone":
            return Result(1, b"", b"Error: No such file or directory")
        return Result(0, f"a rule of {argv[0]} # api-token: planted\n{PEM}".encode(), b"")


@pytest.fixture
def process() -> Iterator[int]:
    """A process with secrets in its environment and on its command line."""
    words = ["-c", "import sys; print(1, flush=True); sys.stdin.read()", "--token=planted-token"]
    environment = {"AWS_SECRET_ACCESS_KEY": "planted", "STEERSMAN_URL": "http://a:planted@b"}
    with subprocess.Popen(
        [sys.executable, *words, "--password", "planted-password"],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()  # the words are its own by now
        yield child.pid
        child.kill()


def tables_of_nft() -> list[tuple[str, str]]:
    return [("ip", "nat"), ("ip6", "nat"), ("inet", "mine"), ("inet", "gone")]


def files_of(archive: bytes) -> dict[str, str]:
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as tar:
        found = {}
        for member in tar:
            file = tar.extractfile(member)
            assert file is not None
            found[member.name.partition("/")[2]] = file.read().decode()
        return found


async def test_no_secret_is_in_the_archive(tmp_path: Path, process: int) -> None:
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(KUBECONFIG)
    file = tmp_path / "report.tar.gz"
    client = PlantedClient(process, str(kubeconfig))
    report = await write_report(
        str(file),
        journal=True,
        execute=PlantedTools(),
        client=client,
        list_tables=tables_of_nft,
    )
    files = files_of(file.read_bytes())
    assert file.stat().st_mode & 0o777 == 0o600
    assert {"kubeconfig.json", "process.txt", "config.json", "kernel/nft.txt"} <= files.keys()
    for name, text in files.items():
        assert not [secret for secret in PLANTED if secret in text], (name, text)

    # Everything else is there.
    known = json.loads(files["kubeconfig.json"])
    assert known["clusters"][0]["cluster"]["server"] == "https://***@192.0.2.1:6443"
    assert known["users"][0]["user"]["client-key"] == "/etc/kubernetes/pki/key.pem"
    assert known["users"][0]["user"]["exec"]["command"] == "aws-iam-authenticator"
    assert "a rule of nft" in files["kernel/nft.txt"]
    assert "AWS_SECRET_ACCESS_KEY=(removed)" in files["process.txt"]
    assert "net/ipv4/ip_forward: " in files["node/facts.txt"]

    # A table that iptables-save has printed is named only.
    rules = files["kernel/nft.txt"]
    assert rules.startswith("# printed by iptables-save: table ip nat\na rule of nft")
    assert rules.count("a rule of nft") == 2
    assert rules.endswith("# table inet gone: Error: No such file or directory\n")

    # Missing parts are named, with the reason.
    index = {each["name"]: each for each in json.loads(files["index.json"])["parts"]}
    assert index.keys() == {part.name for part in report.parts}
    assert set(TOOLS) < index.keys()
    assert index["kernel/ipset.txt"]["problem"] == "ipset does not exist"
    assert "no steersman runs" in index["findings.txt"]["problem"]
    assert {index[name]["problem"] for name in ("kernel/nft.txt", "version.json")} == {""}
    assert json.loads(files["version.json"])["python"]
    assert {name for name, each in index.items() if not each["bytes"]}.isdisjoint(files)


async def test_to_list_the_parts_starts_nothing() -> None:
    world = asyncio.get_running_loop().create_future()
    before = asyncio.all_tasks()
    parts = parts_of(
        TOOLS, PlantedTools(), PlantedClient(0, ""), world=world, list_tables=tables_of_nft
    )
    assert {"kernel/nft.txt", "kernel/iptables.txt", "kernel/ip6tables.txt"} < parts.keys()
    assert asyncio.all_tasks() == before


async def test_a_large_part_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bugreport, "_MOST_BYTES", 1000)
    client = PlantedClient(0, "")
    out = io.BytesIO()
    report = await write_report("-", execute=PlantedTools(), client=client, out=out)
    parts = {each.name: each for each in report.parts}
    facts = parts["node/facts.txt"]
    assert (facts.bytes, facts.problem) == (1000, "cut after 0 MB")
    assert len(files_of(out.getvalue())["node/facts.txt"]) == 1000
    assert parts["process.txt"].problem == "no steersman process is seen from here"
    assert parts["kubeconfig.json"].problem == "the process has none"
    shown = list(report.blocks(wide=False))
    assert isinstance(shown[0], Table)
    assert "node/facts.txt" in [row[0] for row in shown[0].rows]
    assert isinstance(shown[1], Line)


async def test_a_tool_that_takes_too_long_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stuck(SubprocessExec):
        async def run(
            self, argv: Sequence[str], stdin: bytes = b"", *, timeout: float = 60.0
        ) -> Result:
            raise TimeoutError

    out = io.BytesIO()
    client = PlantedClient(0, "")
    report = await write_report("-", execute=Stuck(), client=client, out=out)
    problems = {part.name: part.problem for part in report.parts}
    assert problems["kernel/iptables.txt"] == "it took more than 20 s"


async def test_no_file_is_overwritten(tmp_path: Path) -> None:
    file = tmp_path / "report"
    file.write_text("mine")
    with pytest.raises(QuestionError, match=r"cannot be created: File exists; name another"):
        await write_report(str(file), execute=PlantedTools())
    assert file.read_text() == "mine"


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("tokenFile: /etc/token", "tokenFile: /etc/token"),
        ("--state-token-file=/etc/token", "--state-token-file=/etc/token"),
        ("10.96.0.1 . tcp . 80 : goto external-x/shop/web", None),
        ("-A KUBE-SVC-2KEYX -j KUBE-SEP-APIKX", None),
        *((f"{name}: planted", f'{name}: "(removed)"') for name in NAMES),
        ('{"token": "planted"}', '{"token": "(removed)"}'),
        ("password = planted", 'password = "(removed)"'),
        ("Authorization: Basic cGxhbnRlZDpw", "Authorization: Basic (removed)"),
        (f"before {JWT} after", "before (removed) after"),
        (f"{PEM}after", "(removed)\nafter"),
        ("-----BEGIN CERTIFICATE-----\ncut", "(removed)"),
    ],
)
def test_only_secrets_are_removed(text: str, left: str | None) -> None:
    assert without_secrets(text) == (text if left is None else left)


def test_what_is_no_kubeconfig_leaves_nothing() -> None:
    assert safe_kubeconfig("planted") == REMOVED
    assert safe_kubeconfig({"users": ["planted", {"user": "planted"}], "name": ["planted"]}) == {
        "users": [REMOVED, {"user": REMOVED}],
        "name": REMOVED,
    }


def test_values_of_variables_are_kept_only_if_they_are_known() -> None:
    assert safe_environment(["PATH=/bin", "KUBERNETES_SERVICE_HOST=10.0.0.1", "X=planted", ""]) == [
        *("KUBERNETES_SERVICE_HOST=10.0.0.1", "PATH=/bin", "X=(removed)"),
    ]


def test_a_process_that_has_ended_is_no_part(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        describe_process(7, tmp_path)
