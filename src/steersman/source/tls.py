"""TLS contexts for connections to an API server, and its failures in plain words."""

from __future__ import annotations

import os
import ssl
from contextlib import ExitStack
from typing import NamedTuple

from steersman.source.kubeconfig import ClusterAccess


class KeyPair(NamedTuple):
    """A client certificate with its key, in PEM."""

    certificate: bytes
    key: bytes


_ALERTS = {
    "ALERT_CERTIFICATE_EXPIRED": "the server refuses our client certificate: it has expired",
    "ALERT_BAD_CERTIFICATE": "the server refuses our client certificate",
    "ALERT_UNKNOWN_CA": "the server refuses our client certificate: it does not know its authority",
    "ALERT_CERTIFICATE_REQUIRED": "the server requires a client certificate",
}


class TlsError(Exception):
    """A certificate cannot be used; the message says which and why."""


def tls_words(error: ssl.SSLError, where: str) -> str:
    """Say in plain words why TLS with a server failed."""
    text = str(error)
    for alert, words in _ALERTS.items():
        if alert in text:  # in TLS 1.3 it comes with the first bytes read
            return f"TLS: {words}"
    why = error.verify_message if isinstance(error, ssl.SSLCertVerificationError) else error.reason
    return f"TLS: {where}: {why or text}"


class TlsContexts:
    """Makes the TLS context for the next connection; the same one until a certificate changes."""

    def __init__(self, access: ClusterAccess) -> None:
        self._access = access
        self._inputs: tuple[bytes, KeyPair | None, bool] | None = None
        self._context: ssl.SSLContext | None = None

    def current(self, pair: KeyPair | None, *, http2: bool = True) -> ssl.SSLContext:
        """Return a context for the current certificate authority and this client certificate.

        Args:
            pair: the client certificate, None for none.
            http2: offer HTTP/2, unless DISABLE_HTTP2 is set, as for client-go.

        Raises:
            TlsError: the authority or the certificate cannot be read or used.
        """
        ca = self._access.ca
        try:
            authority = ca.read() if ca else b""
        except OSError as error:
            raise TlsError(f"certificate authority: {error}") from error
        if ca and not authority.decode("ascii", "ignore").strip():
            # The file is being written; trusting the system's authorities instead is not meant.
            raise TlsError(f"certificate authority: {ca.path or 'the text'} is empty")
        # Making a context parses all authorities, which takes milliseconds.
        inputs = (authority, pair, http2)
        if self._context is None or inputs != self._inputs:
            self._context = _context(authority, pair, insecure=self._access.insecure)
            if http2 and not os.environ.get("DISABLE_HTTP2"):
                self._context.set_alpn_protocols(["h2", "http/1.1"])
            self._inputs = inputs
        return self._context


def _context(authority: bytes, pair: KeyPair | None, *, insecure: bool) -> ssl.SSLContext:
    if insecure:  # without the system's authorities, which take 1 MB
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    else:
        try:
            context = ssl.create_default_context(cadata=authority.decode("ascii", "ignore") or None)
        except (ssl.SSLError, ValueError) as error:
            raise TlsError(f"certificate authority is not PEM: {error}") from error
        # On since Python 3.13; it refuses the CAs that many clusters were set up with.
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    if pair is not None:
        # `ssl` loads only files, so the key gets one that no disk ever sees.
        try:
            with ExitStack() as stack:
                certificate, key = (_private_file(stack, text) for text in pair)
                # With an encrypted key OpenSSL would ask on the terminal; this makes it fail.
                context.load_cert_chain(certificate, key, password="")
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            raise TlsError(f"client certificate or key cannot be used: {error}") from error
    return context


def _private_file(stack: ExitStack, text: bytes) -> str:
    """Return the path of a file with this content that goes with the stack."""
    if hasattr(os, "memfd_create"):
        number = os.memfd_create("steersman-pem")
        stack.callback(os.close, number)
        os.write(number, text)
        return f"/proc/self/fd/{number}"
    import tempfile  # noqa: PLC0415 - 90 kB, for other systems than Linux

    folder = stack.enter_context(tempfile.TemporaryDirectory())  # mode 0700
    path = os.path.join(folder, "pem")
    with open(path, "wb") as file:
        file.write(text)
    return path
