"""Answer the questions of `steersman explain`."""

from __future__ import annotations

import asyncio
import time

import msgspec

from steersman.config import ProxyConfig
from steersman.model.kube import Node
from steersman.model.plan import SourceClass
from steersman.model.world import World
from steersman.operate.answer import Answer, QuestionError
from steersman.operate.client import Client, understood
from steersman.operate.explain_flow import FlowAnswer, FlowExplainer, ReachAnswer
from steersman.operate.explain_problems import explain_problems
from steersman.operate.explain_service import (
    PodAnswer,
    ServiceAnswer,
    explain_pod,
    explain_service,
)
from steersman.operate.names import KnownPod, Names, UnknownNameError, known_pod
from steersman.operate.problems import Filter
from steersman.run.process.startup import cluster_access
from steersman.source.fetch import fetch_pod
from steersman.source.kubeconfig import KubeconfigError
from steersman.source.wire import ApiError


class Question(msgspec.Struct, frozen=True):
    """A question as it is typed; "" for parts that are not given."""

    what: str = ""
    """A Service, pod or address to explain, without a client."""
    client: str = ""
    to: str = ""
    node: str = ""
    """The node that handles a connection first, and whose view of a Service is wanted."""
    interface: str = ""
    namespace: str = ""
    problems: bool = False

    def check(self) -> None:
        """Refuse a question that asks nothing, or two things; raise QuestionError."""
        if self.what and self.to:
            raise QuestionError(f"give {self.what} or --to {self.to}, not both")
        if self.problems and (self.what or self.to or self.client or self.node):
            raise QuestionError("--problems is about all Services: give no name with it")
        if self.interface and not (self.to or (self.what and self.client)):
            raise QuestionError("--interface is about a connection: give --from and --to, too")
        if not (self.what or self.to or self.client or self.problems):
            raise QuestionError(
                "give a Service such as shop/web, --from and --to, or --problems; "
                "see `steersman explain --help`"
            )


async def explain(
    world: World,
    question: Question,
    config: ProxyConfig | None = None,
    client: Client | None = None,
) -> Answer:
    """Answer a question about a World.

    If it needs a Node or a pod that the World does not have, they are asked for: Nodes through the
    running process, pods at the API server of the configuration.

    Args:
        world: where to look.
        question: the question.
        config: says how to reach the API server; None to ask nobody.
        client: of the running process, for tests.

    Raises:
        QuestionError: it cannot be answered.
    """
    names = Names(world, question.namespace)
    try:
        answer, unknown = answer_question(names, question), None
    except UnknownNameError as error:
        answer, unknown = None, error
    problem = ""
    if config is not None and (unknown or names.missed):
        nodes, pods = world.nodes, list[KnownPod]()
        try:
            if world.origin.kind == "process":
                body = await asyncio.to_thread((client or Client()).get, "/nodes")
                with understood():
                    nodes = msgspec.json.decode(body, type=tuple[Node, ...])
            if unknown and unknown.pod and world.origin.kind != "manifests":
                found = await fetch_pod(cluster_access(config), *unknown.pod)
                pods = [known_pod(found)] if found else []
        except KubeconfigError:
            pass  # no flag names an API server, and this is no pod: the error says what to give
        except (ApiError, QuestionError) as error:
            problem = str(error)
        if pods or len(nodes) > len(world.nodes):
            world = msgspec.structs.replace(world, nodes=nodes)
            unknown = None
            answer = answer_question(Names(world, question.namespace, pods), question)
    if answer is None:
        assert unknown is not None
        if problem:
            raise QuestionError(f"{unknown}; asking for more failed: {problem}") from unknown
        raise unknown
    if world.not_yet and isinstance(answer, FlowAnswer | PodAnswer | ReachAnswer):
        raise QuestionError(f"it is not known yet: Services are {world.not_yet}; ask again")
    if problem and isinstance(answer, FlowAnswer | PodAnswer | ServiceAnswer):
        note = f"not all Nodes are known, so this may be incomplete: {problem}"
        answer = msgspec.structs.replace(answer, notes=(*answer.notes, note))
    return msgspec.structs.replace(answer, source=world.origin.text)


def answer_question(names: Names, question: Question) -> Answer:
    """Answer a question by the names of a World.

    Raises:
        QuestionError: it cannot be answered.
    """
    explainer = FlowExplainer(names.world, names)
    node = ""
    if question.node:
        target = names.resolve(question.node)
        if target.kind != "node":
            raise QuestionError(f"--node {question.node}: that is a {target.kind}, not a node")
        node = target.node
    if question.problems:
        return explain_problems(explainer, Filter(namespace=question.namespace), time.time())
    text = question.what or question.to
    if not text:
        client = names.client(question.client)
        return explainer.reach(client, namespace=question.namespace, node=node)
    to = names.resolve(text)
    if not question.client and not (question.to and to.kind == "service"):
        # Only a destination: explain the Service, or the Services that use the pod.
        if to.kind == "service" and to.name:
            return explain_service(explainer, to.name, node)
        if to.kind == "pod" or (to.kind == "address" and to.addresses[0] in names.endpoint_nodes):
            return explain_pod(explainer, to, node)
    if to.kind == "pod" and not to.port:
        return explain_pod(explainer, to, node)
    if to.kind == "service" and to.name and to.name in names.world.unserved:
        return explain_service(explainer, to.name, node)
    client = names.client(question.client or SourceClass.EXTERNAL)
    return explainer.explain(client, to, interface=question.interface, node=node)
