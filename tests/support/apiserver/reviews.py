"""TokenReview and SubjectAccessReview of the test API server: who may do what."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.support.apiserver.answers import answer_value
from tests.support.apiserver.world import Object

TOKENS = "/apis/authentication.k8s.io/v1/tokenreviews"
RIGHTS = "/apis/authorization.k8s.io/v1/subjectaccessreviews"


@dataclass
class Reviews:
    """Answers reviews as the real server does, of what a test says."""

    users: dict[str, Object] = field(default_factory=dict)
    """The user of each valid token."""
    allowed: dict[str, set[tuple[str, ...]]] = field(default_factory=dict)
    """By user or group: verb, resource (`pods/exec`, `endpointslices.discovery.k8s.io`), and
    namespace; a right without namespace is for all."""
    asked: list[Object] = field(default_factory=list)
    """The spec of every review."""

    async def token(self, request: web.Request) -> web.Response:
        review = await self._review(request)
        user = self.users.get(review["spec"]["token"])
        status: dict[str, Any] = {"user": {}}
        if user is None:
            status["error"] = "[invalid bearer token, token lookup failed]"
        else:
            status |= {"authenticated": True, "user": user, "audiences": ["https://kubernetes"]}
        return answer_value(request, {**review, "status": status}, 201)

    async def right(self, request: web.Request) -> web.Response:
        review = await self._review(request)
        spec = review["spec"]
        names = (spec["user"], *spec.get("groups", ()))
        wanted = _right(spec["resourceAttributes"])
        rights = set[tuple[str, ...]]().union(*(self.allowed.get(name, set()) for name in names))
        status = {"allowed": wanted in rights or wanted[:2] in rights}
        if not status["allowed"]:
            status["reason"] = "no RBAC policy matched"  # type: ignore[assignment]
        return answer_value(request, {**review, "status": status}, 201)

    async def _review(self, request: web.Request) -> Object:
        review: Object = json.loads(await request.read())
        assert request.path.endswith(f"/{review['kind'].lower()}s")
        self.asked.append(review["spec"])
        return review


def _right(attributes: Mapping[str, str]) -> tuple[str, ...]:
    resource = attributes["resource"]
    if attributes.get("subresource"):
        resource += f"/{attributes['subresource']}"
    if attributes.get("group"):
        resource += f".{attributes['group']}"
    return attributes["verb"], resource, attributes.get("namespace", "")
