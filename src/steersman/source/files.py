"""Directories of manifests as a Source: read once, then again as files change.

Looks and compares; what files mean is in `manifests`.
"""

from __future__ import annotations

import asyncio
import math
import os
import stat
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from steersman.host.files import FileEvent, Inotify, Polling, read_file
from steersman.host.process import in_thread
from steersman.model.findings import Finding, Severity
from steersman.model.kube import KubeObject
from steersman.model.names import ObjectName
from steersman.source.base import EventHandler, upsert_in_slices
from steersman.source.documents import BrokenFileError
from steersman.source.manifests import Manifest, World, combine
from steersman.source.pieces import Known, read_again

_SUFFIXES = (".yaml", ".yml", ".json")
_RACY_NS = 50_000_000  # a file this young may change again within the clock's granularity
_RESCAN_SECONDS = 30.0  # looks anyway: file systems of others (NFS) send no events
_SETTLE_SECONDS = 0.02  # editors and tools do several things at once
_SETTLE_ROUNDS = 4
_POLL_SECONDS = 0.1  # without inotify
_WRITER_SECONDS = 2.0  # how long a file that is open and half written is waited for


MOST_BYTES = 32 << 20
"""Of one file; 10,000 Services with their slices, as kubectl prints them, are about 30 MB."""
MOST_BYTES_TOGETHER = 256 << 20
MOST_FILES = 10_000


class _File(NamedTuple):
    """A file as last read."""

    signature: tuple[int, ...] | None
    """None: read it again at the next look, whatever `stat` says."""
    manifest: Manifest
    """The last good content."""
    known: Known
    """Of its pieces, for the next time that it is read."""
    fault: Finding | None = None
    size: int = 0
    """Bytes that were read."""


class _Scan(NamedTuple):
    """All directories as last read: a value; the next look makes a new one from it."""

    files: Mapping[Path, _File] = {}
    faults: Mapping[Path, Finding] = {}
    """What is wrong with the directories themselves."""
    linked: frozenset[Path] = frozenset()
    """Other directories that files here are links into."""
    seen: frozenset[Path] = frozenset()
    """The directories that were there at some time."""


class FileSource:
    """Feeds a EventHandler from the `*.yaml`, `*.yml` and `*.json` files right in some directories.

    Hidden files and sub-directories are left alone, as by `kubectl -f DIR`. A file that breaks
    keeps its last good content, so does a directory that vanishes; nothing is fed before each
    directory has been there once. Faults become Findings, in the scope of the file's path.
    """

    def __init__(self, directories: Sequence[Path]) -> None:
        """Name the directories (a single file will do, too)."""
        self._directories = tuple(directories)
        self._scan = _Scan()
        self._fed: dict[str, dict[ObjectName, KubeObject]] = {}
        self._reported: frozenset[str] = frozenset()
        self._writing: dict[Path, float] = {}

    async def run(self, handler: EventHandler) -> None:
        """Feed the handler until cancelled."""
        watch = self._open(handler)
        try:
            while True:
                news = await self._refresh(handler, watch)
                watch, changed = self._watch(handler, watch)
                news |= changed
                await self._rest(watch, 0.0 if news else _RESCAN_SECONDS)
        finally:
            watch.close()

    def _open(self, handler: EventHandler) -> Inotify | Polling:
        if sys.platform == "win32":  # no inotify, and that is no fault
            return Polling(_POLL_SECONDS)
        try:
            watch = Inotify()
            watch.watch(_to_watch(self._directories, ()))
        except OSError as error:
            return _without_inotify(handler, error)
        return watch

    def _watch(
        self, handler: EventHandler, watch: Inotify | Polling
    ) -> tuple[Inotify | Polling, bool]:
        """Watch what there is now; return by what, and whether to look again at once."""
        try:
            return watch, watch.watch(_to_watch(self._directories, self._scan.linked))
        except FileNotFoundError:  # it went just now
            return watch, True
        except OSError as error:
            watch.close()
            return _without_inotify(handler, error), True

    async def _refresh(self, handler: EventHandler, watch: Inotify | Polling) -> bool:
        """Look again; return whether something happened meanwhile."""
        writing = frozenset(self._writing)
        scan, world = await in_thread(_look, self._directories, self._scan, writing)
        news = self._note(watch.read())
        if self._writing.keys() - writing:
            return True  # a file may have been cut off just as it was read: look once more
        if scan != self._scan:
            self._scan = scan
            await self._publish(handler, world)
        return news

    async def _rest(self, watch: Inotify | Polling, seconds: float) -> None:
        """Return when there may be something new and those who write have come to rest."""
        now = asyncio.get_running_loop().time
        end = min(now() + seconds, *self._writing.values(), math.inf)
        await watch.wait(max(0.0, end - now()))
        for _ in range(_SETTLE_ROUNDS):
            await asyncio.sleep(_SETTLE_SECONDS)
            if not self._note(watch.read()):
                break
        self._writing = {path: end for path, end in self._writing.items() if end > now()}

    def _note(self, events: Sequence[FileEvent]) -> bool:
        """Remember who is writing; return whether there were events."""
        end = asyncio.get_running_loop().time() + _WRITER_SECONDS
        for event in events:
            if not event.writing:
                self._writing.pop(event.path, None)
            elif _is_manifest(event.name):
                self._writing.setdefault(event.path, end)
        return bool(events)

    async def _publish(self, handler: EventHandler, world: World) -> None:
        """Report what is wrong; feed what changed, once each directory has been there."""
        self._report(handler, world)
        if not self._scan.seen.issuperset(self._directories):
            return
        for kind, objects in world.objects.items():
            fed = self._fed.get(kind, {})
            fresh = (obj for name, obj in objects.items() if fed.get(name) is not obj)
            await upsert_in_slices(handler, fresh)
            handler.retain(kind, objects)
            self._fed[kind] = objects

    def _report(self, handler: EventHandler, world: World) -> None:
        findings = {path: list(said) for path, said in world.findings.items()}
        faults = {path: file.fault for path, file in self._scan.files.items() if file.fault}
        for path, fault in (*faults.items(), *self._scan.faults.items()):
            findings.setdefault(str(path), []).insert(0, fault)
        for scope in self._reported - findings.keys():
            handler.report(scope, ())
        for scope, said in findings.items():
            handler.report(scope, said)
        self._reported = frozenset(findings)


def _without_inotify(handler: EventHandler, error: OSError) -> Polling:
    reason = f"{error}: manifests are polled; raise the sysctls fs.inotify.max_user_*"
    handler.report("inotify", [Finding("inotify", "", reason)])
    return Polling(_POLL_SECONDS)


def _to_watch(directories: Iterable[Path], linked: Iterable[Path]) -> set[Path]:
    """Directories in which something can happen that matters, all without symbolic links."""
    watched = set(linked)
    for directory in directories:
        if os.path.islink(directory):
            watched.add(_real(directory.parent))
        real = _real(directory)
        watched.add(next(path for path in (real, *real.parents) if os.path.isdir(path)))
    return watched


def _look(
    directories: Iterable[Path], before: _Scan, writing: frozenset[Path]
) -> tuple[_Scan, World]:
    """Read what changed since `before`, but for files that are being written."""
    files: dict[Path, _File] = {}
    faults: dict[Path, Finding] = {}
    linked: set[Path] = set()
    seen = set(before.seen)
    left = MOST_BYTES_TOGETHER
    for directory in directories:
        try:
            paths = sorted(_list(directory))
        except OSError as error:
            faults[directory] = _missing(directory, error, directory in seen)
            kept = (p for p in before.files if directory in (p, p.parent))
            files.update({path: before.files[path] for path in kept})
            continue
        seen.add(directory)
        if len(paths) > MOST_FILES:
            said = f"has {len(paths)} manifests; only the first {MOST_FILES} by name are read"
            faults[directory] = _fault(directory, "", said)
        for path in paths[:MOST_FILES]:
            busy = bool(writing) and _real(path) in writing
            old = before.files.get(path)
            if file := old if busy else _read(path, old, left):
                files[path] = file
                left -= file.size
            if os.path.islink(path):
                linked.add(_real(path).parent)
    world = combine({str(path): file.manifest for path, file in files.items()})
    return _Scan(files, faults, frozenset(linked), frozenset(seen)), world


def _list(directory: Path) -> Iterator[Path]:
    if os.path.isfile(directory):
        yield directory
        return
    for name in os.listdir(directory):
        if _is_manifest(name):
            yield directory / name


def _is_manifest(name: str) -> bool:
    return name.endswith(_SUFFIXES) and not name.startswith(".")


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))


def _read(path: Path, old: _File | None, left: int) -> _File | None:
    """Read a file again if it changed; None where there is nothing to read (any more).

    `left` is how many bytes all files may still have.
    """
    manifest, known, size = (old.manifest, old.known, old.size) if old else (Manifest(), {}, 0)
    good = manifest.objects or manifest.findings
    then = "its last good content stays in force" if good else "nothing of it is in force"
    try:
        status = path.stat()
        signature = _signature(status)  # from before the read: a later change differs from it
        if not stat.S_ISREG(status.st_mode):
            return None
        if old and signature and old.signature == signature:
            return old
        if left < status.st_size <= MOST_BYTES:
            raise OSError(0, f"all manifests together may have {MOST_BYTES_TOGETHER} bytes")
        data = read_file(path, MOST_BYTES)
        return _File(signature, *read_again(str(path), data, known), size=len(data))
    except BrokenFileError as error:
        fault = _fault(path, f"line {error.line}", f"{error.reason}; {then}")
        return _File(signature, manifest, known, fault, size)
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not os.path.islink(path):
            return None
        fault = _fault(path, "", f"cannot be read ({error.strerror}); {then}")
        return _File(None, manifest, known, fault, size)


def _signature(status: os.stat_result) -> tuple[int, ...] | None:
    if time.time_ns() - status.st_mtime_ns < _RACY_NS:
        return None
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def _missing(directory: Path, error: OSError, seen: bool) -> Finding:
    then = "its last content stays in force" if seen else "nothing is done before it is there"
    return _fault(directory, "", f"cannot be read ({error.strerror}); {then}")


def _fault(path: Path, field: str, reason: str) -> Finding:
    return Finding(str(path), field, reason, Severity.ERROR)
