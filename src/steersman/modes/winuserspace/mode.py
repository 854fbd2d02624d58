"""The winuserspace mode: direct portals with Windows' address provider.

Imports nothing that only Linux has, see tests/unit/modes/winuserspace/test_mode.py.
"""

from __future__ import annotations

import os

from steersman.host.exec import Exec
from steersman.host.windows import service_interface
from steersman.modes.specs import ModeOptions
from steersman.modes.userspace.direct import DirectMode, DirectOptions
from steersman.modes.winuserspace.netsh import NetshAddresses
from steersman.proxy.sockets import OpenSocket, open_socket


def winuserspace(
    execute: Exec, options: DirectOptions | None = None, open_socket: OpenSocket = open_socket
) -> DirectMode:
    """Make the mode, on the interface that the environment names."""
    addresses = NetshAddresses(execute, service_interface(os.environ))
    return DirectMode("winuserspace", addresses, options, open_socket)


def create(execute: Exec, options: ModeOptions) -> DirectMode:
    """Build the mode for registry.py."""
    return winuserspace(execute, DirectOptions(options.udp_idle, dns_search=options.dns_search))
