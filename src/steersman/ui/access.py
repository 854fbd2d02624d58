"""Who may see a page, and start something from it.

On an operator's machine the server listens on loopback, and every user of the machine may look. A
page of another site could still send requests there, so the Host of each request must be a name of
loopback (DNS rebinding), and actions need the token that only our own pages contain.
"""

from __future__ import annotations

import hmac
import secrets

from aiohttp import web

_LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})


class Access:
    """Lets everybody on this machine look, and start what our own pages offer."""

    def __init__(self) -> None:
        """Choose a token against forged requests."""
        self.token = secrets.token_urlsafe(24)
        """Part of each form."""

    async def check(self, request: web.Request) -> None:
        """Let a request pass.

        Raises:
            web.HTTPForbidden, web.HTTPUnauthorized: it may not.
        """
        host = request.host.rpartition(":")[0] if ":" in request.host else request.host
        if request.host not in _LOOPBACK and host not in _LOOPBACK:
            raise web.HTTPForbidden(text=f"this server is not {request.host}: ask for localhost\n")

    async def check_action(self, request: web.Request) -> None:
        """Let a request pass that starts something; raises as `check`."""
        site = request.headers.get("Sec-Fetch-Site", "same-origin")
        origin = request.headers.get("Origin", "")
        if site != "same-origin" or (origin and origin.partition("://")[2] != request.host):
            raise web.HTTPForbidden(text="this request comes from another site\n")
        token = request.headers.get("X-CSRF-Token") or str((await request.post()).get("csrf", ""))
        if not hmac.compare_digest(token.encode(), self.token.encode()):
            raise web.HTTPForbidden(text="this page is of an earlier server: load it again\n")
