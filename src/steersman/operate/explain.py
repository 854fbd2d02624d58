"""Answer the questions of `steersman explain`."""

from __future__ import annotations

import msgspec

from steersman.config import ProxyConfig
from steersman.model.kube import Pod
from steersman.model.names import ObjectName
from steersman.model.plan import SourceClass
from steersman.model.world import World
from steersman.operate.answer import Answer, QuestionError
from steersman.operate.explain_flow import FlowExplainer
from steersman.operate.explain_service import explain_pod, explain_problems, explain_service
from steersman.operate.names import Names, UnknownNameError
from steersman.run.startup import cluster_access
from steersman.source.fetch import fetch_nodes, fetch_pod
from steersman.source.kubeconfig import KubeconfigError
from steersman.source.wire import ApiError


class Question(msgspec.Struct, frozen=True):
    """A question as it is typed; "" for parts that are not given."""

    what: str = ""
    """A Service, pod or address by itself."""
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
        if self.problems and (self.what or self.to or self.client):
            raise QuestionError("--problems is about all Services: give no name with it")
        if not (self.what or self.to or self.client or self.problems):
            raise QuestionError(
                "give a Service such as shop/web, --from and --to, or --problems; "
                "see `steersman explain --help`"
            )


async def explain(world: World, question: Question, config: ProxyConfig | None = None) -> Answer:
    """Answer a question about a World.

    Nodes and pods that the World does not know are looked for at the API server, if the
    configuration leads to one.

    Args:
        world: where to look.
        question: the question.
        config: tells how to reach the API server; None to ask nobody.

    Raises:
        QuestionError: it cannot be answered.
    """
    pods: list[Pod] = []
    tried = False
    while True:
        try:
            answer = answer_question(Names(world, question.namespace, pods), question)
        except UnknownNameError as error:
            if config is None or tried:
                raise
            tried, more = True, await _look_up(config, world, error.pod)
            if more is None:
                raise
            world, pods = more
        else:
            return msgspec.structs.replace(answer, source=world.origin.text)


async def _look_up(
    config: ProxyConfig, world: World, pod: ObjectName | None
) -> tuple[World, list[Pod]] | None:
    """Ask the API server for all Nodes and for a pod; None if that brings nothing new."""
    if world.origin.kind == "manifests":
        return None
    try:
        access = cluster_access(config)
        nodes = await fetch_nodes(access) if world.origin.kind == "process" else world.nodes
        found = await fetch_pod(access, *pod) if pod else None
    except KubeconfigError:
        return None
    except ApiError as error:
        raise QuestionError(f"not known here, and asking the API server failed: {error}") from error
    if found is None and len(nodes) <= len(world.nodes):
        return None
    return msgspec.structs.replace(world, nodes=nodes), [found] if found else []


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
        return explain_problems(explainer, question.namespace)
    text = question.what or question.to
    if not text:
        client = names.client(question.client)
        return explainer.reach(client, namespace=question.namespace, node=node)
    to = names.resolve(text)
    if not question.client and not (question.to and to.kind == "service"):
        # A thing by itself: the Service, or what uses the pod.
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
