"""requirements.lock: every package by hash, from no particular host, for all that is needed."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import distribution

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from scripts import image_lock
from tests.packaging.artefacts import ROOT

TEXT = image_lock.LOCK.read_text()
ENTRIES = image_lock.entries(TEXT)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_every_package_has_hashes_of_its_files() -> None:
    assert len(ENTRIES) > 20
    for name, entry in ENTRIES.items():
        hashes = re.findall(r"--hash=(\S+)", entry)
        assert hashes, name
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", each) for each in hashes), name


def test_no_line_names_a_host_or_a_place() -> None:
    pattern = re.compile(r"://|@ |^-|--(index|extra-index|find-links|trusted-host)", re.MULTILINE)
    assert pattern.findall(TEXT) == []


def test_every_package_runs_on_the_oldest_python_that_we_support() -> None:
    # That of Debian 12: `make setup` installs all of the lock there.
    needs = {name: distribution(name).metadata["Requires-Python"] for name in ENTRIES}
    too_new = {
        name: text for name, text in needs.items() if "3.11.2" not in SpecifierSet(text or "")
    }
    assert not too_new


@pytest.mark.parametrize("extra", ["", *sorted(PROJECT["optional-dependencies"])])
def test_every_dependency_is_locked_at_a_version_that_is_allowed(extra: str) -> None:
    texts = PROJECT["optional-dependencies"][extra] if extra else PROJECT["dependencies"]
    for requirement in map(Requirement, texts):
        if requirement.marker is None or requirement.marker.evaluate():
            entry = ENTRIES[canonicalize_name(requirement.name)]
            version = re.match(r"[^=]+==([^\s\\]+)", entry)
            assert version
            assert requirement.specifier.contains(version[1], prereleases=True), requirement
