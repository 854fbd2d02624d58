"""Requests to the kernel that may be repeated: what is so already is no error.

An object that exists is changed to the wanted value, and deleting one that does not exist succeeds.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable
from typing import NamedTuple

from steersman.host.netlink import Netlink
from steersman.host.nlmsg import Request
from steersman.model.errors import TRANSIENT_ERRNOS, ApplyError, BusyError

_BATCH = 100
_BUSY = TRANSIENT_ERRNOS | {errno.EBUSY}


class TolerantRequest(NamedTuple):
    """A request, and how to treat errors of the kernel."""

    describe: Callable[[], str]
    """Returns the object's name for error messages; called only if there is an error."""
    request: Request
    harmless: tuple[int, ...] = ()
    """Errors that mean that the wanted state is reached already."""
    change: Callable[[], Request] | None = None
    """Returns the request to send if the object to make exists."""


def send(netlink: Netlink, requests: Iterable[TolerantRequest]) -> None:
    """Send requests in batches, in order.

    Raises:
        ApplyError: the kernel rejected one, with an error that is not harmless.
        BusyError: the kernel is short of memory; all can be sent again.
    """
    requests = list(requests)
    for start in range(0, len(requests), _BATCH):
        part = requests[start : start + _BATCH]
        refused = netlink.batch([each.request for each in part])
        others: list[TolerantRequest] = []
        for index, error in refused.items():
            sent = part[index]
            if sent.change is not None and error.errno == errno.EEXIST:
                others.append(TolerantRequest(sent.describe, sent.change()))
            elif error.errno not in sent.harmless:
                failure = BusyError if error.errno in _BUSY else ApplyError
                raise failure(f"{sent.describe()}: {error.strerror}") from error
        if others:
            send(netlink, others)
