"""Notifications of devices: an inventory that follows them is the one that a new list gives."""

from __future__ import annotations

import asyncio

import pytest

from steersman.host.nlmsg import Message
from steersman.modes.ebpf.devices import list_devices
from steersman.modes.ebpf.netns import device_changes
from tests.support.lab.namespace import in_namespace, sh

pytestmark = pytest.mark.kernel

CHANGES = (
    "link add veth1 type veth peer name veth2",
    "link set veth1 name pod1",
    "link set pod1 master br0",
    "link set pod1 nomaster",
    "link add veth3 up type veth peer name veth4",
    "link del pod1",
    "link add veth1 master br0 type veth peer name veth2",
)
NOISE = (
    "link set pod1 up",
    "link set pod1 promisc on",
    "link set pod1 down",
    "address add fe80::1/64 dev pod1 nodad",
    "address del fe80::1/64 dev pod1",
)


async def changes(*commands: str) -> list[Message]:
    """Run `ip` commands; return the notifications that they bring."""
    with device_changes() as subscription:
        for command in commands:
            sh(f"ip {command}")
        await asyncio.sleep(0.05)
        return subscription.waiting()


def test_every_change_of_a_device_is_noticed() -> None:
    async def body() -> None:
        sh("ip link add br0 type bridge")
        inventory = list_devices()
        for command in CHANGES:
            updated = inventory.updated(await changes(command))
            listed = list_devices()
            assert updated is not None
            assert updated != inventory, command
            assert sorted(updated.devices) == sorted(listed.devices), command
            inventory = updated

    in_namespace(body)


def test_global_addresses_are_listed_again() -> None:
    async def body() -> None:
        sh("ip link add br0 type bridge")
        inventory = list_devices()
        assert inventory.updated(await changes("address add 192.0.2.1/24 dev br0")) is None
        assert inventory.updated(await changes("address del 192.0.2.1/24 dev br0")) is None

    in_namespace(body)


def test_flags_and_local_addresses_change_nothing() -> None:
    async def body() -> None:
        sh("ip link add pod1 type veth peer name pod2")
        inventory = list_devices()
        assert inventory.updated(await changes(*NOISE)) == inventory == list_devices()

    in_namespace(body)
