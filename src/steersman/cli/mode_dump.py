"""`steersman MODE dump TABLE`: print a table of the kernel objects of a mode."""

from __future__ import annotations

from collections.abc import Sequence

from steersman.modes.registry import dump
from steersman.modes.specs import ModeSpec
from steersman.operate.answer import QuestionError


def dump_table(spec: ModeSpec, words: Sequence[str]) -> int:
    """Print a table of the kernel objects of a mode; return the exit status."""
    if len(words) != 2 or words[0] != "dump" or words[1] not in spec.dumps:
        raise QuestionError(f"give {spec.name} dump, and one of: {', '.join(spec.dumps)}")
    try:
        for line in dump(spec.name, words[1]):
            print(line)
    except FileNotFoundError as error:
        raise QuestionError(f"nothing is pinned: the {spec.name} mode does not run here") from error
    except PermissionError as error:
        raise QuestionError(
            f"the maps of the {spec.name} mode cannot be read: this needs root"
        ) from error
    except BrokenPipeError:
        raise
    except OSError as error:
        raise QuestionError(error.strerror or str(error)) from error
    return 0
