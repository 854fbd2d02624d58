"""From the pinned maps of an older version to those of this one, while the old programs work.

Where no map has changed its shape, nothing is to be done: the object is loaded into the maps that
are there. Otherwise:

1. The object is loaded into `maps-next`: maps that are the same get a second pin there, of the
   others new ones are made, and what the old ones hold is copied, field by field (shapes.py).
2. Right before the programs are exchanged, what was learned meanwhile is copied, and the
   directories are renamed: `maps` is `maps-old` now, and `maps-next` is `maps`.
3. After the exchange what the old programs have learned last is copied, and `maps-old` goes.

A process that is killed leaves `maps-next`, which is made anew, or `maps-old`, which is finished.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from steersman.modes.ebpf import layout, shapes
from steersman.modes.ebpf.bpf import Object
from steersman.modes.ebpf.loader import LoadedObject, StaleMapsError, library
from steersman.modes.ebpf.maps import ArrayMap, HashMap

_HASH, _ARRAY, _PERCPU_ARRAY, _LRU_HASH, _LPM_TRIE = 1, 2, 6, 9, 11
_HASHES = (_HASH, _LRU_HASH, _LPM_TRIE)
_LEARNED = (_LRU_HASH,)
"""What programs write."""
_MMAPABLE = 1 << 10


class _Copy:
    """One map that has another shape now."""

    def __init__(self, pin: Path, new: int) -> None:
        self._old, self._new = Object.pinned(pin), new
        self._shape = shapes.of_pinned(library(), self._old.fd)
        self._target = shapes.of_pinned(library(), new)
        was, now = self._shape, self._target
        self._key = shapes.converter(was.key, now.key, now.key_size)
        self._value = shapes.converter(was.value, now.value, now.value_size)
        self._seen: dict[bytes, bytes] = {}
        """What an earlier round has copied."""

    def close(self) -> None:
        self._old.close()

    def everything(self) -> None:
        if self._shape.kind in _HASHES and self._target.kind in _HASHES:
            self._copy_hash()
        elif self._shape.kind == self._target.kind == _PERCPU_ARRAY:
            self._copy_counters()
        elif self._shape.kind == self._target.kind == _ARRAY and self._shape.flags & _MMAPABLE:
            self._copy_array()

    def learned(self) -> None:
        """Copy what programs have learned since the last round; what the new ones say counts."""
        if self._shape.kind in _LEARNED and self._target.kind in _HASHES:
            self._copy_hash()

    def clear(self, field: str) -> None:
        """Set a field of the one record of an old array to zero: the old programs look there."""
        if self._shape.flags & _MMAPABLE and field in self._shape.value:
            place, size = self._shape.value[field]
            ArrayMap(self._old.fd).memory[place : place + size] = bytes(size)

    def _copy_hash(self) -> None:
        target = HashMap(self._new)
        found = {self._key(k): self._value(v) for k, v in HashMap(self._old.fd).items()}
        news = {key: value for key, value in found.items() if self._seen.get(key) != value}
        have = dict(target.items())
        target.put_all(
            (key, value) for key, value in news.items() if have.get(key) == self._seen.get(key)
        )
        self._seen = found

    def _copy_array(self) -> None:
        old, new = ArrayMap(self._old.fd), ArrayMap(self._new)
        size = old.value_size
        records = old.read(0, min(old.capacity, new.capacity))
        empty = bytes(size)
        for number in range(len(records) // size):
            record = records[number * size : (number + 1) * size]
            if record != empty:
                new.write(number, self._value(record))

    def _copy_counters(self) -> None:
        old, new = HashMap(self._old.fd), HashMap(self._new)
        if old.value_size != new.value_size:
            return
        for number in range(min(old.capacity, new.capacity)):
            key = number.to_bytes(4, layout.BYTE_ORDER)
            value = old.get(key)
            if value and any(value):
                new.put(key, value)


class Migration:
    """A change of maps under way."""

    def __init__(self, maps: Path, loaded: LoadedObject, names: Iterable[str]) -> None:
        """Take up a change.

        Args:
            maps: directory of the pins in use; the others lie beside it.
            loaded: the new object.
            names: of the maps whose shape has changed.
        """
        self._maps = maps
        source = maps_old(maps) if maps_old(maps).exists() else maps
        self._copies = {
            name: _Copy(source / name, loaded.maps[name]) for name in names if name in loaded.maps
        }

    def copy(self) -> None:
        """Copy everything."""
        for each in self._copies.values():
            each.everything()

    def exchange(self) -> None:
        """Copy what was learned since, and let the new maps be those in use.

        Where new programs mark in another map, old ones no longer trust theirs (marks.py).
        """
        if "marks" in self._copies:
            self._copies["marks"].clear("trusted")
        for each in self._copies.values():
            each.learned()
        if not maps_old(self._maps).exists():
            self._maps.rename(maps_old(self._maps))
            maps_next(self._maps).rename(self._maps)

    def finish(self) -> None:
        """Copy what the old programs learned last; the old maps go."""
        for each in self._copies.values():
            each.learned()
            each.close()
        shutil.rmtree(maps_old(self._maps), ignore_errors=True)


def maps_next(maps: Path) -> Path:
    """Where new maps are pinned until they are in use."""
    return maps.with_name("maps-next")


def maps_old(maps: Path) -> Path:
    """Where the maps are pinned that were in use."""
    return maps.with_name("maps-old")


def load(file: Path, maps: Path) -> tuple[LoadedObject, Migration | None]:
    """Load an object into pinned maps, or into new ones that take over from them.

    Args:
        file: the compiled object.
        maps: directory of the pins.

    Raises:
        ObjectError: it cannot be loaded.
    """
    if maps_old(maps).exists() and maps_next(maps).exists():  # killed between the two renames
        maps.rmdir()
        maps_next(maps).rename(maps)
    shutil.rmtree(maps_next(maps), ignore_errors=True)
    try:
        loaded = LoadedObject(file, maps)
    except StaleMapsError as stale:
        return _begin(file, maps, stale.names)
    if maps_old(maps).exists():
        return loaded, Migration(maps, loaded, _changed(maps, loaded))
    return loaded, None


def _begin(file: Path, maps: Path, names: frozenset[str]) -> tuple[LoadedObject, Migration]:
    place = maps_next(maps)
    place.mkdir(mode=0o700)
    shutil.rmtree(maps_old(maps), ignore_errors=True)  # of a third version
    for path in maps.iterdir():
        if path.name not in names:
            pinned = Object.pinned(path)
            pinned.pin(place / path.name)
            pinned.close()
    loaded = LoadedObject(file, place)
    moving = Migration(maps, loaded, names)
    moving.copy()
    return loaded, moving


def _changed(maps: Path, loaded: LoadedObject) -> list[str]:
    """Maps that are others than those that were in use."""
    out = []
    for path in maps_old(maps).iterdir():
        if path.name in loaded.maps:
            old = Object.pinned(path)
            if _identity(old.fd) != _identity(loaded.maps[path.name]):
                out.append(path.name)
            old.close()
    return out


def _identity(fd: int) -> bytes:
    return Object(fd).info(8)[4:]
