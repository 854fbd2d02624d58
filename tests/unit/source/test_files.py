"""Directories of manifests: read, watched, and what happens when files are bad."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Container, Iterable, Sequence
from pathlib import Path

import pytest
import pytest_asyncio

from steersman.host.directories import Inotify
from steersman.model.findings import Finding
from steersman.model.kube import KINDS, KubeObject, Service
from steersman.model.names import ObjectName
from steersman.source import files as files_module
from steersman.source.files import FileSource
from steersman.source.manifests import Manifest, read_manifest
from steersman.source.store import Store


class Seen(Store):
    """A Store that remembers what it was fed."""

    def __init__(self) -> None:
        super().__init__()
        self.objects: dict[str, dict[ObjectName, KubeObject]] = {}
        self.by_scope: dict[str, list[Finding]] = {}
        self.upserts: list[str] = []
        self._fresh: dict[ObjectName, KubeObject] = {}
        self._news = asyncio.Event()

    def retain(self, kind: str, names: Container[ObjectName], keep: Container[str] = ()) -> None:
        known = {**self.objects.get(kind, {}), **self._fresh}
        self.objects[kind] = {
            name: obj for name, obj in known.items() if name in names or f"{kind} {name}" in keep
        }
        self._fresh = {}
        self._news.set()

    def upsert(self, obj: KubeObject) -> bool:
        self.upserts.append(obj.metadata.name)
        self._fresh[obj.metadata.object_name] = obj
        return True

    def delete(self, kind: str, name: ObjectName) -> bool:
        raise AssertionError("a file that is gone is not among the names that are kept")

    def report(self, scope: str, findings: Sequence[Finding]) -> None:
        self.by_scope[scope] = list(findings)
        self._news.set()

    @property
    def services(self) -> dict[str, str | None]:
        """Addresses of the Services by name."""
        objects = self.objects.get("Service", {}).values()
        found = [obj for obj in objects if isinstance(obj, Service)]
        return {service.metadata.name: service.spec.cluster_ip for service in found}

    def told(self, path: Path) -> str:
        """The message about a file, in one line."""
        return "; ".join(map(str, self.by_scope.get(str(path), ())))

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                self._news.clear()
                await self._news.wait()


def service(name: str, last: int = 1) -> str:
    return (
        f"apiVersion: v1\nkind: Service\nmetadata: {{name: {name}}}\n"
        f"spec: {{clusterIP: 10.96.0.{last}, ports: [{{port: 80}}]}}\n"
    )


@pytest_asyncio.fixture
async def watching(tmp_path: Path) -> AsyncIterator[Callable[..., Seen]]:
    tasks: list[asyncio.Task[None]] = []

    def start(*directories: Path) -> Seen:
        seen = Seen()
        source = FileSource(directories or [tmp_path])
        tasks.append(asyncio.create_task(source.run(seen)))
        return seen

    yield start
    for task in tasks:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(result, asyncio.CancelledError) for result in results), results


Watching = Callable[..., Seen]


async def test_every_kind_is_fed_at_the_start(tmp_path: Path, watching: Watching) -> None:
    (tmp_path / "a.yaml").write_text(service("a"))
    (tmp_path / "b.yml").write_text(service("b"))
    (tmp_path / "c.json").write_text('{"kind": "Node", "metadata": {"name": "n"}}')
    (tmp_path / "README.md").write_text("no manifest")
    (tmp_path / ".hidden.yaml").write_text(service("hidden"))
    (tmp_path / "sub.yaml").mkdir()
    seen = watching()
    await seen.until(lambda: seen.objects.keys() == KINDS.keys())
    assert seen.services.keys() == {"a", "b"}
    assert len(seen.objects["Node"]) == 1
    assert seen.by_scope == {}


async def test_an_empty_directory_is_an_empty_world(watching: Watching) -> None:
    seen = watching()
    await seen.until(lambda: seen.objects.keys() == KINDS.keys())
    assert seen.services == {}


async def test_files_come_change_and_go(tmp_path: Path, watching: Watching) -> None:
    seen = watching()
    file = tmp_path / "a.yaml"
    await seen.until(lambda: seen.objects)
    file.write_text(service("a"))
    await seen.until(lambda: seen.services == {"a": "10.96.0.1"})
    file.write_text(service("a", 2))
    await seen.until(lambda: seen.services == {"a": "10.96.0.2"})
    file.unlink()
    await seen.until(lambda: seen.services == {})


async def test_an_editor_that_renames_and_replaces(tmp_path: Path, watching: Watching) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(service("a", 1))
    seen = watching()
    for last in (2, 3, 4):
        await seen.until(lambda: seen.services)
        (tmp_path / ".a.yaml.swp").write_text(service("a", last))
        (tmp_path / "a.yaml").rename(tmp_path / "a.yaml~")
        (tmp_path / ".a.yaml.swp").rename(file)
        await seen.until(lambda last=last: seen.services == {"a": f"10.96.0.{last}"})  # type: ignore[misc]


async def test_a_config_map_mount_that_swaps_its_data(tmp_path: Path, watching: Watching) -> None:
    def fill(generation: int) -> None:
        data = tmp_path / f"..{generation}"
        data.mkdir()
        (data / "a.yaml").write_text(service("a", generation))
        (tmp_path / "..data_tmp").symlink_to(data.name)
        (tmp_path / "..data_tmp").rename(tmp_path / "..data")

    fill(1)
    (tmp_path / "a.yaml").symlink_to("..data/a.yaml")
    seen = watching()
    await seen.until(lambda: seen.services == {"a": "10.96.0.1"})
    fill(2)
    await seen.until(lambda: seen.services == {"a": "10.96.0.2"})


async def test_a_link_to_a_file_elsewhere(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, watching: Watching
) -> None:
    target = tmp_path_factory.mktemp("elsewhere") / "a.yaml"
    target.write_text(service("a"))
    (tmp_path / "a.yaml").symlink_to(target)
    seen = watching()
    await seen.until(lambda: seen.services)
    target.write_text(service("a", 2))
    await seen.until(lambda: seen.services == {"a": "10.96.0.2"})
    target.unlink()
    await seen.until(lambda: "cannot be read" in seen.told(tmp_path / "a.yaml"))
    assert seen.services == {"a": "10.96.0.2"}


async def test_a_directory_that_is_a_link_and_swapped(tmp_path: Path, watching: Watching) -> None:
    for last in (1, 2):
        (tmp_path / f"v{last}").mkdir()
        (tmp_path / f"v{last}" / "a.yaml").write_text(service("a", last))
    current = tmp_path / "current"
    current.symlink_to("v1")
    seen = watching(current)
    await seen.until(lambda: seen.services == {"a": "10.96.0.1"})
    (tmp_path / "next").symlink_to("v2")
    (tmp_path / "next").rename(current)
    await seen.until(lambda: seen.services == {"a": "10.96.0.2"})
    (current / "a.yaml").write_text(service("a", 3))
    await seen.until(lambda: seen.services == {"a": "10.96.0.3"})


async def test_nothing_is_fed_before_each_directory_is_there(
    tmp_path: Path, watching: Watching
) -> None:
    here, later = tmp_path / "here", tmp_path / "some" / "where" / "later"
    here.mkdir()
    (here / "a.yaml").write_text(service("a"))
    seen = watching(here, later)
    await seen.until(lambda: "nothing is done before it exists" in seen.told(later))
    assert not seen.objects
    later.mkdir(parents=True)
    (later / "b.yaml").write_text(service("b"))
    await seen.until(lambda: seen.services.keys() == {"a", "b"})
    assert seen.told(later) == ""


async def test_a_directory_that_vanishes_and_returns(tmp_path: Path, watching: Watching) -> None:
    directory = tmp_path / "d"
    directory.mkdir()
    (directory / "a.yaml").write_text(service("a"))
    seen = watching(directory)
    await seen.until(lambda: seen.services)
    directory.rename(tmp_path / "gone")
    await seen.until(lambda: "stays in force" in seen.told(directory))
    assert seen.services == {"a": "10.96.0.1"}
    directory.mkdir()
    (directory / "b.yaml").write_text(service("b"))
    await seen.until(lambda: seen.services.keys() == {"b"})
    assert seen.told(directory) == ""


async def test_a_broken_file_keeps_its_last_good_content(
    tmp_path: Path, watching: Watching
) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(service("a"))
    seen = watching()
    await seen.until(lambda: seen.services)
    file.write_text(service("b") + "spec: [\n")
    await seen.until(lambda: seen.told(file))
    assert seen.services == {"a": "10.96.0.1"}
    assert seen.told(file).startswith(f"{file} line 6: is not YAML")
    file.write_text(service("b"))
    await seen.until(lambda: seen.services.keys() == {"b"})
    assert seen.told(file) == ""


async def test_a_malformed_object_keeps_its_last_good_version(
    tmp_path: Path, watching: Watching
) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(service("a") + "---\n" + service("b"))
    seen = watching()
    await seen.until(lambda: seen.services)
    file.write_text(service("a", 2) + "---\n" + service("b").replace("80", "http"))
    await seen.until(lambda: seen.services["a"] == "10.96.0.2")
    assert seen.services["b"] == "10.96.0.1"
    assert "the last good version, if any, stays in force" in seen.told(file)
    file.write_text(service("a", 3))
    await seen.until(lambda: seen.services == {"a": "10.96.0.3"})
    assert seen.told(file) == ""


async def test_a_file_that_is_broken_from_the_start(tmp_path: Path, watching: Watching) -> None:
    (tmp_path / "a.yaml").write_text("{")
    (tmp_path / "b.yaml").write_text(service("b"))
    seen = watching()
    await seen.until(lambda: seen.services)
    assert seen.services.keys() == {"b"}
    assert "a.yaml line" in seen.told(tmp_path / "a.yaml")


async def test_a_file_that_is_still_written_keeps_its_content(
    tmp_path: Path, watching: Watching, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files_module, "_WRITER_SECONDS", 60.0)
    file = tmp_path / "a.yaml"
    file.write_text(service("a"))
    seen = watching()
    await seen.until(lambda: seen.services)
    with file.open("w") as writer:  # cut off now, written later, as `kubectl get > a.yaml`
        (tmp_path / "b.yaml").write_text(service("b"))
        await seen.until(lambda: "b" in seen.services)
        assert seen.services == {"a": "10.96.0.1", "b": "10.96.0.1"}
        writer.write(service("a", 2))
    await seen.until(lambda: seen.services["a"] == "10.96.0.2")


async def test_a_file_that_stays_open_is_read_in_the_end(
    tmp_path: Path, watching: Watching, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files_module, "_WRITER_SECONDS", 0.1)
    seen = watching()
    await seen.until(lambda: seen.objects)
    with (tmp_path / "a.yaml").open("w") as writer:
        writer.write(service("a"))
        writer.flush()
        await seen.until(lambda: seen.services)


async def test_only_what_changed_is_read_again(
    tmp_path: Path, watching: Watching, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []

    def reading(path: str, data: bytes) -> Manifest:
        read.append(path)
        return read_manifest(path, data)

    monkeypatch.setattr(files_module, "read_manifest", reading)
    for name in ("a", "b"):
        (tmp_path / f"{name}.yaml").write_text(service(name))
        os.utime(tmp_path / f"{name}.yaml", (1e9, 1e9))
    seen = watching()
    await seen.until(lambda: len(seen.services) == 2)
    read.clear()
    seen.upserts.clear()
    (tmp_path / "b.yaml").write_text(service("b", 7))
    await seen.until(lambda: seen.services["b"] == "10.96.0.7")
    assert set(read) == {str(tmp_path / "b.yaml")}
    assert set(seen.upserts) == {"b"}


async def test_a_duplicate_is_told_until_it_is_gone(tmp_path: Path, watching: Watching) -> None:
    (tmp_path / "a.yaml").write_text(service("a", 1))
    (tmp_path / "b.yaml").write_text(service("a", 2))
    seen = watching()
    await seen.until(lambda: seen.services)
    assert seen.services == {"a": "10.96.0.1"}
    assert "is also in" in seen.told(tmp_path / "b.yaml")
    (tmp_path / "a.yaml").unlink()
    await seen.until(lambda: seen.services == {"a": "10.96.0.2"})
    assert seen.told(tmp_path / "b.yaml") == ""


@pytest.mark.parametrize("method", ["__init__", "watch"])
async def test_without_inotify_files_are_looked_at(
    tmp_path: Path, watching: Watching, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    def none_left(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Inotify, method, none_left)
    seen = watching()
    await seen.until(lambda: seen.objects)
    assert "max_user" in seen.told(Path("inotify"))
    (tmp_path / "a.yaml").write_text(service("a"))
    await seen.until(lambda: seen.services)


async def test_watches_that_run_out_later_are_done_without(
    tmp_path: Path, watching: Watching, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(*_: object) -> None:
        raise OSError(28, "No space left on device")

    seen = watching()
    await seen.until(lambda: seen.objects)
    monkeypatch.setattr(Inotify, "watch", none_left)
    (tmp_path / "a.yaml").write_text(service("a"))
    await seen.until(lambda: "max_user" in seen.told(Path("inotify")))
    (tmp_path / "b.yaml").write_text(service("b"))
    await seen.until(lambda: seen.services.keys() == {"a", "b"})


async def test_a_directory_that_goes_while_it_is_watched_is_looked_for_again(
    tmp_path: Path, watching: Watching, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, watch = tmp_path / "m", Inotify.watch
    folder.mkdir()
    (folder / "a.yaml").write_text(service("a"))

    def too_late(self: Inotify, directories: Iterable[Path]) -> bool:
        listed = list(directories)
        if folder in listed and not (tmp_path / "gone").exists():
            folder.rename(tmp_path / "gone")
        return watch(self, listed)

    seen = watching(folder)
    await seen.until(lambda: seen.services)
    monkeypatch.setattr(Inotify, "watch", too_late)
    (folder / "b.yaml").write_text(service("b"))
    await seen.until(lambda: "cannot be read" in seen.told(folder))
    (tmp_path / "gone").rename(folder)
    (folder / "c.yaml").write_text(service("c"))
    await seen.until(lambda: seen.services.keys() == {"a", "b", "c"})
    assert not seen.told(Path("inotify"))


async def test_what_would_take_for_ever_is_told_and_the_rest_is_in_force(
    tmp_path: Path, watching: Watching
) -> None:
    (tmp_path / "a.yaml").write_text(service("a"))
    (tmp_path / "bomb.yaml").write_text(f"&a\nkind: List\nitems: [{', '.join(['*a'] * 30)}]\n")
    with (tmp_path / "huge.yaml").open("wb") as file:
        file.truncate(1_500_000_000)  # takes no room on the disk
    os.mkfifo(tmp_path / "fifo.yaml")
    (tmp_path / "zero.yaml").symlink_to("/dev/zero")
    (tmp_path / "loop.yaml").symlink_to("loop.yaml")
    (tmp_path / "dir.yaml").mkdir()
    seen = watching()
    await seen.until(lambda: seen.services == {"a": "10.96.0.1"})
    bomb = seen.told(tmp_path / "bomb.yaml")
    assert "holds itself by an alias; nothing of it is in force" in bomb
    assert "longer than 33554432 bytes" in seen.told(tmp_path / "huge.yaml")
    assert "cannot be read (Too many levels" in seen.told(tmp_path / "loop.yaml")
    (tmp_path / "bomb.yaml").write_text(service("b"))
    await seen.until(lambda: seen.services.keys() == {"a", "b"})


async def test_all_files_together_are_limited(
    tmp_path: Path, watching: Watching, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = service("a")
    monkeypatch.setattr(files_module, "MAX_TOTAL_BYTES", 2 * len(text) + 1)
    for name in "abc":
        (tmp_path / f"{name}.yaml").write_text(service(name))
    seen = watching()
    await seen.until(lambda: seen.services)
    assert seen.services.keys() == {"a", "b"}
    assert "all manifests together" in seen.told(tmp_path / "c.yaml")
    (tmp_path / "a.yaml").unlink()
    await seen.until(lambda: seen.services.keys() == {"b", "c"})


async def test_files_of_a_directory_are_limited_in_number(
    tmp_path: Path, watching: Watching, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files_module, "MAX_FILES", 2)
    for name in "abc":
        (tmp_path / f"{name}.yaml").write_text(service(name))
    seen = watching()
    await seen.until(lambda: seen.services)
    assert seen.services.keys() == {"a", "b"}
    assert "has 3 manifests; only the first 2" in seen.told(tmp_path)


async def test_files_are_read_again_if_no_thread_can_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals = [OSError(11, "no thread can be started"), OSError(11, "no thread can be started")]

    async def in_thread(call: Callable[..., object], *args: object) -> object:
        if refusals:
            raise refusals.pop()
        return call(*args)

    monkeypatch.setattr(files_module, "in_thread", in_thread)
    monkeypatch.setattr(files_module, "_RETRY_SECONDS", 0.01)
    seen = Seen()
    task = asyncio.create_task(FileSource([tmp_path]).run(seen))
    await seen.until(lambda: "Service" in seen.objects)
    assert not refusals
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
