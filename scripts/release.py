"""Build every artefact of a release into build/release, with checksums and provenance.

    python scripts/release.py VERSION [--url URL] [--check COMMAND] [--only PART ...] [--out DIR]

It refuses where the tree has changes, where VERSION is not the program's version or has no section
of its own in CHANGELOG.md, and where the checks fail (`make check`). URL is where the files will be
downloaded from: the manifest of the kubectl plugin names its archive there. `--only` builds some
parts, to try them. Nothing is published and nothing is signed.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))

import hatch_build
from scripts import krew, notice
from steersman import __version__

ROOT = Path(__file__).parents[1]
CHART = ROOT / "deploy" / "helm" / "steersman"
API_SERVER = "https://api-server.example:6443"
"""In the plain manifests, for the user to replace."""
HEAD = """\
# steersman {version} in {mode} mode, as a DaemonSet in kube-system: what the chart renders.
#
# Before `kubectl apply -f`, in the ConfigMap: replace {server} by an address of
# your API server that does not need kube-proxy to be reached, and set clusterCIDR. Then the image:
# steersman:{version} is the name that `make image` gives.
"""


class Release(NamedTuple):
    """What is built, and where to."""

    version: str
    url: str
    out: Path

    def run(self, *argv: str | Path, at: Path = ROOT, **environment: str) -> None:
        """Run one of the build scripts; raise CalledProcessError if it fails."""
        given = {"PYTHON": sys.executable, **environment}
        subprocess.run(argv, cwd=at, env=os.environ | given, check=True, stdout=sys.stderr)


def packages(release: Release) -> None:
    """The sdist, of it a wheel for each machine and one for all others, and the licences."""
    release.run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", release.out)
    name = f"steersman-{release.version}"
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(release.out / f"{name}.tar.gz") as archive:
            archive.extraction_filter = getattr(
                tarfile, "data_filter", None
            )  # Python 3.11.4 or later
            archive.extractall(folder)
        place = Path(folder, name)
        build = (sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", release.out)
        for machine in (*hatch_build.MACHINES, "any"):
            release.run(*build, at=place, **{hatch_build.WHEEL_FOR: machine})
    shutil.copy(ROOT / "NOTICE", release.out)


def chart(release: Release) -> None:
    """The chart as `helm package` names it, the same at every build."""
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for path in sorted(each for each in CHART.rglob("*") if each.is_file()):
            data = path.read_bytes()
            member = tarfile.TarInfo(f"steersman/{path.relative_to(CHART)}")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    archive = release.out / f"steersman-{release.version}.tgz"
    archive.write_bytes(gzip.compress(plain.getvalue(), mtime=0))


def manifests(release: Release) -> None:
    """A file for each mode, for those who use neither helm nor kustomize."""
    for values in sorted(CHART.glob("values-*.yaml")):
        mode = values.stem.removeprefix("values-")
        if mode == "recommended":  # beside those of a mode: what goes beyond upstream's behaviour
            continue
        name = release.out / f"steersman-{mode}.yaml"
        name.write_text(manifest(mode, yaml.safe_load(values.read_text())))


def manifest(mode: str, values: dict[str, object]) -> str:
    """Return what the chart renders for a mode, as one file."""
    import helm_python as helm  # noqa: PLC0415 - there is none for every machine

    with helm.Chart.load(CHART) as loaded:
        given = {**values, "apiServers": [API_SERVER]}
        texts = loaded.render(given, name="steersman", namespace="kube-system")
    head = HEAD.format(version=__version__, mode=mode, server=API_SERVER)
    # Accounts, rights and settings come before what uses them.
    order = ("serviceaccount", "rbac", "configmap", "daemonset")
    found = {Path(name).stem: text for name, text in texts.items() if name.endswith(".yaml")}
    documents = [found[name].strip() for name in order if found.get(name, "").strip()]
    return head + "".join(f"---\n{text.removeprefix('---').strip()}\n" for text in documents)


def plugin(release: Release) -> None:
    """The kubectl plugin's archive, and its manifest for krew."""
    data = krew.archive()
    name = f"kubectl-steersman-v{release.version}.tar.gz"
    (release.out / name).write_bytes(data)
    url = f"{release.url.rstrip('/')}/{name}".lstrip("/")
    (release.out / "krew-steersman.yaml").write_text(krew.manifest(url, data))


def debian(release: Release) -> None:
    """The Debian packages."""
    for arch in ("amd64", "arm64"):
        place = release.out / "deb"
        release.run("scripts/deb.sh", ARCH=arch, OUT=str(place), WHEELS=str(release.out))
        for path in place.glob("*.deb"):
            path.replace(release.out / path.name)
        shutil.rmtree(place)


def image(release: Release) -> None:
    """The image for both architectures as an archive of OCI's layout, with its SBOMs."""
    place = release.out / "image"
    environment = {"ARCHS": "amd64 arm64", "OUT": str(place), "WHEELS": str(release.out)}
    release.run("scripts/image.sh", **environment)
    stem = f"steersman-{release.version}"
    (place / "steersman.oci.tar").replace(release.out / f"{stem}.oci.tar")
    (place / "digests.txt").replace(release.out / f"{stem}.oci.digests.txt")
    for arch in ("amd64", "arm64"):
        path = place / f"sbom-{arch}.spdx.json"
        path.replace(release.out / f"{stem}-{arch}.spdx.json")
    shutil.rmtree(place)


PARTS: dict[str, Callable[[Release], None]] = {
    "packages": packages,
    "chart": chart,
    "manifests": manifests,
    "plugin": plugin,
    "debian": debian,
    "image": image,
}


def git(*words: str) -> str:
    """Return what git prints."""
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def refusal(version: str) -> str:
    """Why this tree is no release of that version; "" where it may be."""
    if changes := git("status", "--porcelain"):
        return f"the tree has changes that no commit has:\n{changes}"
    if version != __version__:
        return f"the program's version is {__version__} (src/steersman/__init__.py), not {version}"
    heading = rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$"
    if not re.search(heading, (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE):
        return f"CHANGELOG.md has no section `## [{version}] - YEAR-MONTH-DAY`"
    if (ROOT / "NOTICE").read_text() != notice.notice():
        return "NOTICE is not up to date: run `make notice`"
    return ""


def checksums(files: Iterable[Path]) -> str:
    """Return what `sha256sum --check` reads."""
    lines = [f"{hashlib.sha256(each.read_bytes()).hexdigest()}  {each.name}\n" for each in files]
    return "".join(lines)


def main() -> None:
    """Build a release, or say why not."""
    parser = argparse.ArgumentParser()
    parser.add_argument("version")
    parser.add_argument("--url", default="")
    parser.add_argument("--check", default="make check")
    parser.add_argument("--only", action="append", choices=PARTS)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "release")
    given = parser.parse_args()
    if reason := refusal(given.version):
        sys.exit(f"release: {reason}")
    if "packages" in (given.only or PARTS):
        for reason in filter(None, map(hatch_build.extension_problem, hatch_build.MACHINES)):
            sys.exit(f"release: {reason}")
    if subprocess.run(shlex.split(given.check), cwd=ROOT, check=False).returncode:
        sys.exit(f"release: the checks fail (`{given.check}`)")
    shutil.rmtree(given.out, ignore_errors=True)
    given.out.mkdir(parents=True)
    revision = git("rev-parse", "HEAD")
    os.environ.setdefault("SOURCE_DATE_EPOCH", git("log", "-1", "--format=%ct"))
    os.environ["REVISION"] = revision
    release = Release(given.version, given.url, given.out.absolute())
    for name, build in PARTS.items():
        if name in (given.only or PARTS):
            print(f"release: {name}", file=sys.stderr)
            build(release)
    files = sorted(release.out.iterdir())
    done = subprocess.run(
        [sys.executable, "scripts/provenance.py", *files], cwd=ROOT, capture_output=True, check=True
    )
    (release.out / "provenance.json").write_bytes(done.stdout)
    files = sorted(release.out.iterdir())
    (release.out / "SHA256SUMS").write_text(checksums(files))
    if git("status", "--porcelain") or git("rev-parse", "HEAD") != revision:
        sys.exit("release: the tree was changed while the release was built; build it again")
    print(f"release: {len(files) + 1} files in {release.out}", file=sys.stderr)


if __name__ == "__main__":
    main()
