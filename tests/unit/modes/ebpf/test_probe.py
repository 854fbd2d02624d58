"""Sentences about what this machine lacks."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from steersman.host import libbpf
from steersman.modes.base import Support
from steersman.modes.ebpf import bpf, probe
from steersman.modes.ebpf.probe import FEATURES, Feature, missing_features

OLD = Feature("maps", "5.5", lambda: False)
MILD = Feature("TCX", "6.6", lambda: False, "filters take its place")


def test_each_missing_feature_is_named_with_its_kernel() -> None:
    found = probe.probe(Path("/nowhere/steersman-el.o"), Path("/"), lambda: (OLD, MILD))
    assert "This kernel lacks maps, which came with Linux 5.5." in found.missing
    assert (
        "This kernel lacks TCX, which came with Linux 6.6; filters take its place." in found.missing
    )
    assert "steersman-el.o" in " ".join(found.missing)
    assert not found.usable


@pytest.fixture
def complete(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that has all but a kernel with every feature."""
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr(probe, "library", lambda: None)


@pytest.mark.usefixtures("complete")
def test_a_new_kernel_lacks_nothing(tmp_path: Path) -> None:
    (tmp_path / "cgroup.procs").touch()
    assert probe.probe(tmp_path, tmp_path, tuple) == Support(usable=True)


@pytest.mark.usefixtures("complete")
def test_a_cgroup_that_is_named_must_be_one(tmp_path: Path) -> None:
    found = probe.probe(tmp_path, tmp_path, tuple)
    assert not found.usable
    assert "--ebpf-cgroup-root" in found.missing[0]


@pytest.mark.usefixtures("complete")
def test_a_part_of_the_hierarchy_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(probe, "cgroup_root", lambda: tmp_path)
    assert probe.probe(tmp_path, None, tuple) == Support(usable=True)
    (tmp_path / "cgroup.type").touch()
    found = probe.probe(tmp_path, None, tuple)
    assert found.usable
    assert "not the root of all cgroups" in found.missing[0]


CGROUP2 = "{0} 31 0:38 {1} {2} rw,relatime shared:9 - cgroup2 cgroup2 rw"


@pytest.mark.parametrize(
    ("mounts", "chosen"),
    [
        ([], None),
        ([("/", "/sys/fs/cgroup")], "/sys/fs/cgroup"),
        ([("/", "/run/other"), ("/", "/sys/fs/cgroup")], "/sys/fs/cgroup"),
        ([("/", "/sys/fs/cgroup"), ("/", "/run/other")], "/sys/fs/cgroup"),
        ([("/", "/run/other"), ("/", "/sys/fs/cgroup/unified")], "/sys/fs/cgroup/unified"),
        ([("/", "/run/whole"), ("/kubepods", "/run/part")], "/run/whole"),
        ([("/pod", "/run/with\\040space")], "/run/with space"),
    ],
)
def test_the_usual_mount_of_cgroup2_is_preferred(
    mounts: list[tuple[str, str]], chosen: str | None
) -> None:
    others = ["29 1 0:26 / /sys/fs/cgroup ro - tmpfs tmpfs ro", "30 1 0:5 / /x rw - cgroup cg rw"]
    lines = [CGROUP2.format(40 + n, *mount) for n, mount in enumerate(mounts)]
    found = probe.choose_mount("\n".join([*others, *lines]), "/sys/fs/cgroup")
    assert found == (Path(chosen) if chosen else None)


@pytest.mark.usefixtures("complete")
def test_it_runs_without_what_can_be_replaced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(probe, "cgroup_root", lambda: None)
    found = probe.probe(tmp_path, None, lambda: (MILD,))
    assert found.usable
    assert [sentence.split()[1] for sentence in found.missing] == ["kernel", "cgroup2"]


def test_what_is_not_permitted_is_not_taken_for_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(code: int) -> None:
        def call(*_: object) -> None:
            raise OSError(code, "refused")

        for module in (bpf, libbpf):
            monkeypatch.setattr(module, "call", call)

    refuse(errno.EPERM)
    assert not missing_features()
    refuse(errno.EINVAL)
    assert missing_features() == FEATURES
