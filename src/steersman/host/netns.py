"""Network namespaces of this machine: list them, find one by an address, call functions in one.

A socket belongs to the namespace in which it was made, whoever uses it afterwards: so a thread that
ends after its one call is all that is needed, and no helper process.
"""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from steersman.host.netlink import NETLINK_ROUTE, Netlink
from steersman.host.rtnetlink import (
    LIST_LINKS,
    get_namespace_number,
    namespace_of_peer,
    parse_link,
    parse_namespace_number,
)

T = TypeVar("T")
NAMESPACES = (Path("/run/netns"), Path("/proc"))
"""Folders in which the namespaces of a machine are found."""
HERE = Path("/proc/thread-self/ns/net")
"""The namespace of the calling thread."""
_CLONE_NEWNET = 0x40000000


def namespaces(folders: Iterable[Path] = NAMESPACES) -> Iterator[Path]:
    """Yield a path to each network namespace of this machine: named ones, and those of processes.

    A namespace that neither a name nor a process keeps alive is not found.
    """
    seen = set()
    for folder in folders:
        names: list[str] = []
        with suppress(OSError):
            names = os.listdir(folder)
        if folder.name == "proc":
            names = [f"{name}/ns/net" for name in names if name.isdigit()]
        for name in names:
            with suppress(OSError):
                found = (folder / name).stat()
                if (found.st_dev, found.st_ino) not in seen:
                    seen.add((found.st_dev, found.st_ino))
                    yield folder / name


def enter(path: Path) -> None:
    """Move this thread into a network namespace (os.setns exists from Python 3.12).

    Raises:
        OSError: it is gone (ENOENT), is no network namespace (EINVAL), or CAP_SYS_ADMIN is
            missing (EPERM).
    """
    opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # Not at import: Windows has no libc.
        if ctypes.CDLL(None, use_errno=True).setns(opened, _CLONE_NEWNET):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), str(path))
    finally:
        os.close(opened)


def call_inside(path: Path | None, function: Callable[[], T]) -> T:
    """Call a function in a network namespace, in a thread that ends with the call; it blocks.

    Args:
        path: the namespace; None for the one of this process.
        function: what to call.

    Raises:
        OSError: see `enter`.
    """
    if path is None:
        return function()

    def inside() -> T:
        enter(path)
        return function()

    with ThreadPoolExecutor(1, thread_name_prefix="netns") as pool:
        return pool.submit(inside).result()


def new_namespace() -> int:
    """Return a descriptor of a new network namespace; it blocks.

    The kernel removes the namespace, with all devices and routes in it, when the descriptor and
    the sockets made inside are closed: so also if this process is killed.

    Raises:
        OSError: CAP_SYS_ADMIN is missing (EPERM), or there are too many (ENOSPC).
    """

    def make() -> int:
        if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)

    with ThreadPoolExecutor(1, thread_name_prefix="netns") as pool:
        return pool.submit(make).result()


def linked_namespaces(folders: Iterable[Path] = NAMESPACES) -> tuple[dict[Path, int], int]:
    """Return the namespaces at the other end of this namespace's veth devices; it blocks.

    Returns:
        The index of such a device by path of the namespace, and the number of namespaces that have
        one but are not found: they belong to processes that cannot be seen from here.
    """
    found: dict[Path, int] = {}
    with Netlink(NETLINK_ROUTE, buffer=1 << 20) as netlink:
        links = [(namespace_of_peer(each), parse_link(each)) for each in netlink.dump(LIST_LINKS)]
        devices = {number: link.number for number, link in links if link.peer_elsewhere}
        for path in namespaces(folders):
            with suppress(OSError):  # it ended meanwhile, or is no namespace
                if (number := _number(netlink, path)) in devices:
                    found[path] = devices.pop(number)
    return found, len(devices)


def find_namespace(address: str, folders: Iterable[Path] = NAMESPACES) -> Path | None:
    """Return the namespace of this machine that has an address on an interface; None if none has.

    It blocks: about 0.2 ms for each namespace. The namespace of this thread comes first, so that a
    pod in the host's network is found there, then those with a link to it: other nodes of a test
    cluster on this machine may have pods with the same addresses.
    """
    elsewhere = None
    for path, linked in _holders(address, folders):
        if linked:
            return path
        elsewhere = elsewhere or path
    return elsewhere


def linked_holders(address: str, folders: Iterable[Path] = NAMESPACES) -> list[Path]:
    """Return all namespaces that have an address: that of this thread, and those linked to it.

    None for the address "".
    """
    if not address:
        return []
    return [path for path, linked in _holders(address, folders) if linked]


def _holders(address: str, folders: Iterable[Path]) -> Iterator[tuple[Path, bool]]:
    """Yield the namespaces that have an address, and whether each is this one or linked to it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET

    def has_it() -> bool:
        # The kernel talks to an address of its own from that very address. (It can be bound, too,
        # but with `ip_nonlocal_bind` so can any other.)
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect((address, 9))
            return bool(sock.getsockname()[0] == address)
        return False

    with Netlink(NETLINK_ROUTE, buffer=1 << 20) as netlink:
        linked = {namespace_of_peer(link) for link in netlink.dump(LIST_LINKS)} - {None, -1}
        here = HERE.stat().st_ino
        for path in (HERE, *namespaces(folders)):
            with suppress(OSError):  # it ended meanwhile, or is no namespace
                if path != HERE and path.stat().st_ino == here:
                    continue
                if call_inside(path, has_it):
                    yield path, path == HERE or _number(netlink, path) in linked


def find_inode(inode: int) -> Path | None:
    """Return the namespace with an inode, `HERE` for that of this thread; None if it is gone."""
    for path in (HERE, *namespaces()):
        with suppress(OSError):
            if path.stat().st_ino == inode:
                return path
    return None


def _number(netlink: Netlink, path: Path) -> int:
    """Return our number of a namespace, -1 if it has none."""
    opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return parse_namespace_number(netlink.request(get_namespace_number(opened))[0])
    finally:
        os.close(opened)
