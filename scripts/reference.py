"""The pages of the reference, made of the code when the documentation site is built."""

from __future__ import annotations

import ast
import inspect
import json
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import msgspec

from steersman.cli.command import Command, command_help, command_names, find_command
from steersman.config import Group, default_config
from steersman.config.flags import FLAGS, OWN
from steersman.config.types import RESTART, FailoverSection, ProxyConfig
from steersman.config.write import to_document
from steersman.model.failover import Settings
from steersman.model.kube import Annotations
from steersman.modes.specs import SPECS
from steersman.operate.answer import Answer
from steersman.operate.status import PRINTED
from steersman.run.observe.metric_table import DECLARED

ANSWERS = {
    "bugreport": ("bugreport.BugReport",),
    "connectivity": ("connectivity.answer.Connectivity",),
    "connections": ("connections.Connections",),
    "doctor": ("doctor.check.Diagnosis",),
    "drift": ("drift.DriftAnswer",),
    "dump": ("dump.KernelDump",),
    "endpoints": ("list_answers.EndpointList",),
    "explain": (
        *("explain_flow.FlowAnswer", "explain_flow.ReachAnswer"),
        *("explain_service.ServiceAnswer", "explain_service.PodAnswer"),
    ),
    "nodeports": ("list_answers.NodePortList",),
    "nodes": ("fleet_view.FleetView",),
    "plan": ("plan_answer.PlanAnswer", "plan_answer.ScriptAnswer"),
    "problems": ("problems.Problems",),
    "services": ("list_answers.ServiceList",),
    "status": ("status.Status",),
    "switch": ("switch.Switched",),
    "top": ("top.Top",),
    "trace": ("trace.TraceAnswer",),
    "version": ("version.VersionAnswer",),
}
"""Commands with `-o json`, and the classes of their answers below steersman.operate."""


@cache
def field_docs(struct: type) -> dict[str, str]:
    """Return the docstrings below the fields of a class, those of its bases included, by name."""
    docs: dict[str, str] = {}
    for each in reversed(struct.__mro__):
        if not each.__module__.startswith("steersman."):
            continue
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(each))).body
        assert isinstance(tree, ast.ClassDef)
        for node, below in zip(tree.body, tree.body[1:], strict=False):
            if (
                isinstance(node, ast.AnnAssign)
                and isinstance(node.target, ast.Name)
                and isinstance(below, ast.Expr)
                and isinstance(below.value, ast.Constant)
            ):
                docs[node.target.id] = inspect.cleandoc(str(below.value.value))
    return docs


def cell(text: object) -> str:
    """Return a text as a cell of a table."""
    return re.sub(r"\s+", " ", str(text)).replace("|", "\\|").strip()


def table(columns: str, rows: Iterable[Iterable[object]]) -> Iterator[str]:
    """Yield the lines of a table; its columns are words with a bar between."""
    names = columns.split("|")
    yield "| " + " | ".join(names) + " |"
    yield "| " + " | ".join("---" for _ in names) + " |"
    for row in rows:
        yield "| " + " | ".join(map(cell, row)) + " |"
    yield ""


# The pages


def flags() -> Iterator[str]:
    """Every flag of `steersman run`."""
    yield from ("# Flags", "")
    yield "The flags of `steersman run`, and of `kube-proxy` where the program has that name."
    yield "Upstream's have its names, types and defaults ([compatibility](compatibility.md))."
    yield "Flags that upstream lacks say *own*, and are valid together with `--config`. Those of"
    yield "other commands are with the [commands](commands.md)."
    yield ""
    for group in Group:
        rows = [flag for flag in FLAGS.values() if flag.group is group and not flag.deprecated]
        if rows and group is not Group.OLD:
            yield from (f"## {group.value}", "")
            yield from table(
                "flag|type|default|meaning",
                (
                    (
                        f"`--{flag.name}`" + (f", `-{flag.short}`" if flag.short else ""),
                        flag.kind,
                        f"`{flag.default}`" if flag.default else "",
                        ("*own* " if flag.name in OWN else "") + flag.help,
                    )
                    for flag in rows
                ),
            )
    yield from ("## Accepted with a warning", "")
    yield "Deprecated flags, and flags of older releases that guides still name."
    yield ""
    old = [flag for flag in FLAGS.values() if flag.deprecated]
    yield from table("flag|instead", ((f"`--{flag.name}`", flag.deprecated) for flag in old))


def fields() -> Iterator[str]:
    """Every field of the configuration file."""
    yield from ("# Fields of the configuration file", "")
    yield "`KubeProxyConfiguration`, `kubeproxy.config.k8s.io/v1alpha1`, with defaults for Linux."
    yield "[Configuration](configuration.md) says how file and flags go together. *Restart* marks"
    yield "fields that are read only at the start; others take effect once the file changes."
    yield ""
    default = to_document(default_config())
    rows = list(_fields(ProxyConfig, "", default, False))
    own = [row for row in rows if row[0].startswith("`steersman.")]
    yield from ("## Upstream's fields", "")
    yield from table("field|type|default|restart|meaning", [row for row in rows if row not in own])
    yield from ("## Fields that upstream lacks", "")
    yield "Below `steersman.failover`, shares are 0 to 1."
    yield ""
    yield from table("field|type|default|restart|meaning", own)


def _fields(
    struct: type[msgspec.Struct], path: str, default: dict[str, Any], restart: bool
) -> Iterator[tuple[str, ...]]:
    """Yield the rows of a section and of the sections in it."""
    docs = field_docs(Settings if struct is FailoverSection else struct)
    for info in msgspec.inspect.type_info(struct).fields:  # type: ignore[attr-defined]
        kind, once = info.type, restart
        while isinstance(kind, msgspec.inspect.Metadata):
            once = once or (kind.extra or {}) == RESTART.extra
            kind = kind.type
        if isinstance(kind, msgspec.inspect.UnionType):
            kind = next(
                each for each in kind.types if not isinstance(each, msgspec.inspect.NoneType)
            )
        if isinstance(kind, msgspec.inspect.StructType):
            inner = default.get(info.encode_name) or _plain_default(kind.cls)
            yield from _fields(kind.cls, f"{path}{info.encode_name}.", inner, once)
            continue
        value = default.get(info.encode_name)
        shown = "" if value in (None, "", [], {}) else f"`{json.dumps(value)}`".replace('"', "")
        meaning = docs.get(info.name, "")
        name = f"`{path}{info.encode_name}`"
        yield name, _type_name(kind), shown, "restart" if once else "", meaning


def _plain_default(struct: type[msgspec.Struct]) -> dict[str, Any]:
    from steersman.config.write import plain  # noqa: PLC0415

    return plain(struct())


def _type_name(kind: object) -> str:
    names = {
        "VarTupleType": "list",
        "DictType": "map",
        "BoolType": "true or false",
        "IntType": "number",
        "FloatType": "number",
        "StrType": "text",
    }
    if isinstance(kind, msgspec.inspect.CustomType):
        return kind.cls.__name__.lower()
    return names[type(kind).__name__]


def annotations() -> Iterator[str]:
    """Every annotation that is read."""
    yield from ("# Annotations", "")
    yield "Annotations on Services and EndpointSlices choose options that Kubernetes has no field"
    yield "for. An unknown value is ignored with a [Finding](problems.md#annotation); a mode that"
    yield "cannot do what an annotation asks for ignores it."
    yield ""
    docs = field_docs(Annotations)
    rows = []
    for info in msgspec.structs.fields(Annotations):
        where, _, text = docs[info.name].partition(": ")
        rows.append(
            (f"`{info.encode_name}`", where.removeprefix("On "), text[0].upper() + text[1:])
        )
    yield from table("annotation|on|meaning", rows)


def commands() -> Iterator[str]:
    """The help of every command."""
    yield from ("# Commands", "")
    yield "The texts of `steersman COMMAND --help` and of the man pages, which"
    yield "`steersman man COMMAND | man -l -` shows. [Operate a node](operate.md) has them by"
    yield "question."
    yield ""
    found = [find_command(name) for name in command_names()]
    for group in dict.fromkeys(each.group for each in found):
        rows = [each for each in found if each.group == group]
        yield from table(
            f"{group}|", ((f"[steersman {c.name}](#{c.name})", c.summary) for c in rows)
        )
    for command in found:
        yield from (f"## {command.name}", "", *_command(command), "")


def _command(command: Command) -> Iterator[str]:
    if command.own_help:
        yield f"{command.summary.capitalize()}. Its [flags](flags.md) are a page of their own."
        yield ""
        text = f"Usage: {command.usage}"
    else:
        text = command_help(command)
    yield from ("```text", *text.split("\n"), "```")
    if command.name in ANSWERS:
        links = (
            f"[{name}](schemas/{name}.json)" for name in map(_class_name, ANSWERS[command.name])
        )
        yield from ("", f"Schema of `-o json`: {', '.join(links)}.")


def _class_name(path: str) -> str:
    return path.rpartition(".")[2]


def answer_class(path: str) -> type[Answer]:
    """Return a class of ANSWERS."""
    module, _, name = path.rpartition(".")
    found: type[Answer] = getattr(import_module(f"steersman.operate.{module}"), name)
    return found


def schema(path: str) -> str:
    """Return the JSON schema of an answer; docstrings of fields are its descriptions."""
    answer = answer_class(path)
    made = msgspec.json.schema(answer)
    for struct in _structs(answer):
        definition = made["$defs"][struct.__name__]
        definition.pop("description", None)
        if struct.__doc__:
            definition["description"] = inspect.cleandoc(struct.__doc__)
        docs = field_docs(struct)
        for info in msgspec.structs.fields(struct):
            if info.name in docs:
                text = re.sub(r"\s+", " ", docs[info.name])
                definition["properties"][info.encode_name]["description"] = text
    if path in _AS_PRINTED:
        _AS_PRINTED[path](made["$defs"])
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": answer.__name__}
    return json.dumps({**head, **made}, indent=2, ensure_ascii=False) + "\n"


_TIME = {
    "type": ["string", "null"],
    "format": "date-time",
    "description": "RFC 3339; null if it is not known.",
}


def _status_as_printed(definitions: dict[str, Any]) -> None:
    """Change the schema of Status into that of its `data`: flat, and with times as texts."""
    status, connection = definitions["Status"]["properties"], definitions["SourceStatus"]
    state = definitions.pop("NodeState")["properties"]
    for name in ("state", "now"):
        del status[name]
    for name in ("Drift", "Writer"):
        del definitions[name]
    definitions["Condition"]["properties"]["since"] = _TIME
    del connection["properties"]["quietSeconds"]
    connection["properties"]["lastEvent"] = _TIME
    status |= {name: state[name] for name in PRINTED}
    status["unlisted"] = state["findingCounts"] | {"description": "Findings that are not listed."}
    status["started"] = _TIME
    status["synced"] = _last_sync(definitions, state)
    status["connection"] = {"$ref": "#/$defs/SourceStatus"}
    definitions["Status"]["required"] = ["source", "conditions"]


def _last_sync(definitions: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
    fields = {"at": _TIME, "reason": state["syncReason"]}
    fields |= {name: state[name] for name in ("phases", "refused")}
    definitions["LastSync"] = {
        "title": "LastSync",
        "description": "The last sync that reached the kernel.",
        "type": "object",
        "properties": fields,
        "required": [*fields],
    }
    nothing = "null before the first sync reached the kernel."
    return {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/LastSync"}], "description": nothing}


def _services_as_printed(definitions: dict[str, Any]) -> None:
    """Change the schema of ServiceList into that of its `data`: without the time."""
    del definitions["ServiceList"]["properties"]["now"]


_AS_PRINTED = {
    "status.Status": _status_as_printed,
    "list_answers.ServiceList": _services_as_printed,
}


def _structs(answer: type[msgspec.Struct]) -> list[type[msgspec.Struct]]:
    """Return a struct and all that its fields can hold."""
    found: dict[type[msgspec.Struct], None] = {}
    waiting: list[object] = [msgspec.inspect.type_info(answer)]
    while waiting:
        kind = waiting.pop()
        if isinstance(kind, msgspec.inspect.StructType):
            if kind.cls in found:
                continue
            found[kind.cls] = None
            waiting += [info.type for info in kind.fields]
        elif isinstance(kind, msgspec.Struct):
            for name in kind.__struct_fields__:
                inner = getattr(kind, name)
                waiting += inner if isinstance(inner, tuple) else [inner]
    return list(found)


class MetricRow(NamedTuple):
    """A metric that the program declares, and the modes that have it."""

    name: str
    type: str
    labels: tuple[str, ...]
    modes: str
    text: str


def metric_rows() -> Iterator[MetricRow]:
    """Yield every metric that the program declares."""
    for metric in DECLARED:
        having = [mode for mode, spec in SPECS.items() if metric.name in spec.metrics]
        modes = ", ".join(having) or "all"
        yield MetricRow(metric.name, metric.kind, metric.labels, modes, metric.text)


def metrics() -> Iterator[str]:
    """Every metric."""
    yield from ("# List of metrics", "")
    yield "Every metric that the program declares; *modes* are those that have it."
    yield "[Metrics](metrics.md) explains them. `process_*` and `kubernetes_build_info` are as in"
    yield "every Kubernetes component. `/metrics/slis` has `kubernetes_healthcheck` and"
    yield "`kubernetes_healthchecks_total`, too."
    yield ""
    yield from table(
        "metric|type|labels|modes|meaning",
        (
            (
                f"`{row.name}`",
                row.type,
                ", ".join(f"`{x}`" for x in row.labels),
                row.modes,
                row.text,
            )
            for row in sorted(metric_rows())
        ),
    )


PAGES: dict[str, Callable[[], Iterator[str]]] = {
    "flags.md": flags,
    "fields.md": fields,
    "annotations.md": annotations,
    "commands.md": commands,
    "metric-list.md": metrics,
}


def made() -> dict[str, str]:
    """Return the text of every file that is made of the code, by its path in the site."""
    out = {name: "\n".join(page()).rstrip("\n") + "\n" for name, page in PAGES.items()}
    for paths in ANSWERS.values():
        out |= {f"schemas/{_class_name(path)}.json": schema(path) for path in paths}
    return out
