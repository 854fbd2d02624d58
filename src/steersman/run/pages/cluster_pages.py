"""Pages of all that the process knows: objects, plans, counts, for commands and for a UI."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import msgspec

from steersman.config import ProxyConfig
from steersman.model.errors import ApplyError, BusyError
from steersman.model.findings import listed
from steersman.model.kube import Node
from steersman.model.names import ObjectName
from steersman.model.plan import NodePlan
from steersman.model.world import Origin, World
from steersman.run.pages.names_page import names
from steersman.run.pages.node_state import NodeStates
from steersman.run.pages.state_page import state_json
from steersman.run.pages.world_wire import concerning, encode_world
from steersman.run.process.startup import cluster_access
from steersman.run.serve.http import Answer, Page, Request
from steersman.run.sync.sync import Sync
from steersman.source.kubeconfig import KubeconfigError
from steersman.source.packed import unpacked
from steersman.source.trimmed import trimmed_node
from steersman.source.wire import ApiError

_NO_SERVICE = (
    "there is no Service {} on this node; it serves none that is headless or another proxy's\n"
)
_JSON, _MSGPACK = "application/json", "application/msgpack"


class ClusterPages:
    """Serves the objects, the plans and the counts of a process."""

    def __init__(
        self, sync: Callable[[], Sync], states: NodeStates, config: Callable[[], ProxyConfig]
    ) -> None:
        self._sync = sync
        self._states = states
        self._config = config
        self.pages: dict[tuple[str, str], Page] = {
            ("GET", "/world"): self._world,
            ("GET", "/state"): lambda _: Answer(
                pieces=state_json(states.now(), sync().state), content_type=_JSON
            ),
            ("GET", "/names"): self._names,
            ("GET", "/nodes"): self._nodes,
            ("GET", "/stats"): self._counts,
        }
        """By method and path."""

    async def _names(self, request: Request) -> Answer:
        store = self._sync().store
        services = [*store.snapshot.services, *store.unserved]
        slices = map(unpacked, store.packed_slices())
        state = self._sync().state
        plans, findings = tuple(state.plan.services.values()), state.findings
        kind = request.query.get("kind", "")
        found = await asyncio.to_thread(
            names, kind, services, slices, store.nodes, plans, findings=findings
        )
        return Answer(msgspec.json.encode(found), content_type=_JSON)

    def _world(self, request: Request) -> Answer:
        """Answer with the World, or with the part about each `?service=NAMESPACE/NAME` only.

        The pieces are encoded in a thread, of copies made here.
        """
        sync = self._sync()
        state = sync.state
        snapshot, store = sync.store.snapshot, sync.store
        plans = state.plan.services
        findings, plan_findings = state.findings, state.plan.findings
        services, slices, unserved = snapshot.services, snapshot.slices, store.unserved
        wanted: set[ObjectName] | None = None
        if texts := [text for name, text in request.arguments if name == "service"]:
            wanted = {ObjectName(*text.partition("/")[::2]) for text in texts}
            services = {name: services[name] for name in wanted if name in services}
            unserved = {name: unserved[name] for name in wanted if name in unserved}
            if not (services or unserved):
                return Answer(_NO_SERVICE.format(listed(sorted(texts))), 404)
            plans = {k: plan for k, plan in plans.items() if k.name.object_name in wanted}
            objects = {f"Service {name}" for name in wanted}
            for name in wanted:
                found = slices.get(name, ())
                objects |= {f"EndpointSlice {each.metadata.object_name}" for each in found}
            findings = concerning(objects, findings)
            plan_findings = concerning(objects, plan_findings)
        process = self._states.now()
        world = World(
            Origin("process", ""),
            msgspec.structs.replace(snapshot, services=services),
            NodePlan(state.plan.settings, plans, plan_findings, state.unlisted),
            process.mode,
            process.variant,
            sync.planner.config,
            store.facts,
            findings,
            store.nodes,
            unserved,
            process,
        )
        pieces = encode_world(world, store.packed_slices(wanted))
        return Answer(pieces=pieces, content_type=_MSGPACK)

    async def _counts(self, request: Request) -> Answer:
        """Answer with the connections so far of all plans, or of `?service=NAMESPACE/NAME`."""
        wanted = request.query.get("service")
        # A mode keeps the totals only of the plans that it counts: always count all of them.
        plans = tuple(self._sync().state.plan.services.values())
        at = time.monotonic()
        try:
            mode = self._sync().mode
            stats = await mode.worker.do_slowly(mode.stats(plans))
        except (OSError, ApplyError, BusyError) as error:
            return Answer(f"connections cannot be counted now: {error}", 503)
        if wanted is not None and stats is not None:
            stats = stats.of_service(wanted)
        body = await asyncio.to_thread(msgspec.msgpack.encode, (at, stats))
        return Answer(body, content_type=_MSGPACK)

    async def _nodes(self, _: Request) -> Answer:
        """Answer with all Nodes: this process holds its own one, and asks for the others now."""
        nodes: Sequence[Node] = self._sync().store.nodes
        if not self._config().steersman.manifests:
            from steersman.source.fetch import fetch_nodes  # noqa: PLC0415 - only pages ask

            try:
                nodes = [
                    trimmed_node(node) for node in await fetch_nodes(cluster_access(self._config()))
                ]
            except (ApiError, KubeconfigError) as error:
                return Answer(str(error), 502)
        return Answer(msgspec.json.encode(nodes), content_type=_JSON)
