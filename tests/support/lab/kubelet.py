"""A cluster of one node for tests: an API server, whose pods run in namespaces of a lab.

    python -m tests.support.lab.kubelet PORT NODE=ADDRESS PATH=ADDRESS...

runs in the node's network namespace. PATH is a network namespace for a pod, and its address. A pod
is its containers' processes; EndpointSlices follow the pods that run. Nothing is scheduled.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.support.apiserver.server import ApiServer
from tests.support.apiserver.world import Change, Object, World

_LOG = "/dev/termination-log"


class Kubelet:
    """Runs the pods of one node, and writes the slices of their Services."""

    def __init__(self, world: World, node: str, address: str, places: Mapping[str, str]) -> None:
        self._world = world
        self._address = address
        self._free = asyncio.Queue[tuple[str, str]]()
        for each in places.items():
            self._free.put_nowait(each)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        world.put(
            {
                "kind": "Node",
                "metadata": {"name": node},
                "status": {
                    "addresses": [{"type": "InternalIP", "address": address}],
                    "conditions": [{"type": "Ready", "status": "True"}],
                },
            }
        )
        world.listeners.append(self._changed)

    def _changed(self, change: Change) -> None:
        if change.kind == "Pod":
            before, after = change.before, change.after
            uid = (after or before or {})["metadata"]["uid"]
            if after is None:
                self._tasks.pop(uid).cancel()
            elif before is None:
                self._tasks[uid] = asyncio.get_running_loop().create_task(self._run(after))
        if change.kind in ("Pod", "Service"):
            self._write_slices()

    async def _run(self, pod: Object) -> None:
        """Run the containers of a pod until all have ended."""
        words: list[str] = []
        address = self._address
        if not pod["spec"].get("hostNetwork"):
            place, address = await self._free.get()
            words = ["nsenter", f"--net={place}"]
        statuses: dict[str, Object] = {}

        def write() -> None:
            known = [{"name": name, "state": state} for name, state in statuses.items()]
            status = {"phase": "Running", "podIP": address, "containerStatuses": known}
            if self._world.objects["Pod"].get(
                (pod["metadata"]["namespace"], pod["metadata"]["name"])
            ):
                self._world.put({**pod, "status": status})

        async def run(container: Object) -> None:
            with tempfile.TemporaryDirectory() as folder:
                log = Path(folder, "log")
                _, *rest = container["command"]
                argv = [*words, sys.executable, *(str(log) if w == _LOG else w for w in rest)]
                process = await asyncio.create_subprocess_exec(*argv)
                try:
                    statuses[container["name"]] = {"running": {"startedAt": ""}}
                    write()
                    code = await process.wait()
                finally:
                    with suppress(ProcessLookupError):
                        process.kill()
                    await process.wait()
                ended = {"exitCode": code, "message": _text(log)}
                statuses[container["name"]] = {"terminated": ended}
                write()

        try:
            async with asyncio.TaskGroup() as group:
                for container in pod["spec"]["containers"]:
                    group.create_task(run(container))
        finally:
            if words:
                self._free.put_nowait((words[1].removeprefix("--net="), address))

    def _write_slices(self) -> None:
        """Write an EndpointSlice for each Service with a selector."""
        for service in [*self._world.objects["Service"].values()]:
            meta, spec = service["metadata"], service["spec"]
            pods = [pod for pod in self._world.objects["Pod"].values() if _selects(spec, pod)]
            made: dict[str, Any] = {
                "kind": "EndpointSlice",
                "metadata": {
                    "name": meta["name"],
                    "namespace": meta["namespace"],
                    "labels": {"kubernetes.io/service-name": meta["name"]},
                },
                "addressType": "IPv4",
                "ports": [
                    {"name": each["name"], "port": each["targetPort"], "protocol": each["protocol"]}
                    for each in spec["ports"]
                ],
                "endpoints": [
                    {
                        "addresses": [pod["status"]["podIP"]],
                        "nodeName": pod["spec"]["nodeName"],
                        "conditions": {"ready": _is_ready(spec, pod)},
                    }
                    for pod in pods
                ],
            }
            key = (meta["namespace"], meta["name"])
            old = self._world.objects["EndpointSlice"].get(key)
            if old is None or old["endpoints"] != made["endpoints"]:
                self._world.put(made)


def _is_ready(spec: Object, pod: Object) -> bool:
    """As the real kubelet: a pod with a container that has ended is not ready."""
    running = ["running" in each["state"] for each in pod["status"]["containerStatuses"]]
    everything = len(running) == len(pod["spec"]["containers"]) and all(running)
    return everything or bool(spec.get("publishNotReadyAddresses"))


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _selects(spec: Object, pod: Object) -> bool:
    wanted = spec.get("selector") or {}
    runs = bool(pod.get("status", {}).get("podIP"))
    return runs and bool(wanted) and wanted.items() <= pod["metadata"]["labels"].items()


async def _main(port: str, node: str, *places: str) -> None:
    async with ApiServer(port=int(port)) as server:
        name, address = node.split("=")
        Kubelet(server.world, name, address, dict(each.split("=") for each in places))
        print(f"listening on {server.url}", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))
