"""Let the kernel take what one device receives as if another had received it (TCX, Linux 6.6)."""

from __future__ import annotations

import os
import sys

from steersman.host.libbpf import call, instruction, load_program

_SCHED_CLS, _TCX_INGRESS = 3, 46  # of enum bpf_prog_type and enum bpf_attach_type
_TO_INGRESS = 1  # BPF_F_INGRESS
_ETH_P_IP = 0x0800


def _program(device: int) -> bytes:
    """Return a program for packets of IPv4; others stay with their device."""
    ipv4 = int.from_bytes(_ETH_P_IP.to_bytes(2, "big"), sys.byteorder)
    return b"".join(
        (
            instruction(0x61, 3, 1, 16),  # r3 = skb->protocol
            instruction(0xB7, 0, value=-1),  # r0 = TCX_NEXT
            instruction(0x55, 3, offset=3, value=ipv4),  # if r3 != ipv4: return
            instruction(0xB7, 1, value=device),
            instruction(0xB7, 2, value=_TO_INGRESS),
            instruction(0x85, value=23),  # r0 = bpf_redirect(r1, r2)
            instruction(0x95),  # return r0
        )
    )


def redirect_ipv4(source: int, target: int) -> int:
    """Redirect packets of IPv4 between devices of this thread's network namespace.

    Args:
        source: index of the device that receives them.
        target: index of the device that they appear to come in by.

    Returns:
        A descriptor: the redirection ends when it is closed, or with the device.

    Raises:
        OSError: libbpf, privileges or a newer kernel are missing.
    """
    program = load_program(_SCHED_CLS, 0, _program(target))
    try:
        return call("bpf_link_create", program, source, _TCX_INGRESS, None)
    finally:
        os.close(program)
