"""The kubectl plugin for krew: an archive with the script, and the manifest that names it.

    python scripts/krew.py URL [DIRECTORY]

URL is where the archive will be downloaded from. The archive is the same at every run.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import sys
import tarfile
from pathlib import Path

import yaml

from steersman import __version__

ROOT = Path(__file__).parents[1]
FILES = ("deploy/krew/kubectl-steersman", "LICENSE")
DESCRIPTION = """\
Asks steersman, a kube-proxy, on the nodes of a cluster: which Services are served where, why a
connection fails, whether each node's kernel is as it should be. Runs steersman's commands in its
pod on the node in question, or on every node.
"""


def archive() -> bytes:
    """Return the archive; nothing in it depends on the time or on the machine."""
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name in FILES:
            data = (ROOT / name).read_bytes()
            member = tarfile.TarInfo(Path(name).name)
            member.size = len(data)
            member.mode = 0o755 if name.startswith("deploy") else 0o644
            tar.addfile(member, io.BytesIO(data))
    return gzip.compress(plain.getvalue(), mtime=0)


def manifest(url: str, data: bytes) -> str:
    """Return krew's manifest of the plugin."""
    platform = {
        "selector": {
            "matchExpressions": [{"key": "os", "operator": "In", "values": ["linux", "darwin"]}]
        },
        "uri": url,
        "sha256": hashlib.sha256(data).hexdigest(),
        "bin": "kubectl-steersman",
    }
    document = {
        "apiVersion": "krew.googlecontainertools.github.com/v1alpha2",
        "kind": "Plugin",
        "metadata": {"name": "steersman"},
        "spec": {
            "version": f"v{__version__}",
            "shortDescription": "Ask steersman why a Service does not work",
            "description": DESCRIPTION,
            "caveats": "Needs the right to list pods, and pods/exec in steersman's namespace.\n",
            "platforms": [platform],
        },
    }
    return yaml.safe_dump(document, sort_keys=False)


def main() -> None:
    """Write the archive and the manifest."""
    url, *rest = sys.argv[1:]
    folder = Path(rest[0] if rest else ROOT / "build/krew")
    folder.mkdir(parents=True, exist_ok=True)
    data = archive()
    (folder / f"kubectl-steersman-v{__version__}.tar.gz").write_bytes(data)
    (folder / "steersman.yaml").write_text(manifest(url, data))


if __name__ == "__main__":
    main()
