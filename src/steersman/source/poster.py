"""Creates Events at the API server."""

from __future__ import annotations

from typing import Any

from steersman.source.backoff import Timing
from steersman.source.client import ApiClient
from steersman.source.credentials import Credentials
from steersman.source.kubeconfig import ClusterAccess
from steersman.source.stats import SourceStats


class ApiEventPoster:
    """Posts to events.k8s.io; implements `run.events.EventPoster`."""

    def __init__(self, access: ClusterAccess) -> None:
        """Take where to post; a connection is made for each Event, as they are rare."""
        self._access = access
        self._credentials = Credentials(access)

    async def post_event(self, namespace: str, event: dict[str, Any]) -> None:
        """Create an Event; ApiError where no server takes it."""
        path = f"/apis/events.k8s.io/v1/namespaces/{namespace}/events"
        async with ApiClient(self._access, SourceStats(), Timing(), self._credentials) as client:
            await client.post(path, event)


class NoEvents:
    """Where there is no API server (manifests): Events go nowhere, the log has the same."""

    async def post_event(self, namespace: str, event: dict[str, Any]) -> None:
        """Do nothing."""
