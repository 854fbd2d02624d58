"""Clients that keep connections to a server open, and never send a whole request.

Half of them send nothing, the others a byte of an endless head twice a second. Who is dropped
connects again.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress

_PAUSE = 0.5  # seconds between two bytes, and before the next connection


async def _client(port: int, slow: bool) -> None:
    while True:
        with suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            if slow:
                writer.write(b"GET /healthz HTTP/1.1\r\nX: ")
                while not writer.is_closing():
                    writer.write(b"x")
                    await asyncio.sleep(_PAUSE)
            else:
                await reader.read()
            writer.close()
        await asyncio.sleep(_PAUSE)


async def _main(port: int, count: int) -> None:
    clients = [asyncio.create_task(_client(port, n % 2 == 0)) for n in range(count)]
    await asyncio.gather(*clients)


if __name__ == "__main__":
    asyncio.run(_main(int(sys.argv[1]), int(sys.argv[2])))
