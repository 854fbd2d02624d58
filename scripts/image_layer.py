"""Copy mmdebstrap's tar archive to the image's layer: without its own traces, the same every time.

Reads the archive from standard input and writes it to the file that is the argument.
"""

from __future__ import annotations

import os
import struct
import sys
import tarfile

TRACES = (
    *("dev", "etc/apt", "etc/dpkg", "etc/hostname", "etc/resolv.conf"),
    *("usr/sbin/start-stop-daemon", "var/cache", "var/lib/apt", "var/log"),
)
"""What mmdebstrap needs while it runs, and what it takes from the machine that builds."""
KEPT = "var/lib/dpkg/status.d"
"""Of dpkg's own files, the one folder that scanners read."""

# vfs_cap_data of version 2, permitted: NET_ADMIN (12), NET_RAW (13), SYS_RESOURCE (24); not
# effective, so that it also starts where a container is not given all of them (capabilities(7)).
CAPABILITIES = struct.pack("<5I", 0x02000000, 1 << 12 | 1 << 13 | 1 << 24, 0, 0, 0).decode()
LAUNCHER = "usr/local/bin/setpriv-net"
"""The program that passes capabilities on, where the container's user is not root."""


def wanted(name: str) -> bool:
    """Whether a member of the archive is part of the layer."""
    path = name.removeprefix("./").rstrip("/")
    if path.startswith("var/lib/dpkg/"):
        return path.startswith(KEPT)
    return not any(path == trace or path.startswith(trace + "/") for trace in TRACES)


def copy(source: tarfile.TarFile, target: tarfile.TarFile, newest: int) -> None:
    """Copy the members that are wanted; none is newer than a time in seconds since 1970."""
    for member in source:
        if wanted(member.name):
            member.mtime = min(int(member.mtime), newest)
            member.pax_headers = {
                key: value for key, value in member.pax_headers.items() if "time" not in key
            }
            if member.name.endswith(LAUNCHER):
                member.pax_headers["SCHILY.xattr.security.capability"] = CAPABILITIES
            target.addfile(member, source.extractfile(member) if member.isreg() else None)


def main() -> None:
    """Copy standard input to the file that is the argument."""
    newest = int(os.environ["SOURCE_DATE_EPOCH"])
    with (
        tarfile.open(fileobj=sys.stdin.buffer, mode="r|") as source,
        tarfile.open(sys.argv[1], "w", format=tarfile.PAX_FORMAT) as target,
    ):
        copy(source, target, newest)


if __name__ == "__main__":
    main()
