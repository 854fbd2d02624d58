"""What `make image` is made of, without building anything."""

from __future__ import annotations

import gzip
import io
import json
import re
import struct
import tarfile
import tomllib
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from scripts import image_layer, image_lock, image_oci, image_sbom, provenance

ROOT = Path(__file__).parents[3]
LOCK = (ROOT / "requirements.lock").read_text()


def test_lock_of_the_image_has_what_runs_and_no_tools() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    running = {Requirement(text).name.lower() for text in project["dependencies"]}
    assert running <= image_lock.runtime()
    assert not image_lock.runtime() & {"aiohttp", "pytest", "mypy", "hypothesis"}
    assert image_lock.runtime() <= image_lock.entries(LOCK).keys()


def test_entries_of_the_lock_keep_their_hashes() -> None:
    entries = image_lock.entries(LOCK)
    assert "".join(entries.values()).count("--hash=") == LOCK.count("--hash=")
    for name, text in entries.items():
        assert re.match(rf"{name.replace('-', '[-_.]')}==", text, re.IGNORECASE)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("./usr/bin/python3.11", True),
        ("./etc/passwd", True),
        ("./var/lib/dpkg/status.d/nftables", True),
        ("./var/lib/dpkg/status", False),
        ("./dev/null", False),
        ("./devices", True),
        ("./etc/hostname", False),
        ("./var/cache/apt/archives/lock", False),
    ],
)
def test_what_is_part_of_the_layer(name: str, expected: bool) -> None:
    assert image_layer.wanted(name) == expected


def archive(*names: str, mtime: int) -> io.BytesIO:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name in names:
            member = tarfile.TarInfo(name)
            member.size, member.mtime = len(name), mtime
            tar.addfile(member, io.BytesIO(name.encode()))
    out.seek(0)
    return out


def layer(source: io.BytesIO, newest: int) -> bytes:
    out = io.BytesIO()
    with (
        tarfile.open(fileobj=source, mode="r|") as have,
        tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as made,
    ):
        image_layer.copy(have, made, newest)
    return out.getvalue()


def test_layer_is_the_same_whenever_it_is_made() -> None:
    names = ("./usr/sbin/nft", "./usr/local/bin/setpriv-net", "./etc/hostname")
    once = layer(archive(*names, mtime=2000), 1000)
    assert once == layer(archive(*names, mtime=3000), 1000)
    with tarfile.open(fileobj=io.BytesIO(once)) as made:
        assert made.getnames() == ["./usr/sbin/nft", "./usr/local/bin/setpriv-net"]
        content = made.extractfile("./usr/sbin/nft")
        assert content is not None
        assert content.read() == b"./usr/sbin/nft"


def test_only_the_launcher_has_capabilities() -> None:
    text = layer(archive("./usr/sbin/nft", "./usr/local/bin/setpriv-net", mtime=1), 1)
    with tarfile.open(fileobj=io.BytesIO(text)) as made:
        other, launcher = made.getmembers()
    assert other.pax_headers == {}
    value = launcher.pax_headers["SCHILY.xattr.security.capability"].encode()
    magic, permitted, inheritable, *rest = struct.unpack("<5I", value)
    assert magic == 0x02000000, "version 2, not effective"
    names = {bit for bit in range(32) if permitted >> bit & 1}
    assert names == {12, 13, 24}, "CAP_NET_ADMIN, CAP_NET_RAW, CAP_SYS_RESOURCE"
    assert [inheritable, *rest] == [0, 0, 0]


def filesystem(root: Path) -> Path:
    status = root / image_sbom.STATUS
    status.mkdir(parents=True)
    (status / "libc6").write_text(
        "Package: libc6\nVersion: 1:2.36-9+deb12u1\nArchitecture: amd64\nMaintainer: A <a@b>\n"
        "Description: the library\n long text\n"
    )
    for name, licence in (("steersman", "License-Expression: Apache-2.0\n"), ("PyYAML", "")):
        folder = root / image_sbom.PACKAGES / f"{name}-1.0.dist-info"
        folder.mkdir(parents=True)
        text = f"Metadata-Version: 2.4\nName: {name}\nVersion: 1.0\n{licence}"
        (folder / "METADATA").write_text(text)
    return root


def test_list_of_contents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "86400")
    made = image_sbom.document(filesystem(tmp_path))
    assert made["creationInfo"]["created"] == "1970-01-02T00:00:00Z"
    purls = [each["externalRefs"][0]["referenceLocator"] for each in made["packages"]]
    assert purls == [
        "pkg:oci/steersman?tag=1.0",
        "pkg:deb/debian/libc6@1%3A2.36-9%2Bdeb12u1?arch=amd64",
        "pkg:pypi/pyyaml@1.0",
        "pkg:pypi/steersman@1.0",
    ]
    licences = {each["name"]: each["licenseDeclared"] for each in made["packages"][1:]}
    assert licences == {"libc6": "NOASSERTION", "PyYAML": "NOASSERTION", "steersman": "Apache-2.0"}
    kinds = [each["relationshipType"] for each in made["relationships"]]
    assert kinds == ["DESCRIBES", "CONTAINS", "CONTAINS", "CONTAINS"]
    assert json.loads(json.dumps(made)) == made


def test_an_image_of_two_architectures_is_an_index_of_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("SOURCE_DATE_EPOCH", "86400"), ("VERSION", "1.0"), ("REVISION", "abc")):
        monkeypatch.setenv(name, value)
    for arch in ("amd64", "arm64"):
        (tmp_path / arch).write_bytes(arch.encode() * 1000)
    archives = [tmp_path / "one.tar", tmp_path / "two.tar"]
    for path in archives:
        words = [str(path), "steersman:1.0", f"amd64={tmp_path}/amd64", f"arm64={tmp_path}/arm64"]
        monkeypatch.setattr("sys.argv", ["image_oci.py", *words])
        image_oci.main()
    assert archives[0].read_bytes() == archives[1].read_bytes()
    said = capsys.readouterr().out.splitlines()
    with tarfile.open(archives[0]) as archive:

        def blob(descriptor: dict[str, Any]) -> bytes:
            found = archive.extractfile(f"blobs/{descriptor['digest'].replace(':', '/')}")
            assert found is not None
            data = found.read()
            assert len(data) == descriptor["size"]
            assert f"sha256:{sha256(data).hexdigest()}" == descriptor["digest"]
            return data

        entry = archive.extractfile("index.json")
        assert entry is not None
        (top,) = json.load(entry)["manifests"]
        assert top["digest"] == said[0]
        platforms = json.loads(blob(top))["manifests"]
        assert [each["platform"]["architecture"] for each in platforms] == ["amd64", "arm64"]
        for each in platforms:
            manifest = json.loads(blob(each))
            config = json.loads(blob(manifest["config"]))
            assert config["architecture"] == each["platform"]["architecture"]
            assert config["config"]["Labels"]["org.opencontainers.image.version"] == "1.0"
            layer = gzip.decompress(blob(manifest["layers"][0]))
            assert layer == (tmp_path / config["architecture"]).read_bytes()
            assert config["rootfs"]["diff_ids"] == [f"sha256:{sha256(layer).hexdigest()}"]


def test_provenance_names_files_and_source(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    subjects = [provenance.subject(f"{tmp_path}/file"), provenance.subject("image:1=sha256:ab")]
    made = provenance.statement(subjects, "abc", 0)
    assert made["subject"] == [
        {"name": "file", "digest": {"sha256": sha256(b"text").hexdigest()}},
        {"name": "image:1", "digest": {"sha256": "ab"}},
    ]
    resolved = made["predicate"]["buildDefinition"]["resolvedDependencies"]
    assert resolved[0]["digest"] == {"gitCommit": "abc"}
    assert sha256(LOCK.encode()).hexdigest() in {each["digest"].get("sha256") for each in resolved}
