"""`/services/NAMESPACE/NAME`: one Service, the way of a packet to it, and what the kernel has.

The page follows its node's syncs. Rates are asked for every few seconds as long as the page is
open; what costs the node a process (doctor, dump, trace) only if somebody presses the button.
"""

from __future__ import annotations

import asyncio
from urllib.parse import quote, urlencode

import msgspec

from steersman.model.names import ObjectName
from steersman.operate.answer import QuestionError, View
from steersman.operate.doctor.check import Diagnosis
from steersman.operate.dump import KernelDump
from steersman.operate.names import KnownPod, Names, UnknownNameError
from steersman.operate.service_view import Differing, ServiceView, service_view
from steersman.operate.trace import TraceAnswer
from steersman.operate.traffic import ServiceRates
from steersman.run.serve import http
from steersman.ui.access import HTML
from steersman.ui.doctor_runs import run_on
from steersman.ui.requests import Asked
from steersman.ui.site import Page, Query, Site

_PATH = "/services/{namespace}/{name}"
_LONGEST = 1000  # characters of a client or destination that somebody types
_MOST_DIFFERING = 20

_ANSWERS: dict[str, type[Diagnosis | KernelDump | TraceAnswer]] = {
    "doctor": Diagnosis,
    "dump": KernelDump,
    "trace": TraceAnswer,
}
"""What a page may ask a node to run."""


class RunView(View, frozen=True, kw_only=True):
    """The answer of a command that ran on a node."""

    service: str
    node: str
    command: str
    back: str
    """Address of the page that it belongs to."""
    answer: Diagnosis | KernelDump | TraceAnswer | None = None
    problem: str = ""
    """Why there is no answer."""


def _name(query: Query) -> ObjectName:
    return ObjectName(query["namespace"], query["name"])


async def view_of(site: Site, query: Query) -> ServiceView:
    """Describe the Service of a query, or say why that is not possible."""
    name, node = _name(query), query.get("node", "") or site.fleet.default_node
    nodes = tuple(sorted(site.fleet.nodes))
    if not node:
        return ServiceView(
            service=str(name),
            problem="no node has been reached yet",
            advice="steersman must run on the nodes, and this server must be allowed to ask it.",
        )
    client, to = (query.get(key, "")[:_LONGEST] for key in ("client", "to"))
    try:
        world = await site.sampler.world(node, name)
    except (QuestionError, TimeoutError) as error:
        return ServiceView(
            service=str(name),
            node=node,
            nodes=nodes,
            problem=f"node {node}: {str(error) or 'it did not answer in time'}",
            advice="Check the namespace and the name, or choose another node.",
        )
    names, pods = Names(world, name.namespace), list[KnownPod]()
    try:
        names.client(client or "pod")
    except UnknownNameError as error:
        # A pod behind another Service, which the World of this one does not have. Readers who log
        # in were only asked for their rights in this namespace.
        wanted = error.pod
        if wanted and (
            wanted.namespace == name.namespace or await site.access.sees_pods(wanted.namespace)
        ):
            found = await site.sampler.pod(node, wanted)
            pods = [found] if found else []
    except QuestionError:  # the view says so
        pass
    names = Names(world, name.namespace, pods)
    view = await asyncio.to_thread(service_view, names, name, client, to)
    differing = tuple(
        Differing(each, f"It was compared with {group.reference}.")
        for group in site.fleet.disagreements
        if str(name) in group.services
        for each in group.nodes[:_MOST_DIFFERING]
    )
    return msgspec.structs.replace(view, node=node, nodes=nodes, differing=differing)


async def rates_of(site: Site, query: Query) -> ServiceRates:
    """Return the rates of the Service of a query, or say why there are none."""
    name, sampler = _name(query), site.sampler
    node = query.get("node", "") or site.fleet.default_node
    try:
        rates = await sampler.rates(node, str(name))
        pods = Names(await sampler.world(node, name)).pods_by_ip
    except (QuestionError, TimeoutError) as error:
        problem = f"node {node}: {str(error) or 'it did not answer in time'}"
        return ServiceRates(service=str(name), node=node, problem=problem)
    # A row is called `10.1.0.5:8080`, or `10.1.0.5:8080 (http)`.
    addresses = {
        row.name: row.name.split(" ")[0].rpartition(":")[0].strip("[]") for row in rates.rows
    }
    found = {row: str(pods[ip][0].name) for row, ip in addresses.items() if ip in pods}
    return msgspec.structs.replace(rates, pods=found)


# What somebody starts


def arguments_of(command: str, service: str, client: str, to: str) -> list[str]:
    """Return the words that ask a command about a Service, or about a connection to it.

    Raises:
        QuestionError: a name would be taken for a flag, or there is no such command.
    """
    if command not in _ANSWERS:
        raise QuestionError(f"{command!r} cannot be run from here")
    if service.startswith("-"):
        raise QuestionError(f"{service!r} is not a name of a Service")
    match command:
        case "dump":
            return [service]
        case "doctor":
            # A class of clients says nothing that doctor could try.
            known = client not in ("", "pod", "external", "outside", "node")
            return [f"--from={client}", f"--to={to}"] if known and to else [service]
        case _:
            # The packet of a pod that is not named is sent by the node.
            words = {"pod": "node", "": "node", "external": "outside"}
            return [f"--from={words.get(client, client)}", f"--to={to or service}"]


async def run_command(site: Site, asked: Asked) -> http.Answer:
    """Run a command on the node, and answer with a page that has its result."""
    name = _name(asked.values)
    command, node, client, to = (
        asked.form.text(key)[:_LONGEST].strip() for key in ("command", "node", "client", "to")
    )
    query = {"node": node, "client": client, "to": to}
    back = _PATH.format(namespace=quote(name.namespace), name=quote(name.name))
    view = RunView(service=str(name), node=node, command=command, back=f"{back}?{urlencode(query)}")
    try:
        words = arguments_of(command, str(name), client, to)
        answer = await run_on(site.fleet, node, command, words, _ANSWERS[command])
        view = msgspec.structs.replace(view, answer=answer)
        if isinstance(answer, Diagnosis) and node:
            site.doctor_runs.note(node, str(name), answer)
    except (QuestionError, TimeoutError) as error:
        text = str(error) or "the node did not answer in time"
        view = msgspec.structs.replace(view, problem=text)
    page_of = Page("", "run.html", view_of, f"{command} of {name}")
    html = site.render("run.html", page=page_of, answer=view, query=query, events="")
    return http.Answer(html, content_type=HTML)


PAGE = Page(_PATH, "service.html", view_of, "Service", actions={f"{_PATH}/run": run_command})
RATES = Page(f"{_PATH}/rates", "rates.html", rates_of, "Rates of a Service", live=False)
