"""What browsers send, and what nobody should: addresses, forms, files, cookies."""

from __future__ import annotations

from collections.abc import AsyncIterator

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steersman.run.serve.http import Answer, Request
from steersman.ui.requests import File, Form, RefusedError, Route, _form, cookie, read_form

URLENCODED = "application/x-www-form-urlencoded"
MULTIPART = "multipart/form-data; boundary=xx"


def request(*headers: tuple[str, str], body: bytes | Exception = b"") -> Request:
    head = h11.Request(method="POST", target="/", headers=[("Host", "x"), *headers])

    async def parts() -> AsyncIterator[object]:
        if isinstance(body, Exception):
            raise body
        yield h11.Data(data=body)
        yield h11.EndOfMessage()

    events = parts()
    return Request(head, lambda: anext(events), lambda: False)


def part(disposition: str, data: bytes, more: str = "") -> bytes:
    head = f"--xx\r\nContent-Disposition: form-data; {disposition}\r\n{more}\r\n"
    return head.encode() + data + b"\r\n"


@pytest.mark.parametrize("kind", [URLENCODED, f"{URLENCODED}; charset=UTF-8"])
async def test_a_form(kind: str) -> None:
    body = b"csrf=t+o%2Bk&word=%C3%B6%FF&word=two&empty="
    form = await read_form(request(("Content-Type", kind), body=body))
    assert form.text("csrf") == "t o+k"
    assert form.texts("word") == ["\u00f6\ufffd", "two"]
    assert form.text("empty") == form.text("none") == ""


async def test_a_form_with_a_file() -> None:
    data = bytes(range(256)) + b"\r\n--x\r\n\r\n--\n"
    body = (
        part('name="text"', "one\r\nl\u00efne".encode())
        + part('name="file"; filename="a \\"b\\".yaml"', data, "Content-Type: text/yaml\r\n")
        + part('name="none"; filename=""', b"")
        + part('name="node"', b"a")
        + part("name=node", b"b")
        + b"--xx--\r\n"
    )
    for kind in (MULTIPART, 'Multipart/Form-Data; boundary="xx"'):
        form = await read_form(request(("Content-Type", kind), body=body))
        assert form.text("text") == "one\r\nl\u00efne"
        assert form.texts("node") == ["a", "b"]
        assert form.files["file"] == File('a "b".yaml', data)
        assert form.files["none"] == File("", b"")


@pytest.mark.parametrize("kind", ["", "text/plain", "application/json", ";;", "a/b/c"])
async def test_what_is_no_form_has_no_fields(kind: str) -> None:
    assert await read_form(request(("Content-Type", kind), body=b"a=b")) == Form()


@pytest.mark.parametrize(
    ("kind", "body", "error"),
    [
        (URLENCODED, b"a=b&" * 1001, "too many fields"),
        (MULTIPART, part("name=a", b"") * 1001 + b"--xx--", "too many fields"),
        (MULTIPART, b"", "not whole"),
        (MULTIPART, part("name=a", b"cut"), "not whole"),
        (MULTIPART, b"--xx\r\nno blank line\r\n--xx--", "cannot be read"),
        (MULTIPART, b"--xx\r\n" + b"x" * 5000 + b"\r\n\r\n\r\n--xx--", "cannot be read"),
        ("multipart/form-data", b"--\r\n\r\n----", "not whole"),
        (URLENCODED, h11.RemoteProtocolError("bad chunk"), "cannot be read"),
        (URLENCODED, h11.RemoteProtocolError("too large", 413), "too large"),
    ],
)
async def test_a_form_that_cannot_be_read(kind: str, body: bytes | Exception, error: str) -> None:
    with pytest.raises(RefusedError, match=error) as refused:
        await read_form(request(("Content-Type", kind), body=body))
    assert refused.value.status == (413 if error == "too large" else 400)


@given(st.sampled_from([URLENCODED, MULTIPART]), st.binary(max_size=200), st.integers(0, 200))
def test_no_body_is_a_defect(kind: str, noise: bytes, at: int) -> None:
    whole = part('name="a"; filename="b"', b"c") + b"--xx--\r\n"
    for body in (noise, whole[:at] + noise + whole[at:]):
        try:
            found: object = _form(kind, body)
        except RefusedError as error:
            found = error.status
        assert isinstance(found, Form) or found == 400


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("session=abc", "abc"),
        ('a=b; session="abc" ;c=d', "abc"),
        ("sessions=no; session=first; session=second", "first"),
        ("session", ""),
        ("=;;=; session=a=b", "a=b"),
        ("", ""),
    ],
)
def test_a_cookie(header: str, value: str) -> None:
    assert cookie(request(("Cookie", header)), "session") == value


@pytest.mark.parametrize(
    ("path", "values"),
    [
        ("/services/shop/web/run", {"namespace": "shop", "name": "web"}),
        ("/services/../web/run", {"namespace": "..", "name": "web"}),
        ("/services//web/run", None),
        ("/services/shop/web", None),
        ("/services/shop/web/run/", None),
        ("services/shop/web/run", None),
    ],
)
def test_parts_of_a_path(path: str, values: dict[str, str] | None) -> None:
    async def answer(_: object) -> Answer:
        return Answer()

    assert Route("POST", "/services/{namespace}/{name}/run", answer).values(path) == values
