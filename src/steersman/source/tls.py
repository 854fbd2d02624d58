"""TLS towards the API server: contexts from PEM text, made anew when that text changed."""

from __future__ import annotations

import os
import ssl
import tempfile
from contextlib import ExitStack

from steersman.source.credentials import KeyPair
from steersman.source.kubeconfig import ClusterAccess


class TlsError(Exception):
    """Certificates that cannot be used: which, and why."""


class TlsContexts:
    """The context for the next connection."""

    def __init__(self, access: ClusterAccess) -> None:
        self._access = access
        self._made_of: tuple[bytes, KeyPair | None] | None = None
        self._context: ssl.SSLContext | None = None

    def current(self, pair: KeyPair | None) -> ssl.SSLContext:
        """Return a context for the CA as it is now and this client certificate.

        Raises:
            TlsError: the CA or the certificate cannot be read or used.
        """
        made_of = (self._authority(), pair)
        if self._context is None or made_of != self._made_of:
            self._context = _context(made_of[0], pair, insecure=self._access.insecure)
            self._made_of = made_of
        return self._context

    def _authority(self) -> bytes:
        ca = self._access.ca
        try:
            text = ca.read() if ca else b""
        except OSError as error:
            raise TlsError(f"certificate authority: {error}") from error
        if (
            ca and not text.decode("ascii", "ignore").strip()
        ):  # being written: nobody meant to trust the system's instead
            raise TlsError(f"certificate authority: {ca.path or 'the text'} is empty")
        return text


def _context(authority: bytes, pair: KeyPair | None, *, insecure: bool) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cadata=authority.decode("ascii", "ignore") or None)
    except (ssl.SSLError, ValueError) as error:
        raise TlsError(f"certificate authority is not PEM: {error}") from error
    # On since Python 3.13; it refuses the CAs that many clusters were set up with.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    if insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if pair is not None:
        try:
            _load(context, pair)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            raise TlsError(f"client certificate or key cannot be used: {error}") from error
    return context


def _load(context: ssl.SSLContext, pair: KeyPair) -> None:
    """Load a certificate: `ssl` only takes files, so give it some that no disk ever sees."""
    with ExitStack() as stack:
        certificate, key = (_file_of(stack, text) for text in pair)
        # An encrypted key would make OpenSSL ask on the terminal; so it fails instead.
        context.load_cert_chain(certificate, key, password="")


def _file_of(stack: ExitStack, text: bytes) -> str:
    if hasattr(os, "memfd_create"):
        number = os.memfd_create("steersman-pem")
        stack.callback(os.close, number)
        os.write(number, text)
        return f"/proc/self/fd/{number}"
    folder = stack.enter_context(tempfile.TemporaryDirectory())  # mode 0700
    path = os.path.join(folder, "pem")
    with open(path, "wb") as file:
        file.write(text)
    return path
