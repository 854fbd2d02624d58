"""Whether nftables can be programmed on this machine, and what is missing if not."""

from __future__ import annotations

import errno
import os
import platform
import re
from collections.abc import Callable

from steersman.host.exec import Exec, failure_reason
from steersman.host.netlink import Netlink
from steersman.host.process import NEEDS_NET_ADMIN
from steersman.modes.base import Support
from steersman.netfilter.generation import generation

_KERNEL = (5, 13)
_NFT = (1, 0, 1)
_SKIP = "KUBE_PROXY_NFTABLES_SKIP_KERNEL_VERSION_CHECK"


async def probe(execute: Exec, connect: Callable[[], Netlink]) -> Support:
    """Say whether the kernel and nft are there and new enough (behaviour 1.5)."""
    missing = (*_kernel(platform.release()), *await _nft(execute), *_netlink(connect))
    return Support(not missing, missing)


def version(text: str) -> tuple[int, ...]:
    """Leading numbers of a version."""
    found = re.search(r"\d+(?:\.\d+)*", text)
    return tuple(int(number) for number in found.group().split(".")) if found else ()


def _kernel(release: str) -> tuple[str, ...]:
    if os.environ.get(_SKIP) or version(release) >= _KERNEL:
        return ()
    return (
        f"The kernel is {release}; nftables mode needs 5.13 or later (set {_SKIP}=1 where your "
        "kernel has the changes under an older number).",
    )


async def _nft(execute: Exec) -> tuple[str, ...]:
    try:
        result = await execute.run(["nft", "--version"])
    except OSError as error:
        return (f"{failure_reason('nft', 'nftables', error)}.",)
    said = result.stdout.decode(errors="replace").strip()
    if version(said) < _NFT:
        return (f"{said or 'nft'} is too old; nftables mode needs nft 1.0.1 or later.",)
    return ()


def _netlink(connect: Callable[[], Netlink]) -> tuple[str, ...]:
    try:
        with connect() as netlink:
            generation(netlink)
    except OSError as error:
        if error.errno == errno.EPERM:
            return (f"This process may not program the kernel: it {NEEDS_NET_ADMIN}.",)
        return (
            f"The kernel does not speak nf_tables with us ({error}); it needs CONFIG_NF_TABLES "
            "and this process CAP_NET_ADMIN.",
        )
    return ()
