"""A process that only proxies, to the port that it is given.

Prints the free ports of two listeners, one of each of two Services. A second argument limits its
descriptors.
"""

from __future__ import annotations

import asyncio
import resource
import sys

import msgspec

from steersman.model.plan import Endpoint
from tests.support.modes.userspace_proxy import LOCAL, key, listener, owner, proxy


async def main(port: int, limit: int = 0) -> None:
    if limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    one, two = key(), key(address="10.96.0.2")
    plan = listener(Endpoint(LOCAL, port))
    async with proxy() as made:
        await made.start({one: plan, two: msgspec.structs.replace(plan, owner=owner(name="two"))})
        print(made.port(one), made.port(two), flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*map(int, sys.argv[1:])))
