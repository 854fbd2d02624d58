"""What this process asks of the kernel for itself."""

from __future__ import annotations

from pathlib import Path


def set_oom_score_adjustment(value: int, proc: Path = Path("/proc")) -> str:
    """Ask the kernel to kill this process later (below 0) or sooner when memory runs out.

    Returns:
        What went wrong, for the log ("" if nothing): the proxy runs as well without it.
    """
    try:
        (proc / "self/oom_score_adj").write_text(str(value))
    except OSError as error:
        return f"the OOM score adjustment could not be set to {value}: {error.strerror}"
    return ""
