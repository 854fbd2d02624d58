"""What the test API server does with namespaces, Services and pods that are created."""

from __future__ import annotations

import json
from itertools import count

from aiohttp import web

from tests.support.apiserver.answers import answer_status, answer_value
from tests.support.apiserver.strict import problem_of
from tests.support.apiserver.world import World

NAMESPACES = "/api/v1/namespaces"
NAMESPACE = f"{NAMESPACES}/{{namespace}}"
INSIDE = f"{NAMESPACE}/{{plural:services|pods}}"


class Writing:
    """Creates objects as the real server does, with cluster IPs and node ports."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.families: tuple[str, ...] = ("IPv4",)
        """Those that new Services get addresses of."""
        self.refused = ""
        """The pod that must not be created, or the namespace that must not be deleted."""
        self._serial = count(1)

    def add_routes(self, router: web.UrlDispatcher) -> None:
        router.add_post(NAMESPACES, self._create)
        router.add_get(NAMESPACE, self._get)
        router.add_delete(NAMESPACE, self._delete)
        router.add_post(INSIDE, self._create)

    async def _create(self, request: web.Request) -> web.Response:
        obj, namespace = json.loads(await request.read()), request.match_info.get("namespace", "")
        name = obj["metadata"]["name"]
        if namespace and ("", namespace) not in self.world.objects["Namespace"]:
            return answer_status(request, 404, f'namespaces "{namespace}" not found')
        if (namespace, name) in self.world.objects[obj["kind"]]:
            return answer_status(request, 409, f'"{name}" already exists')
        if namespace and name == self.refused:
            return answer_status(request, 403, "denied by a policy")
        if problem := problem_of(obj):
            return answer_status(request, 422, problem)
        if namespace:
            obj["metadata"]["namespace"] = namespace
        if obj["kind"] == "Service":
            self._complete(obj["spec"])
        change = self.world.put(obj)
        assert change.after is not None
        return answer_value(request, change.after, 201)

    def _complete(self, spec: dict[str, object]) -> None:
        """Give a Service addresses and node ports."""
        number = next(self._serial)
        prefixes = {"IPv4": "10.96.200.", "IPv6": "fd00:10:96::c8"}
        spec["clusterIPs"] = [f"{prefixes[each]}{number}" for each in self.families]
        spec |= {"clusterIP": spec["clusterIPs"][0], "ipFamilies": [*self.families]}  # type: ignore[index]
        ports = spec["ports"]
        assert isinstance(ports, list)
        for port in ports if spec.get("type") == "NodePort" else ():
            port["nodePort"] = 30100 + next(self._serial)

    async def _get(self, request: web.Request) -> web.Response:
        name = request.match_info["namespace"]
        found = self.world.objects["Namespace"].get(("", name))
        if found is None:
            return answer_status(request, 404, f'namespaces "{name}" not found')
        return answer_value(request, found)

    async def _delete(self, request: web.Request) -> web.Response:
        """Delete a namespace, and all that is in it."""
        name = request.match_info["namespace"]
        if name == self.refused:
            return answer_status(request, 403, "denied by a policy")
        for kind, objects in self.world.objects.items():
            for key in [key for key in objects if key[0] == name]:
                self.world.delete(kind, key)
        change = self.world.delete("Namespace", ("", name))
        if change is None or change.before is None:
            return answer_status(request, 404, f'namespaces "{name}" not found')
        return answer_value(request, change.before)
