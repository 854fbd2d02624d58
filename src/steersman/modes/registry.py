"""Build a mode by its `--proxy-mode` name; specs.py has the row of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import TypeAlias

from steersman.host.exec import Exec
from steersman.modes.base import Mode
from steersman.modes.specs import SPECS, ModeOptions

Factory: TypeAlias = Callable[[str, Exec, ModeOptions], Mode]
"""Builds the mode of a name; nothing is run or opened."""


def create(name: str, execute: Exec, options: ModeOptions) -> Mode:
    """Build a mode: import its folder, which may need what other systems lack, and call `create`.

    Args:
        name: a key of SPECS.
        execute: runs programs.
        options: the operator's settings.
    """
    module = SPECS[name].module or f"{name}.mode"
    mode: Mode = import_module(f"steersman.modes.{module}").create(execute, options)
    return mode


def may_have_left(name: str, options: ModeOptions) -> bool:
    """Return whether a mode may have left objects in the kernel.

    The package of a mode may have a function of this name, which tells without importing the mode:
    all modes together are 3 MB, for nodes on which another one has hardly ever run. What it says
    of objects that are left is always True.

    Args:
        name: a key of SPECS with a clean-up rank.
        options: those of the variant that may have left something.
    """
    module = SPECS[name].module or name
    look = vars(import_module(f"steersman.modes.{module}")).get("may_have_left")
    return look is None or bool(look(options))


def dump(name: str, table: str) -> Iterator[str]:
    """Print one of the tables that a mode dumps (ModeSpec.dumps), a line per entry.

    Raises:
        FileNotFoundError: the mode does not run here.
        PermissionError: only root may read it.
    """
    lines: Iterator[str] = import_module(f"steersman.modes.{name}.dump").dump(table)
    return lines
