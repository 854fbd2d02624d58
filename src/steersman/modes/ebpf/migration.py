"""From the pinned maps of an older version to those of this one, while the old programs work.

If no map has changed its shape, the object is loaded into the present maps. Otherwise:

    maps        maps-next           1. load the object into `maps-next`: unchanged maps get a second
      |             |                  pin there; the others are created, and entries copied field
      |  rename     |  rename          by field
      v             v               2. right before the programs are replaced, copy the entries that
    maps-old      maps                 programs have written since, and rename both directories
                                    3. after that, copy the last entries, and remove `maps-old`

A killed process leaves `maps-next`, which is created again, or `maps-old`, which is finished.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import TypeAlias

from steersman.modes.ebpf import layout
from steersman.modes.ebpf.bpf import ArrayMap, HashMap, Object, remove_pins
from steersman.modes.ebpf.loader import Fields, LoadedObject, Shape, StaleMapsError

log = logging.getLogger("steersman.ebpf")

_HASH, _ARRAY, _PERCPU_ARRAY, _LRU_HASH, _LPM_TRIE = 1, 2, 6, 9, 11
_HASHES = (_HASH, _LRU_HASH, _LPM_TRIE)
_WRITTEN_BY_PROGRAMS = (_LRU_HASH,)
_MMAPABLE = 1 << 10
_LONGEST_NUMBER = 8  # bytes; a longer field is no number

Convert: TypeAlias = Callable[[bytes], bytes]


def converter(old: Fields, new: Fields, size: int) -> Convert:
    """Return a function that rewrites records field by field, by name; new fields are zero.

    A number of another size keeps its value; of any other field the first bytes stay.

    Args:
        old: fields of its argument.
        new: fields of its result.
        size: bytes of its result.
    """
    shared = [(*old[name], *new[name]) for name in new if name in old]

    def convert(record: bytes) -> bytes:
        out = bytearray(size)
        for start, length, to, room in shared:
            field = record[start : start + length]
            if max(length, room) <= _LONGEST_NUMBER and length != room:
                number = int.from_bytes(field, layout.BYTE_ORDER) % (1 << 8 * room)
                field = number.to_bytes(room, layout.BYTE_ORDER)
            out[to : to + room] = field[:room].ljust(room, b"\0")
        return bytes(out)

    return convert


class _Copy:
    """One map that has changed its shape."""

    def __init__(self, pin: Path, new: int) -> None:
        self._old, self._new = Object.pinned(pin), new
        self._shape, self._target = was, now = Shape.of_map(self._old.fd), Shape.of_map(new)
        self._key = converter(was.key, now.key, now.key_size)
        self._value = converter(was.value, now.value, now.value_size)
        # Entries of the previous rounds.
        self._copied: dict[bytes, bytes] = {}

    def close(self) -> None:
        self._old.close()

    def copy_all(self) -> None:
        """Copy everything that steersman and the programs have written."""
        was, now = self._shape, self._target
        if was.kind in _HASHES and now.kind in _HASHES:
            self._copy_hash()
        elif was.kind == now.kind == _PERCPU_ARRAY:
            old, new = HashMap(self._old.fd), HashMap(self._new)
            for number in range(min(old.capacity, new.capacity)):
                value = old.get(layout.number_key(number))
                if value and any(value) and old.value_size == new.value_size:
                    new.put(layout.number_key(number), value)
        elif was.kind == now.kind == _ARRAY and was.flags & _MMAPABLE:
            source, target = ArrayMap(self._old.fd), ArrayMap(self._new)
            size = source.value_size
            records = source.read(0, min(source.capacity, target.capacity))
            empty = bytes(size)
            for number in range(len(records) // size):
                record = records[number * size : (number + 1) * size]
                if record != empty:
                    target.write(number, self._value(record))

    def copy_new(self) -> None:
        """Copy what programs have written since the last round, unless new ones have, too."""
        if self._shape.kind in _WRITTEN_BY_PROGRAMS and self._target.kind in _HASHES:
            self._copy_hash()

    def _copy_hash(self) -> None:
        target = HashMap(self._new)

        def changed() -> Iterator[tuple[bytes, bytes]]:
            for old_key, old_value in HashMap(self._old.fd).items():
                key, value = self._key(old_key), self._value(old_value)
                before = self._copied.get(key)
                # What new programs have written since the last round is newer than the old entry.
                if value != before and target.get(key) == before:
                    self._copied[key] = value
                    yield key, value

        target.put_all(changed())

    def clear(self, field: str) -> None:
        """Set a field of the only record of an old array to zero: the old programs look there."""
        if self._shape.flags & _MMAPABLE and field in self._shape.value:
            start, size = self._shape.value[field]
            ArrayMap(self._old.fd).whole()[start : start + size] = bytes(size)


class Migration:
    """A change of maps under way."""

    def __init__(self, maps: Path, loaded: LoadedObject, names: Iterable[str]) -> None:
        """Start or continue a change.

        Args:
            maps: directory of the pins in use; the others are beside it.
            loaded: the new object.
            names: maps whose shape has changed.
        """
        self._maps = maps
        source = maps_old(maps) if maps_old(maps).exists() else maps
        self._copies = {
            name: _Copy(source / name, loaded.maps[name]) for name in names if name in loaded.maps
        }

    def copy(self) -> None:
        """Copy everything."""
        for each in self._copies.values():
            each.copy_all()

    def switch(self) -> None:
        """Copy new entries, and put the new maps into use.

        If new programs write another presence filter, old ones must no longer trust theirs.
        """
        if "marks" in self._copies:
            self._copies["marks"].clear("trusted")
        for each in self._copies.values():
            each.copy_new()
        if not maps_old(self._maps).exists():
            self._maps.rename(maps_old(self._maps))
            maps_next(self._maps).rename(self._maps)

    def finish(self) -> None:
        """Copy the last entries of the old programs, and remove the old maps."""
        for each in self._copies.values():
            each.copy_new()
        self.close()
        remove_pins(maps_old(self._maps))

    def close(self) -> None:
        """Close the old maps. Idempotent."""
        for each in self._copies.values():
            each.close()


def maps_next(maps: Path) -> Path:
    """Return the directory of new maps until they are in use."""
    return maps.with_name("maps-next")


def maps_old(maps: Path) -> Path:
    """Return the directory of the maps that were in use before."""
    return maps.with_name("maps-old")


def load(
    file: Path, maps: Path, without: Collection[str] = ()
) -> tuple[LoadedObject, Migration | None]:
    """Load an object into pinned maps, or into new ones that will replace them.

    Args:
        file: the compiled object.
        maps: directory of the pins.
        without: programs that are not needed.

    Raises:
        ObjectError: it cannot be loaded.
    """
    if maps_old(maps).exists() and maps_next(maps).exists():  # killed between the two renames
        maps.rmdir()
        maps_next(maps).rename(maps)
    remove_pins(maps_next(maps))
    try:
        loaded = LoadedObject(file, maps, without)
    except StaleMapsError as stale:
        return _load_beside(file, maps, without, stale.names)
    if not maps_old(maps).exists():
        return loaded, None

    # A process was killed in step 3: the maps that are not the old ones have changed.
    changed = []
    for path in maps_old(maps).iterdir():
        if path.name in loaded.maps:
            old = Object.pinned(path)
            if old.id != Object(loaded.maps[path.name]).id:
                changed.append(path.name)
            old.close()
    return loaded, Migration(maps, loaded, changed)


def _load_beside(
    file: Path, maps: Path, without: Collection[str], changed: frozenset[str]
) -> tuple[LoadedObject, Migration]:
    """Load an object into `maps-next`: step 1."""
    # Maps that have kept their shape get a second pin.
    place = maps_next(maps)
    place.mkdir(mode=0o700)
    remove_pins(maps_old(maps))  # of a third version
    for path in maps.iterdir():
        if path.name not in changed:
            pinned = Object.pinned(path)
            pinned.pin(place / path.name)
            pinned.close()
    # The object creates the others.
    loaded = LoadedObject(file, place, without)
    migration = Migration(maps, loaded, changed)
    try:
        migration.copy()
    except BaseException:
        migration.close()
        loaded.close()
        raise
    return loaded, migration
