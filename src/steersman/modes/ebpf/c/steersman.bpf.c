// SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0
// The object of the ebpf mode: programs of sockets (socket.h), of devices (device.h) and XDP
// (xdp.h).
#include <stddef.h>
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/pkt_cls.h>
#include <linux/errno.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "basics.h"
#include "constants.h"
#include "structs.h"
#include "maps.h"
#include "common.h"
#include "failures.h"
#include "presence.h"
#include "balance.h"
#include "peers.h"
#include "socket.h"
#include "sctp.h"
#include "packet.h"
#include "maglev.h"
#include "flow.h"
#include "reply.h"
#include "errors.h"
#include "fast_path.h"
#include "device.h"
#include "xdp.h"

char LICENSE[] SEC("license") = "GPL";
