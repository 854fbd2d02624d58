"""Say how files were built, as an in-toto statement with SLSA's provenance (version 1).

    python scripts/provenance.py NAME=sha256:DIGEST|FILE ... > FILE

It is not signed: whoever publishes a release signs it, or has the place where it is built do so.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TOOLS = {
    "clang": ["clang", "--version"],
    "lld": ["ld.lld", "--version"],
    "mmdebstrap": ["mmdebstrap", "--version"],
    "dpkg-dev": ["dpkg-buildpackage", "--version"],
}


def subject(text: str) -> dict[str, Any]:
    """A file, or a name and its digest, that was built."""
    name, given, digest = text.partition("=sha256:")
    if given:
        return {"name": name, "digest": {"sha256": digest}}
    data = Path(text).read_bytes()
    return {"name": Path(text).name, "digest": {"sha256": hashlib.sha256(data).hexdigest()}}


def tools() -> dict[str, str]:
    """Versions of what has built them, as the tools say themselves."""
    versions = {"python": platform.python_version()}
    for name, argv in TOOLS.items():
        try:
            done = subprocess.run(argv, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            continue
        versions[name] = done.stdout.strip().partition("\n")[0]
    return versions


def statement(subjects: list[dict[str, Any]], revision: str, epoch: int) -> dict[str, Any]:
    """The whole document."""
    locks = {
        name: hashlib.sha256((ROOT / name).read_bytes()).hexdigest()
        for name in ("requirements.lock", "pyproject.toml")
    }
    source = {"uri": "git+steersman", "digest": {"gitCommit": revision}}
    locked = [{"uri": name, "digest": {"sha256": digest}} for name, digest in locks.items()]
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": subjects,
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": "urn:steersman:make-release:v1",
                "externalParameters": {"source": source},
                "internalParameters": {"sourceDateEpoch": epoch},
                "resolvedDependencies": [source, *locked],
            },
            "runDetails": {
                "builder": {"id": "urn:steersman:make-release", "version": tools()},
            },
        },
    }


def main() -> None:
    """Print the statement about the arguments."""
    made = statement(
        [subject(each) for each in sys.argv[1:]],
        os.environ["REVISION"],
        int(os.environ["SOURCE_DATE_EPOCH"]),
    )
    print(json.dumps(made, indent=1))


if __name__ == "__main__":
    main()
