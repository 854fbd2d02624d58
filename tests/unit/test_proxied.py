"""Metrics of the userspace proxy."""

from __future__ import annotations

from prometheus_client.metrics_core import Metric

from steersman.run.metrics import Metrics
from steersman.run.proxied import proxied
from tests.userspace_proxy import answering, ask, endpoint, key, listener, proxy, refusing, until


def values(metrics: list[Metric]) -> dict[str, float]:
    """Samples by name, endpoint's port and what else tells them apart."""
    return {
        " ".join([s.name, *(v for k, v in s.labels.items() if k in ("endpoint", "direction"))]): (
            s.value
        )
        for metric in metrics
        for s in metric.samples
        if s.labels.get("le", "+Inf") == "+Inf"
    }


async def test_what_went_through_is_counted() -> None:
    gone = await refusing()
    async with endpoint(answering(b"one")) as one, proxy() as made:
        await made.start({key(): listener(gone, one)})
        for _ in range(3):
            assert await ask(made.port(key()), b"12345") == b"one12345"
        await until(lambda: made.open_connections == 0)
        found = values(list(proxied(made)))
        assert found[f"steersman_connections_total {one}"] == 3
        assert found[f"steersman_dial_seconds_count {one}"] == 3
        assert found[f"steersman_dial_failures_total {gone}"] == 1
        assert found[f"steersman_proxied_bytes_total {one} to_endpoint"] == 15
        assert found[f"steersman_proxied_bytes_total {one} to_client"] == 24
        assert found["steersman_proxied_connections"] == 0
        metrics = Metrics("userspace")
        metrics.ask(lambda: proxied(made))
        text, _ = metrics.render()
        assert f'endpoint="{one}"'.encode() in text
