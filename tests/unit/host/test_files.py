"""Files that others write are read whole, up to a limit, at the cost of what they hold."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from steersman.host.files import read_file


@pytest.mark.parametrize("size", [0, 1, 1 << 16, (1 << 16) + 1, 200_000])
def test_a_file_is_read_whole_up_to_the_limit(tmp_path: Path, size: int) -> None:
    file, data = tmp_path / "file", bytes(range(256)) * (size // 256) + bytes(size % 256)
    file.write_bytes(data)
    assert read_file(file, max(size, 1)) == data
    if size:
        with pytest.raises(OSError, match=f"longer than {size - 1} bytes"):
            read_file(file, size - 1)


def test_a_small_file_takes_little_memory_whatever_the_limit(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"kind: Service")
    tracemalloc.start()
    try:
        read_file(tmp_path / "file", 32 << 20)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 1 << 20
