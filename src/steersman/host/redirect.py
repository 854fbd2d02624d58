"""Let the kernel take what one device receives as if another had received it (TCX, Linux 6.6)."""

from __future__ import annotations

import os
import struct
import sys

from steersman.host.libbpf import call

_SCHED_CLS, _TCX_INGRESS = 3, 46  # of enum bpf_prog_type and enum bpf_attach_type
_TO_INGRESS = 1  # BPF_F_INGRESS
_ETH_P_IP = 0x0800
_INSTRUCTION = struct.Struct("=BBhi")  # struct bpf_insn: code, registers, offset, immediate


def _instruction(code: int, to: int = 0, source: int = 0, offset: int = 0, value: int = 0) -> bytes:
    low, high = (to, source) if sys.byteorder == "little" else (source, to)
    return _INSTRUCTION.pack(code, high << 4 | low, offset, value)


def _program(device: int) -> bytes:
    """Return a program for packets of IPv4; others stay with their device."""
    ipv4 = int.from_bytes(_ETH_P_IP.to_bytes(2, "big"), sys.byteorder)
    return b"".join(
        (
            _instruction(0x61, 3, 1, 16),  # r3 = skb->protocol
            _instruction(0xB7, 0, value=-1),  # r0 = TCX_NEXT
            _instruction(0x55, 3, offset=3, value=ipv4),  # if r3 != ipv4: return
            _instruction(0xB7, 1, value=device),
            _instruction(0xB7, 2, value=_TO_INGRESS),
            _instruction(0x85, value=23),  # r0 = bpf_redirect(r1, r2)
            _instruction(0x95),  # return r0
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
    code = _program(target)
    count = len(code) // _INSTRUCTION.size
    program = call("bpf_prog_load", _SCHED_CLS, b"steersman", b"GPL", code, count, None)
    try:
        return call("bpf_link_create", program, source, _TCX_INGRESS, None)
    finally:
        os.close(program)
