"""How commands find the running process on Windows, which has no abstract Unix sockets.

A file has its port on loopback and a secret. Only administrators may read the file, so a process
that knows the secret is theirs: each side proves that to the other, and nobody sends the secret.
Another program may listen on the port after the process was killed; it cannot prove anything.
"""

from __future__ import annotations

import ctypes
import hashlib
import hmac
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

NONCE, PROOF = "X-Steersman-Nonce", "X-Steersman-Proof"
"""Headers of a question; the answer has the second one, too."""
_ADMINISTRATORS = "D:P(A;OICI;FA;;;BA)(A;OICI;FA;;;SY)"
"""Full access for administrators and the system, and nobody else (Microsoft's SDDL)."""
_DACL, _PROTECTED_DACL = 4, 0x80000000  # winnt.h


class LocalPort(NamedTuple):
    """Where a process answers commands."""

    port: int
    secret: str

    def proof(self, side: str, nonce: str) -> str:
        """Return what only a process that knows the secret can compute.

        Args:
            side: "question" or "answer".
            nonce: of the question; another one each time.
        """
        text = f"{side} {nonce}".encode()
        return hmac.new(self.secret.encode(), text, hashlib.sha256).hexdigest()


def state_folder() -> Path:
    """Return where the program keeps its state on Windows: only administrators write there."""
    programs = os.environ.get("ProgramFiles", "C:/Program Files")  # noqa: SIM112
    return Path(programs) / "steersman"


def port_file() -> Path:
    """Return the file that names the port."""
    return state_folder() / "private" / "port"


def publish(file: Path, local_port: LocalPort) -> None:
    """Write the file into a folder that only administrators, or this user, may read.

    Raises:
        OSError: the folder cannot be made so, or the file not be written.
    """
    folder = file.parent
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    # The folder first: a file that were made in another one could be opened too early.
    if sys.platform == "win32":
        _for_administrators(folder)
    else:
        folder.chmod(0o700)
    new = file.with_suffix(".new")
    new.unlink(missing_ok=True)
    new.write_text(f"{local_port.port} {local_port.secret}\n", encoding="ascii")
    new.replace(file)


def find(file: Path) -> LocalPort | None:
    """Return what the file says; None if no process has written it.

    Raises:
        OSError: it may not be read.
    """
    try:
        port, secret = file.read_text(encoding="ascii").split()
        return LocalPort(int(port), secret)
    except (FileNotFoundError, ValueError):
        return None


def _for_administrators(folder: Path) -> None:
    advapi32: Any = vars(ctypes)["WinDLL"]("advapi32", use_last_error=True)
    kernel32: Any = vars(ctypes)["WinDLL"]("kernel32")
    descriptor = ctypes.c_void_p()
    convert = advapi32.ConvertStringSecurityDescriptorToSecurityDescriptorW
    done = convert(ctypes.c_wchar_p(_ADMINISTRATORS), 1, ctypes.byref(descriptor), None)
    if done:
        what = ctypes.c_uint(_DACL | _PROTECTED_DACL)
        done = advapi32.SetFileSecurityW(ctypes.c_wchar_p(str(folder)), what, descriptor)
        kernel32.LocalFree(descriptor)
    if not done:
        number = vars(ctypes)["get_last_error"]()
        raise OSError(number, f"its rights cannot be set (Windows error {number})", str(folder))
