"""Files read again piece by piece: the same as read whole, and only what changed is parsed."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from steersman.source import manifest_pieces
from steersman.source.documents import BrokenFileError
from steersman.source.manifest_pieces import KnownPieces, update_manifest
from steersman.source.manifests import Manifest, read_manifest

CART = "kind: Service\nmetadata: {name: cart}\nspec: {clusterIP: 10.96.0.1, ports: [{port: 80}]}\n"
SHOP = CART.replace("cart", "shop").replace("0.1", "0.2")
NODE = "kind: Node\nmetadata: {name: n}\n"


def item(text: str, indent: str = "") -> str:
    """An entry of a list, as kubectl prints it."""
    first, *rest = text.splitlines()
    return "\n".join([f"{indent}- {first}", *(f"{indent}  {line}" for line in rest), ""])


TEXTS = {
    "one document": CART,
    "documents": f"# shop\n---\n{CART}---\n{SHOP}--- # the end\n{NODE}",
    "end marks": f"{CART}...\n{SHOP}...\n---\n{NODE}...\n",
    "directive": f"%YAML 1.1\n---\n{CART}",
    "directive in between": f"{CART}...\n%YAML 1.1\n---\n{SHOP}",
    "list": f"apiVersion: v1\nitems:\n{item(CART)}{item(SHOP)}kind: List\nmetadata: {{a: b}}\n",
    "list last": f"kind: List\nitems:\n# first\n{item(CART)}\n# second\n{item(NODE)}",
    "indented": f"kind: List\nitems:\n{item(CART, '  ')}{item(SHOP, '  ')}metadata: {{}}\n",
    "typed list": f"kind: ServiceList\napiVersion: v1\nitems:\n{item(CART[14:])}{item(SHOP[14:])}",
    "lists": f"kind: List\nitems:\n{item(CART)}---\nkind: List\nitems:\n{item(SHOP)}",
    "no list": f"kind: Deployment\nitems:\n{item(CART)}{item(SHOP)}",
    "items twice": f"kind: List\nitems:\n{item(CART)}{item(SHOP)}items: []\n",
    "number as version": f"kind: List\napiVersion: 1\nitems:\n{item(CART)}{item(SHOP)}",
    "anchor": f"kind: List\nitems:\n{item(CART)}- &a\n  kind: Node\n  a: {{}}\n- *a\n",
    "quoted": f'kind: List\nitems:\n{item(CART)}- kind: "No\n- de"\n{item(SHOP)}',
    "flow": f"kind: List\nitems:\n{item(CART)}- {{kind: Node,\nmetadata: {{name: n}}}}\n",
    "scalar": f"--- |\n kind: List\n items:\n - a\n - b\n---\n{CART}",
    "findings": f"{CART}---\nkind: Service\nmetadata: {{name: x}}\n---\n{NODE}---\nkind: [1]\n",
    "endpoints": f"{NODE}---\nkind: Endpoints\nmetadata: {{name: e}}\nsubsets: [1]\n",
    "doubled": f"{CART}---\n{CART}---\n{CART}",
    "windows": f"---\n{CART}---\n{SHOP}".replace("\n", "\r\n"),
    "old mac": f"---\n{CART}---\n{SHOP}".replace("\n", "\r"),
    "broken": f"{CART}---\n{SHOP}---\nkind: 'Node\n",
    "broken item": f"kind: List\nitems:\n{item(CART)}- kind: [\n{item(SHOP)}",
    "broken shell": f"kind: List\nitems:\n{item(CART)}{item(SHOP)}metadata: [\n",
    "json": json.dumps({"kind": "List", "items": list(map(yaml.safe_load, (CART, SHOP)))}),
    "json stream": "".join(json.dumps(yaml.safe_load(text)) for text in (CART, SHOP)),
    "json no list": json.dumps({"kind": "Pod", "items": [1, 2]}),
    "nothing": "",
}


def outcome(path: str, text: str, known: KnownPieces | None = None) -> Manifest | str:
    try:
        data = text.encode()
        return read_manifest(path, data) if known is None else update_manifest(path, data, known)[0]
    except BrokenFileError as error:
        return str(error)


def learned(path: str, text: str) -> KnownPieces:
    try:
        return update_manifest(path, text.encode(), {})[1]
    except BrokenFileError:
        return {}


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("path", ["a.yaml", "a.json"])
def test_piece_by_piece_is_the_same_as_whole(name: str, path: str) -> None:
    text = TEXTS[name]
    whole = outcome(path, text)
    assert outcome(path, text, {}) == whole
    assert outcome(path, text, learned(path, text)) == whole


@given(st.lists(st.sampled_from([*TEXTS.values(), "---\n", "\n", "# x\n"]), max_size=4), st.data())
def test_any_history_of_a_file_reads_as_its_last_content(parts: list[str], data: Any) -> None:
    known = learned("a.yaml", "".join(data.draw(st.permutations(parts))))
    text = "".join(parts)
    assert outcome("a.yaml", text, known) == outcome("a.yaml", text)


@pytest.mark.parametrize("name", ["documents", "list", "indented", "json", "typed list"])
def test_only_what_changed_is_parsed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = "a.json" if name == "json" else "a.yaml"
    _, known = update_manifest(path, TEXTS[name].encode(), {})
    parsed: list[bytes] = []

    def reading(path: str, data: bytes, *more: Any) -> Manifest:
        parsed.append(data)
        return read_manifest(path, data, *more)

    monkeypatch.setattr(manifest_pieces, "read_manifest", reading)
    manifest, _ = update_manifest(path, TEXTS[name].replace("0.2", "0.77").encode(), known)
    assert [b"shop" in data for data in parsed] == [True]
    assert "10.96.0.77" in str(manifest.objects)
