"""Collect what a report of a bug needs into one archive (`steersman bugreport`).

Each part is collected by itself, within limits of time and size. A part that fails is named in the
index with the reason, and the others go on: the report of a broken node is the one that matters.
Secrets are removed from every part, whatever it is.
"""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import os
import re
import tarfile
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO

import msgspec

from steersman.config import ConfigError, ProxyConfig, parse_command_line
from steersman.host.exec import Exec, SubprocessExec
from steersman.host.process import words_of
from steersman.model.world import World
from steersman.model.yaml_reader import Budget, read_yaml
from steersman.netfilter.nft.tables import list_tables
from steersman.operate.answer import Answer, Block, Line, QuestionError, Table
from steersman.operate.client import Client
from steersman.operate.drift import find_drift
from steersman.operate.dump import mode_of, reading_kernel
from steersman.operate.load import config_of, world_of_process
from steersman.operate.secrets import (
    safe_environment,
    safe_kubeconfig,
    safe_words,
    without_secrets,
)
from steersman.operate.status import ask_status
from steersman.operate.version import installed

STDOUT = "-"
_SECONDS = 20.0
"""For one part; all are collected at the same time."""
_MOST_BYTES = 32 << 20
"""Of one part, uncompressed."""
_COMPRESSION = 5
_PROC = Path("/proc")
_JOURNAL_LINES = 5000
_SETTINGS = (
    *("net/ipv4/ip_forward", "net/ipv4/ip_local_port_range", "net/ipv4/conf/all/rp_filter"),
    *("net/ipv4/conf/all/route_localnet", "net/ipv6/conf/all/forwarding"),
    *("net/bridge/bridge-nf-call-iptables", "net/netfilter/nf_conntrack_count"),
    *("net/netfilter/nf_conntrack_max", "net/netfilter/nf_conntrack_tcp_be_liberal"),
    *("net/ipv4/vs/conntrack", "net/ipv4/vs/conn_reuse_mode", "kernel/unprivileged_bpf_disabled"),
)
"""Kernel settings that traffic to Services depends on, below /proc/sys."""
_FILES = (
    "/etc/os-release",
    "/proc/version",
    "/proc/meminfo",
    "/proc/loadavg",
    "/proc/modules",
    "/proc/net/ip_vs",
)
TOOLS: dict[str, Sequence[str]] = {
    "kernel/ipset.txt": ("ipset", "save"),
    "node/addresses.txt": ("ip", "-details", "address"),
    "node/routes.txt": ("ip", "route", "show", "table", "all"),
    "node/rules.txt": ("ip", "rule"),
    "node/listening.txt": ("ss", "--no-header", "-lntup"),
}
"""What the tools of this node print, each if it is installed; `parts_of` adds iptables and nft."""
_FAMILIES = ("ip", "ip6")
"""Names of nft; programs and files of iptables begin with them."""
_SAVED_TABLE = re.compile(rb"^\*(\S+)", re.MULTILINE)
JOURNAL = ("journalctl", "--no-pager", "--lines", str(_JOURNAL_LINES), "--unit", "steersman")


class Part(msgspec.Struct, frozen=True, rename="camel"):
    """A file of the archive, or the reason why it is missing."""

    name: str
    bytes: int = 0
    """Uncompressed."""
    seconds: float = 0.0
    problem: str = ""
    """Why it is missing, or cut; "" if it is whole."""


class BugReport(Answer, frozen=True, kw_only=True, rename="camel"):
    """The archive that was written, and its parts."""

    file: str
    """`-` for standard output."""
    node: str
    parts: tuple[Part, ...]

    def blocks(self, wide: bool) -> Iterator[Block]:
        """Yield the missing parts, then the name of the file."""
        missing = [each for each in self.parts if each.problem]
        shown = self.parts if wide else missing
        rows = [
            (each.name, str(each.bytes), f"{each.seconds:.1f} s", each.problem) for each in shown
        ]
        if rows:
            yield Table(("PART", "BYTES", "TOOK", "MISSING OR CUT BECAUSE"), rows)
        whole = len(self.parts) - len(missing)
        yield Line(f"{self.file}: {whole} parts of {len(self.parts)} are whole", "good")
        yield Line(
            "secrets are removed; it names Services, addresses and rules of this node", "dim"
        )


Collect = Callable[[], Awaitable["Answer | str | bytes"]]
ListTables = Callable[[], list[tuple[str, str]]]


async def write_report(
    file: str,
    *,
    journal: bool = False,
    execute: Exec | None = None,
    client: Client | None = None,
    out: BinaryIO | None = None,
    list_tables: ListTables = list_tables,
) -> BugReport:
    """Collect everything, and write the archive.

    Args:
        file: where to; "" for a new name in the working directory, `-` for `out`.
        journal: whether to add the journal of the unit.
        execute: runs the tools of this node.
        client: reaches the running process.
        out: standard output.
        list_tables: returns family and name of the tables of nft.

    Raises:
        QuestionError: the archive cannot be written.
    """
    now, client = time.time(), client or Client()
    node = os.uname().nodename
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now))
    folder = f"steersman-{node}-{stamp}"
    file = file or f"{folder}.tar.gz"
    tools = {**TOOLS, **_legacy_tools(), **({"journal.txt": JOURNAL} if journal else {})}
    stream = out if out is not None and file == STDOUT else _new_file(Path(file))
    done: list[Part] = []
    try:
        with (
            nullcontext() if stream is out else stream,
            gzip.GzipFile("", "wb", _COMPRESSION, stream, now) as compressed,
            tarfile.open(fileobj=compressed, mode="w|") as archive,
        ):
            execute = execute or SubprocessExec(max_output=_MOST_BYTES)
            # Before the others: it is decoded in a thread, and msgspec 0.22 crashes if two threads
            # meet a type for the first time.
            world = asyncio.ensure_future(world_of_process(client))
            await asyncio.wait((world,))
            parts = parts_of(tools, execute, client, world=world, list_tables=list_tables)
            # As they end, so that no more than a few are in memory.
            for next_part in asyncio.as_completed([_collected(*each) for each in parts.items()]):
                part, body = await next_part
                done.append(part)
                if body or not part.problem:
                    _add(archive, f"{folder}/{part.name}", body, now)
            done.sort(key=lambda part: part.name)
            index = {"version": installed().version, "node": node, "at": now, "parts": done}
            _add(archive, f"{folder}/index.json", msgspec.json.encode(index), now)
    except BaseException as error:
        if stream is not out:
            Path(file).unlink(missing_ok=True)  # noqa: ASYNC240 - a file that is open already
        if not isinstance(error, OSError):
            raise
        where = "standard output" if stream is out else file
        raise QuestionError(f"{where} cannot be written: {error.strerror or error}") from error
    return BugReport(source="this node", file=file, node=node, parts=tuple(done))


def parts_of(
    tools: dict[str, Sequence[str]],
    execute: Exec,
    client: Client,
    *,
    world: asyncio.Future[World],
    list_tables: ListTables,
) -> dict[str, Collect]:
    """Return what collects each part, by its name in the archive; see `write_report`."""

    async def page(path: str) -> bytes:
        return await asyncio.to_thread(client.get, path)

    async def tool(argv: Sequence[str]) -> bytes:
        result = await execute.run(argv, timeout=_SECONDS)
        if result.returncode:
            raise QuestionError(result.message or f"exit status {result.returncode}")
        return result.stdout

    saves: dict[str, asyncio.Future[bytes]] = {}

    def save(family: str) -> Awaitable[bytes]:
        if family not in saves:  # two parts need it
            saves[family] = asyncio.ensure_future(tool((f"{family}tables-nft-save", "--counters")))
        return asyncio.shield(saves[family])

    async def nft() -> str:
        # nft takes seconds for the tables of iptables-nft, and does not print its extensions.
        ended = await asyncio.gather(*map(save, _FAMILIES), return_exceptions=True)
        saved = {
            (family, name.decode(errors="replace"))
            for family, text in zip(_FAMILIES, ended, strict=True)
            if isinstance(text, bytes)
            for name in _SAVED_TABLE.findall(text)
        }
        texts = [f"# printed by iptables-save: table {' '.join(each)}\n" for each in sorted(saved)]
        for table in await asyncio.to_thread(list_tables):
            if table not in saved:
                try:
                    printed = await tool(("nft", "--handle", "list", "table", *table))
                    texts.append(printed.decode(errors="replace"))
                except QuestionError as error:  # it may have gone meanwhile
                    texts.append(f"# table {' '.join(table)}: {error}\n")
        return "".join(texts)

    async def findings() -> str:
        return "".join(f"{each.severity}: {each}\n" for each in (await world).findings)

    async def objects() -> str:
        known = await world
        config = parse_command_line([]).config
        with suppress(OSError, ConfigError):  # of a process whose flags are not seen from here
            config = await asyncio.to_thread(config_of, client.server_pid())
        return "".join(await kernel_objects(known, config, execute))

    async def kubeconfig() -> str:
        document = json.loads(await page("/configz"))
        path = next(iter(document.values()))["clientConnection"]["kubeconfig"]
        root = _PROC / str(client.server_pid()) / "root"
        return await asyncio.to_thread(_kubeconfig, root, path)

    return {
        "version.json": lambda: asyncio.to_thread(installed),
        "status.json": lambda: ask_status(client),
        "findings.txt": findings,
        "drift.json": lambda: find_drift(client, lines=100),
        "history.json": lambda: page("/history"),
        "config.json": lambda: page("/configz"),
        "kubeconfig.json": kubeconfig,
        "process.txt": lambda: asyncio.to_thread(describe_process, client.server_pid()),
        "kernel/objects.txt": objects,
        "node/facts.txt": lambda: asyncio.to_thread(describe_node),
        "kernel/nft.txt": nft,
        **{f"kernel/{each}tables.txt": partial(save, each) for each in _FAMILIES},
        **{name: partial(tool, argv) for name, argv in tools.items()},
    }


async def _collected(name: str, collect: Collect) -> tuple[Part, bytes]:
    """Return a part without secrets, within its limits, or the reason why it is missing."""
    began, body, problem = time.monotonic(), b"", ""
    try:
        async with asyncio.timeout(_SECONDS):
            found = await collect()
            if isinstance(found, Answer):
                found = msgspec.json.format(msgspec.json.encode(found.data), indent=1)
            text = found if isinstance(found, str) else found.decode(errors="replace")
            body = (await asyncio.to_thread(without_secrets, text)).encode()
    except TimeoutError:
        problem = f"it took more than {_SECONDS:g} s"
    except FileNotFoundError as error:
        problem = f"{error.filename or error} does not exist"
    except Exception as error:  # a broken part must not end the report
        problem = str(error) or type(error).__name__
    if len(body) > _MOST_BYTES:
        body, problem = body[:_MOST_BYTES], f"cut after {_MOST_BYTES >> 20} MB"
    took = round(time.monotonic() - began, 3)
    return Part(name, len(body), took, without_secrets(problem)), body


async def kernel_objects(world: World, config: ProxyConfig, execute: Exec) -> Iterable[str]:
    """Return the lines of all kernel objects of the mode in force, unless other parts have them.

    Raises:
        QuestionError: the kernel cannot be read.
    """
    mode = mode_of(world, config, execute)
    words = mode.words
    if words.are_rules:
        return [f"all objects of the {mode.name} mode are rules: see the other files here\n"]
    async with reading_kernel(mode):
        kernel = await words.read()

        def lines() -> list[str]:
            return [
                f"{line.place}: {line.text}\n"
                for key in sorted(kernel, key=words.rank)
                for line in words.words(key, kernel[key])
            ]

        return await asyncio.to_thread(lines)


def describe_process(pid: int, proc: Path = _PROC) -> str:
    """Return the command line, the environment and the state of the running process.

    Raises:
        QuestionError: no process runs here, or its pid namespace cannot be seen.
        OSError: it has ended.
    """
    if not pid:
        raise QuestionError("no steersman process is seen from here")
    own = proc / str(pid)
    environment = (own / "environ").read_text(errors="replace").split("\0")
    descriptors = len(list((own / "fd").iterdir()))
    return "\n".join(
        [
            f"pid: {pid}",
            f"command line: {' '.join(safe_words(words_of(proc, pid)))}",
            f"descriptors: {descriptors}",
            *safe_environment(environment),
            (own / "status").read_text(errors="replace"),
            (own / "limits").read_text(errors="replace"),
            (own / "cgroup").read_text(errors="replace"),
        ]
    )


def describe_node(root: Path = Path("/")) -> str:
    """Return facts of this machine that traffic depends on; what does not exist is named."""
    found = [" ".join(os.uname())]
    paths = [*_FILES, *(f"/proc/sys/{name}" for name in _SETTINGS)]
    for path in paths:
        try:
            text = (root / path[1:]).read_text(errors="replace").strip()
        except OSError as error:
            text = error.strerror or str(error)
        found.append(f"{path}: {text}" if "\n" not in text else f"{path}:\n{text}")
    return "\n".join(found) + "\n"


def _legacy_tools() -> dict[str, Sequence[str]]:
    """Return the commands that print rules of iptables-legacy, if there are any."""
    found: dict[str, Sequence[str]] = {}
    for family in _FAMILIES:
        with suppress(OSError):
            if (_PROC / f"net/{family}_tables_names").read_text():
                argv = (f"{family}tables-legacy-save", "--counters")
                found[f"kernel/{family}tables-legacy.txt"] = argv
    return found


def _kubeconfig(root: Path, path: str) -> str:
    if not path:
        raise QuestionError("the process has none")
    text = (root / path.lstrip("/")).read_text()
    documents = [each.value for each in read_yaml(text, Budget(100_000, 50))]
    return json.dumps(safe_kubeconfig(documents[0] if documents else None), indent=1)


def _new_file(path: Path) -> BinaryIO:
    """Create the archive, readable by its owner only."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise QuestionError(
            f"{path} cannot be created: {error.strerror}; name another file, or - for standard "
            "output"
        ) from error
    return os.fdopen(descriptor, "wb")


def _add(archive: tarfile.TarFile, name: str, body: bytes, at: float) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mtime, info.mode = len(body), int(at), 0o600
    archive.addfile(info, io.BytesIO(body))
