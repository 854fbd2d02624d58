"""A process that only proxies: from a free port, which it prints, to the one that it is given."""

from __future__ import annotations

import asyncio
import sys

from steersman.model.plan import Endpoint
from tests.userspace_proxy import LOCAL, key, listener, proxy


async def main(port: int) -> None:
    async with proxy() as made:
        await made.start({key(): listener(Endpoint(LOCAL, port))})
        print(made.port(key()), flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
