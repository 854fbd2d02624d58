"""Answer `steersman version`: what a report of a bug says about this installation."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from steersman import __version__
from steersman.operate.answer import Answer, Block, Line
from steersman.source.protobuf import NATIVE

_LIBRARIES = ("msgspec", "h11", "pyyaml")


class VersionAnswer(Answer, frozen=True, kw_only=True, rename="camel"):
    """The version of steersman, and of what it runs on."""

    version: str
    python: str
    kernel: str
    """Name and release."""
    machine: str
    """Such as x86_64."""
    protobuf_decoder: str
    """C, or none: then the API server is asked for JSON."""
    libraries: dict[str, str]
    """Versions of libraries that every node needs, by name."""

    def blocks(self, wide: bool) -> Iterator[Block]:
        """Yield the version; everything if `wide`."""
        yield Line(f"steersman {self.version}")
        if wide:
            yield Line(f"Python {self.python}, {self.kernel}, {self.machine}")
            yield Line(f"protobuf decoder: {self.protobuf_decoder}")
            yield Line(", ".join(f"{name} {number}" for name, number in self.libraries.items()))


def installed() -> VersionAnswer:
    """Return the version of this installation."""
    libraries = {}
    for name in _LIBRARIES:
        try:
            libraries[name] = version(name)
        except PackageNotFoundError:  # the image may have no metadata
            libraries[name] = "unknown"
    return VersionAnswer(
        version=__version__,
        python=platform.python_version(),
        kernel=f"{platform.system()} {platform.release()}",
        machine=platform.machine(),
        protobuf_decoder="C" if NATIVE else "none",
        libraries=libraries,
    )
