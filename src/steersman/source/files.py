"""Directories of manifests as a Source: read once, and again whenever files change.

    watch (inotify, else polling) -> scan changed files, in a thread -> report, feed
      ^                                                                   |
      |____ wait for events, then until files that are open are complete _|

A file that breaks keeps its last good content in force, and so do an object that is malformed and a
directory that vanishes. The meaning of files is in manifests.py.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import stat
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from steersman.host.directories import FileEvent, Inotify, Polling
from steersman.host.files import read_file
from steersman.host.threads import in_thread
from steersman.model import codes
from steersman.model.findings import Finding, Severity
from steersman.model.kube import KubeObject
from steersman.model.names import ObjectName
from steersman.source.base import upsert_in_batches
from steersman.source.documents import BrokenFileError
from steersman.source.manifests import (
    CombinedManifests,
    Manifest,
    combine_manifests,
    read_manifest,
)
from steersman.source.store import Store

_SUFFIXES = (".yaml", ".yml", ".json")
_RACY_NS = 50_000_000  # a file this young may change again within the clock's granularity
_RESCAN_SECONDS = 30.0  # without events: file systems of other machines (NFS) send none
_SETTLE_SECONDS = 0.02  # editors and tools make several changes at once
_SETTLE_ROUNDS = 4
_POLL_SECONDS = 0.1  # without inotify
_RETRY_SECONDS = 1.0
_WRITER_SECONDS = 2.0  # how long to wait for a file that is open for writing

MAX_FILE_BYTES = 32 << 20
"""Of one file; 10,000 Services with their slices, as kubectl prints them, are about 30 MB."""
MAX_TOTAL_BYTES = 256 << 20
MAX_FILES = 10_000
"""Of one directory."""

log = logging.getLogger("steersman.source")


class _File(NamedTuple):
    """A file as last read."""

    signature: tuple[int, ...] | None
    """From `stat`; None to read it again in any case."""
    manifest: Manifest
    """The last good content."""
    fault: Finding | None = None
    size: int = 0
    """Bytes read."""


class _Scan(NamedTuple):
    """All directories as last read; the next scan is made from it."""

    files: Mapping[Path, _File] = {}
    faults: Mapping[Path, Finding] = {}
    """About the directories themselves."""
    linked: frozenset[Path] = frozenset()
    """Other directories that contain the targets of symbolic links."""
    seen: frozenset[Path] = frozenset()
    """The directories that have existed at some time."""


class FileSource:
    """Feeds the Store from the `*.yaml`, `*.yml` and `*.json` files in some directories.

    Hidden files and sub-directories are ignored, as by `kubectl -f DIR`. Nothing is fed before each
    directory has existed once. Faults become Findings, in the scope of the file's path.
    """

    def __init__(self, directories: Sequence[Path]) -> None:
        """Set the directories; each may also be a single file."""
        self.stats = None
        """There is no connection to count."""
        self._directories = tuple(directories)
        self._scan = _Scan()
        self._fed: dict[str, dict[ObjectName, KubeObject]] = {}
        self._reported: frozenset[str] = frozenset()
        self._writing: dict[Path, float] = {}  # files that are open, and when to stop waiting

    async def run(self, store: Store) -> None:
        """Feed the Store until cancelled."""
        now = asyncio.get_running_loop().time
        watch = _open_watch(store, self._directories)
        try:
            while True:
                # Read the files that changed.
                writing = frozenset(self._writing)
                try:
                    scan, combined = await in_thread(_read, self._directories, self._scan, writing)
                except OSError as error:  # there is no thread for it
                    log.warning("manifests cannot be read now: %s; retrying", error)
                    await asyncio.sleep(_RETRY_SECONDS)
                    continue
                changed = self._note(watch.read())
                if self._writing.keys() - writing:
                    changed = True  # a file may have been truncated just as it was read
                elif scan != self._scan:
                    self._scan = scan
                    await self._publish(store, combined)
                del scan, combined  # free them before the wait

                # Watch the directories that exist now.
                try:
                    changed |= watch.watch(_watched(self._directories, self._scan.linked))
                except FileNotFoundError:  # one was removed just now
                    changed = True
                except OSError as error:
                    watch.close()
                    watch, changed = _polling(store, error), True

                # Wait for changes, and until those who write have finished.
                seconds = 0.0 if changed else _RESCAN_SECONDS
                end = min(now() + seconds, *self._writing.values(), math.inf)
                await watch.wait(max(0.0, end - now()))
                for _ in range(_SETTLE_ROUNDS):
                    await asyncio.sleep(_SETTLE_SECONDS)
                    if not self._note(watch.read()):
                        break
                self._writing = {path: end for path, end in self._writing.items() if end > now()}
        finally:
            watch.close()

    async def read_once(self, store: Store) -> None:
        """Feed the Store with what the directories hold now, and return.

        A directory that does not exist is reported; then nothing is fed.
        """
        self._scan, combined = await in_thread(_read, self._directories, self._scan, frozenset())
        await self._publish(store, combined)

    def _note(self, events: Sequence[FileEvent]) -> bool:
        """Record which files are open for writing; return whether there were events."""
        end = asyncio.get_running_loop().time() + _WRITER_SECONDS
        for event in events:
            if not event.writing:
                self._writing.pop(event.path, None)
            elif _is_manifest(event.name):
                self._writing.setdefault(event.path, end)
        return bool(events)

    async def _publish(self, store: Store, combined: CombinedManifests) -> None:
        """Report faults; feed changed objects once each directory has existed."""
        # The fault of a file or directory comes first among its Findings.
        findings = {path: list(found) for path, found in combined.findings.items()}
        faults = {path: file.fault for path, file in self._scan.files.items() if file.fault}
        for path, fault in (*faults.items(), *self._scan.faults.items()):
            findings.setdefault(str(path), []).insert(0, fault)
        for scope in self._reported - findings.keys():
            store.report(scope, ())
        for scope, found in findings.items():
            store.report(scope, found)
        self._reported = frozenset(findings)
        if not self._scan.seen.issuperset(self._directories):
            return
        # A malformed object has a Finding and no struct: its last good version stays in force.
        malformed = {each.object for found in combined.findings.values() for each in found}
        # Objects of a file that was not read again are the same ones: only others are fed.
        for kind, objects in combined.objects.items():
            fed = self._fed.get(kind, {})
            fresh = (obj for name, obj in objects.items() if fed.get(name) is not obj)
            await upsert_in_batches(store, fresh)
            store.retain(kind, objects, malformed)
            self._fed[kind] = objects


def _open_watch(store: Store, directories: Iterable[Path]) -> Inotify | Polling:
    if sys.platform == "win32":  # no inotify, and no Finding about that
        return Polling(_POLL_SECONDS)
    try:
        watch = Inotify()
    except OSError as error:
        return _polling(store, error)
    try:
        watch.watch(_watched(directories, ()))
    except OSError as error:
        watch.close()
        return _polling(store, error)
    return watch


def _polling(store: Store, error: OSError) -> Polling:
    reason = f"{error}: manifests are polled; raise the sysctls fs.inotify.max_user_*"
    store.report("inotify", [Finding("inotify", "", reason, code=codes.POLLED_FILES)])
    return Polling(_POLL_SECONDS)


def _watched(directories: Iterable[Path], linked: Iterable[Path]) -> set[Path]:
    """Return the directories with relevant events, resolved.

    These are the directories themselves or their first existing parents, the parents of those that
    are symbolic links, and the directories that links in them point into.
    """
    watched = set(linked)
    for directory in directories:
        if os.path.islink(directory):
            watched.add(_real(directory.parent))
        real = _real(directory)
        watched.add(next(path for path in (real, *real.parents) if os.path.isdir(path)))
    return watched


def _read(
    directories: Iterable[Path], before: _Scan, writing: frozenset[Path]
) -> tuple[_Scan, CombinedManifests]:
    """Read the files that changed since `before`, except those open for writing. Blocks."""
    files: dict[Path, _File] = {}
    faults: dict[Path, Finding] = {}
    linked: set[Path] = set()
    seen = set(before.seen)
    left = MAX_TOTAL_BYTES
    for directory in directories:
        try:
            if os.path.isfile(directory):
                paths = [directory]
            else:
                paths = sorted(directory / n for n in os.listdir(directory) if _is_manifest(n))
        except OSError as error:
            then = "nothing is done before it exists"
            if directory in seen:
                then = "its last content stays in force"
            faults[directory] = _fault(directory, f"cannot be read ({error.strerror}); {then}")
            kept = (p for p in before.files if directory in (p, p.parent))
            files.update({path: before.files[path] for path in kept})
            continue
        seen.add(directory)
        if len(paths) > MAX_FILES:
            reason = f"has {len(paths)} manifests; only the first {MAX_FILES} by name are read"
            faults[directory] = _fault(directory, reason)
        for path in paths[:MAX_FILES]:
            busy = bool(writing) and _real(path) in writing
            old = before.files.get(path)
            if file := old if busy else _read_file(path, old, left):
                files[path] = file
                left -= file.size
            if os.path.islink(path):
                linked.add(_real(path).parent)
    combined = combine_manifests({str(path): file.manifest for path, file in files.items()})
    return _Scan(files, faults, frozenset(linked), frozenset(seen)), combined


def _read_file(path: Path, old: _File | None, left: int) -> _File | None:
    """Read a file if it changed; None if it is gone or not a regular file.

    Args:
        left: bytes that it and all later files may have together.
    """
    manifest, size = (old.manifest, old.size) if old else (Manifest(), 0)
    good = manifest.objects or manifest.findings
    then = "its last good content stays in force" if good else "nothing of it is in force"
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            return None
        # The signature is older than the content, so any later change differs from it.
        signature: tuple[int, ...] | None = None
        if time.time_ns() - status.st_mtime_ns >= _RACY_NS:
            times = (status.st_mtime_ns, status.st_ctime_ns)
            signature = (status.st_dev, status.st_ino, status.st_size, *times)
        if old and signature and old.signature == signature:
            return old
        if left < status.st_size <= MAX_FILE_BYTES:
            raise OSError(0, f"all manifests together may have {MAX_TOTAL_BYTES} bytes")
        data = read_file(path, MAX_FILE_BYTES)
        return _File(signature, read_manifest(str(path), data), size=len(data))
    except BrokenFileError as error:
        fault = _fault(path, f"{error.reason}; {then}", f"line {error.line}")
        return _File(signature, manifest, fault, size)
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not os.path.islink(path):
            return None
        fault = _fault(path, f"cannot be read ({error.strerror}); {then}")
        return _File(None, manifest, fault, size)


def _is_manifest(name: str) -> bool:
    return name.endswith(_SUFFIXES) and not name.startswith(".")


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))


def _fault(path: Path, reason: str, field: str = "") -> Finding:
    return Finding(str(path), field, reason, Severity.ERROR, codes.FILE)
