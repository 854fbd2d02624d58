"""Write an image in OCI's layout from root filesystems, one layer each; nothing is pulled or run.

    python scripts/image_oci.py ARCHIVE NAME:TAG ARCH=ROOTFS.tar [ARCH=ROOTFS.tar ...]

With several architectures the archive has an index of them all. What is written depends on the
arguments, the files, SOURCE_DATE_EPOCH, VERSION and REVISION only, so a second build has the same
digests. Prints the digest that registries will show, then those of each architecture.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import sys
import tarfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ENTRYPOINT = ["/usr/local/bin/kube-proxy"]
ENVIRONMENT = (
    "PATH=/usr/local/bin:/usr/sbin:/usr/bin",
    "LANG=C.UTF-8",
    "PYTHONDONTWRITEBYTECODE=1",
    "PYTHONUNBUFFERED=1",
)
# Root, as upstream's image: manifests that say nothing else keep working. User 65532 suffices for
# the pages, and in nftables mode with setpriv-net (deploy/helm/steersman/values-nftables.yaml).
USER = "0:0"

KINDS = "application/vnd.oci.image."


class Layout:
    """An image layout: blobs by their digests, and the index that names the image."""

    def __init__(self, created: int) -> None:
        self.created = created
        """In seconds since 1970."""
        self.blobs: dict[str, bytes] = {}

    def add(self, kind: str, data: bytes) -> dict[str, Any]:
        """Add a blob and return its descriptor."""
        digest = hashlib.sha256(data).hexdigest()
        self.blobs[digest] = data
        return {"mediaType": KINDS + kind, "digest": f"sha256:{digest}", "size": len(data)}

    def add_json(self, kind: str, value: dict[str, Any]) -> dict[str, Any]:
        """Add a document and return its descriptor."""
        return self.add(kind, json.dumps(value, separators=(",", ":"), sort_keys=True).encode())

    def add_platform(self, arch: str, rootfs: Path, labels: dict[str, str]) -> dict[str, Any]:
        """Add the image of one architecture and return the descriptor of its manifest."""
        tar = rootfs.read_bytes()
        layer = self.add("layer.v1.tar+gzip", gzip.compress(tar, compresslevel=9, mtime=0))
        time = labels["org.opencontainers.image.created"]
        config = {
            "architecture": arch,
            "os": "linux",
            "created": time,
            "config": {
                "User": USER,
                "Env": list(ENVIRONMENT),
                "Entrypoint": ENTRYPOINT,
                "Labels": labels,
            },
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(tar).hexdigest()}"]},
            "history": [{"created": time, "created_by": "scripts/image.sh"}],
        }
        manifest = {
            "schemaVersion": 2,
            "mediaType": KINDS + "manifest.v1+json",
            "config": self.add_json("config.v1+json", config),
            "layers": [layer],
            "annotations": labels,
        }
        platform = {"platform": {"architecture": arch, "os": "linux"}}
        return self.add_json("manifest.v1+json", manifest) | platform

    def write(self, archive: Path, name: str, top: dict[str, Any]) -> None:
        """Write the archive, in which an image has a name."""
        names = {
            "io.containerd.image.name": name if "/" in name else f"docker.io/library/{name}",
            "org.opencontainers.image.ref.name": name,
        }
        index = {
            "schemaVersion": 2,
            "mediaType": KINDS + "index.v1+json",
            "manifests": [top | {"annotations": names}],
        }
        files = {"oci-layout": b'{"imageLayoutVersion":"1.0.0"}'}
        files |= {f"blobs/sha256/{digest}": data for digest, data in sorted(self.blobs.items())}
        files["index.json"] = json.dumps(index, sort_keys=True).encode()
        with tarfile.open(archive, "w", format=tarfile.USTAR_FORMAT) as tar:
            for path, data in files.items():
                member = tarfile.TarInfo(path)
                member.size, member.mtime = len(data), self.created
                tar.addfile(member, io.BytesIO(data))


def labels_of(created: int) -> dict[str, str]:
    """Labels of the image, after OCI's annotation keys."""
    time = datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    said = {
        "title": "steersman",
        "description": "kube-proxy for every node, in Python",
        "licenses": "Apache-2.0",
        "version": os.environ["VERSION"],
        "revision": os.environ["REVISION"],
        "created": time,
    }
    return {f"org.opencontainers.image.{key}": value for key, value in said.items()}


def main() -> None:
    """Write the archive and print the digests."""
    archive, name, *platforms = sys.argv[1:]
    created = int(os.environ["SOURCE_DATE_EPOCH"])
    layout, labels = Layout(created), labels_of(created)
    manifests = []
    for each in platforms:
        arch, _, rootfs = each.partition("=")
        manifests.append(layout.add_platform(arch, Path(rootfs), labels))
    top = manifests[0]
    if len(manifests) > 1:
        index = {
            "schemaVersion": 2,
            "mediaType": KINDS + "index.v1+json",
            "manifests": manifests,
            "annotations": labels,
        }
        top = layout.add_json("index.v1+json", index)
    layout.write(Path(archive), name, top)
    print(top["digest"])
    for each in manifests:
        print(each["platform"]["architecture"], each["digest"])


if __name__ == "__main__":
    main()
