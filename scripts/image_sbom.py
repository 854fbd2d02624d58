"""Write the image's list of contents as SPDX 2.3 JSON: Debian's packages and Python's.

Runs on the Python of the machine that builds, without anything else installed.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from email.message import Message
from email.parser import Parser
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any
from urllib.parse import quote

PACKAGES = "usr/lib/python3/dist-packages"
STATUS = "var/lib/dpkg/status.d"
NOTHING = "NOASSERTION"


def identifier(kind: str, name: str) -> str:
    """An SPDX identifier: letters, digits, dots and dashes."""
    return "SPDXRef-" + re.sub(r"[^A-Za-z0-9.-]", "-", f"{kind}-{name}")


def package(kind: str, name: str, version: str, purl: str, **more: str) -> dict[str, Any]:
    """An entry of the document."""
    locator = {
        "referenceCategory": "PACKAGE-MANAGER",
        "referenceType": "purl",
        "referenceLocator": purl,
    }
    return {
        "SPDXID": identifier(kind, name),
        "name": name,
        "versionInfo": version,
        "downloadLocation": NOTHING,
        "filesAnalyzed": False,
        "licenseConcluded": NOTHING,
        "licenseDeclared": NOTHING,
        "copyrightText": NOTHING,
        "externalRefs": [locator],
        **more,
    }


def debian(root: Path) -> Iterator[dict[str, Any]]:
    """Debian's packages."""
    for path in sorted((root / STATUS).iterdir()):
        control: Message = Parser().parsestr(path.read_text())
        name, version, arch = (control[key] for key in ("Package", "Version", "Architecture"))
        purl = f"pkg:deb/debian/{name}@{quote(version, safe='~')}?arch={arch}"
        yield package("deb", name, version, purl, supplier=f"Person: {control['Maintainer']}")


def python(root: Path) -> Iterator[dict[str, Any]]:
    """Python's packages, steersman among them."""
    found = distributions(path=[str(root / PACKAGES)])
    for each in sorted(found, key=lambda d: d.metadata["Name"].lower()):
        name = each.metadata["Name"]
        purl = f"pkg:pypi/{re.sub(r'[-_.]+', '-', name).lower()}@{each.version}"
        yield package("pypi", name, each.version, purl, licenseDeclared=licence(each))


def licence(distribution: Distribution) -> str:
    """What a package says of its licence as an SPDX expression."""
    return str(distribution.metadata.json.get("license_expression", NOTHING))


def document(root: Path) -> dict[str, Any]:
    """The whole document."""
    contents = [*debian(root), *python(root)]
    (own,) = (each for each in contents if each["SPDXID"] == "SPDXRef-pypi-steersman")
    version = own["versionInfo"]
    image = package("image", "steersman", version, f"pkg:oci/steersman?tag={version}")
    image["primaryPackagePurpose"] = "CONTAINER"
    created = datetime.fromtimestamp(int(os.environ.get("SOURCE_DATE_EPOCH", "0")), UTC)
    return {
        "spdxVersion": "SPDX-2.3",
        "dataLicense": "CC0-1.0",
        "SPDXID": "SPDXRef-DOCUMENT",
        "name": f"steersman-{version}",
        "documentNamespace": f"urn:steersman:image:{version}:{int(created.timestamp())}",
        "creationInfo": {
            "created": created.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "creators": ["Tool: scripts/image_sbom.py"],
        },
        "packages": [image, *contents],
        "relationships": [
            relationship("SPDXRef-DOCUMENT", "DESCRIBES", image),
            *(relationship(image["SPDXID"], "CONTAINS", each) for each in contents),
        ],
    }


def relationship(one: str, kind: str, other: dict[str, Any]) -> dict[str, str]:
    """How two entries relate."""
    return {"spdxElementId": one, "relationshipType": kind, "relatedSpdxElement": other["SPDXID"]}


def main() -> None:
    """Write the list of contents of a root filesystem (first argument) to a file (second)."""
    root, target = map(Path, sys.argv[1:])
    target.write_text(json.dumps(document(root), indent=1) + "\n")


if __name__ == "__main__":
    main()
