// SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0
// Connections of this node's processes and pods, balanced when a socket connects or sends: no
// packet is rewritten.
#pragma once

#define LEAVE 0 // no Service, or left to the programs of devices
#define REPLACED 1

// The client of affinities: a network namespace, that is a pod. No client has such an address.
INLINE void netns_client(__u64 netns, struct address *out)
{
	out->halves[0] = ~0ull;
	out->halves[1] = netns;
}

// Return the address that a socket is bound to, or the unspecified one. `version` is a constant of
// the program: otherwise clang would merge the loads, by arithmetic on the pointer that is not
// allowed.
INLINE void bound_address(struct bpf_sock_addr *ctx, int version, struct address *out)
{
	struct bpf_sock *sk = ctx->sk;

	*out = (struct address){};
	if (sk && version == 4) {
		set_ipv4(out, sk->src_ip4);
	} else if (sk) {
		out->words[0] = sk->src_ip6[0];
		out->words[1] = sk->src_ip6[1];
		out->words[2] = sk->src_ip6[2];
		out->words[3] = sk->src_ip6[3];
	}
}

INLINE int bound_to(struct bpf_sock_addr *ctx, int version, const struct address *address)
{
	struct address own;

	bound_address(ctx, version, &own);
	return same_address(&own, address);
}

// Check source ranges. An IPv6 socket may connect to IPv4.
INLINE int may_use(struct bpf_sock_addr *ctx, const struct config *config, __u32 service,
		   int version, const struct address *destination)
{
	struct address source;

	bound_address(ctx, version, &source);
	if (is_unspecified(&source))
		source = is_ipv4(destination) ? config->node_ip4 : config->node_ip6;
	return in_prefixes(service, &source);
}

INLINE int refuse(int error, __u32 counter)
{
	count(counter);
	return error;
}

// Leave connections alone: their packets are dropped on a device, without an answer. Only datagrams
// of the node itself are refused here, as by a DROP in netfilter's OUTPUT.
INLINE int drop_later(struct bpf_sock_addr *ctx, int own)
{
	return own && ctx->protocol == IPPROTO_UDP ? refuse(-EPERM, SOCKET_DROPPED) : LEAVE;
}

// Replace the destination of a socket. Return LEAVE, REPLACED or a negative errno.
INLINE int balance(struct bpf_sock_addr *ctx, struct address *address, __be16 *port, int connected,
		   int version)
{
	const struct config *config = get_config();
	__u64 netns = bpf_get_netns_cookie(ctx);
	struct frontend_key key = {
		.address = *address,
		.port = *port,
		.protocol = ctx->protocol,
	};
	struct frontend frontend = {};
	struct address client;
	struct slot slot = {};
	__u32 class, action;
	int found, own, chosen;

	if (!config)
		return LEAVE;
	own = netns == config->host_cookie;
	found = find_frontend(&key, own, &frontend);
	if (found == NOTHING)
		return LEAVE;
	if (found == UNKNOWN_PORT)
		return refuse(-ECONNREFUSED, SOCKET_REJECTED);
	if (found == UNASSIGNED)
		return drop_later(ctx, own);
	// Another network namespace of this node is a pod, if there is a detector of pods.
	class = config->flags & (CONFIG_DETECTOR_CIDR | CONFIG_DETECTOR_DEVICE) ? POD : EXTERNAL;
	action = action_of(&frontend, own ? NODE : class);
	if (frontend.flags & FRONTEND_RANGES) {
		if (!own)
			return LEAVE; // its address is only known in its packets
		if (!may_use(ctx, config, frontend.service, version, address))
			return drop_later(ctx, own);
	}
	if ((action & ACTION_VERDICT) == REJECT)
		return refuse(-ECONNREFUSED, SOCKET_REJECTED);
	if ((action & ACTION_VERDICT) == DROP)
		return drop_later(ctx, own);
	if (action & ACTION_MASQUERADE && !own)
		return LEAVE; // sources are rewritten in packets only
	netns_client(netns, &client);
	if (connected)
		chosen = choose(frontend.service, action, &client, &slot);
	else
		chosen = choose_once(frontend.service, action, &client, bpf_get_socket_cookie(ctx),
				     &slot);
	if (!chosen)
		return refuse(-ECONNREFUSED, SOCKET_REJECTED);
	if (!own && bound_to(ctx, version, &slot.address))
		return LEAVE; // it reaches itself: the programs of devices masquerade
	*address = slot.address;
	*port = slot.port;
	count(SOCKET_FORWARDED);
	if (chosen == CHOSEN)
		count_connection(&key, frontend.service, &slot, 0, 0);
	return REPLACED;
}

INLINE void put_reverse(struct bpf_sock_addr *ctx, const struct peer *peer)
{
	struct reverse_key key = {
		.cookie = bpf_get_socket_cookie(ctx),
		.endpoint = peer->endpoint,
		.port = peer->endpoint_port,
	};
	struct reverse value = { .frontend = peer->frontend, .port = peer->frontend_port };
	struct reverse *known = bpf_map_lookup_elem(&reverses, &key);

	if (!known || !same_address(&known->frontend, &value.frontend) || known->port != value.port)
		bpf_map_update_elem(&reverses, &key, &value, BPF_ANY);
}

INLINE void delete_peer(__u64 cookie, __u32 protocol)
{
	struct peer *stored = find_peer(cookie);
	struct reverse_key key = { .cookie = cookie };

	if (!stored)
		return;
	if (protocol == IPPROTO_UDP) {
		key.endpoint = stored->endpoint;
		key.port = stored->endpoint_port;
		bpf_map_delete_elem(&reverses, &key);
	}
	drop_peer(cookie);
}

INLINE int send(struct bpf_sock_addr *ctx, struct address *address, __be16 *port, int connected,
		int version)
{
	struct peer peer;
	int result;

	// Before anything else is read. The socket may have a peer all the same: of UDP, or of TCP
	// after a connection that failed.
	if (ctx->protocol != IPPROTO_UDP && is_no_service(address) &&
	    !(connected && find_peer(bpf_get_socket_cookie(ctx))))
		return LEAVE;
	peer = (struct peer){ .frontend = *address, .frontend_port = *port };
	result = balance(ctx, address, port, connected, version);
	if (result == REPLACED) {
		peer.endpoint = *address;
		peer.endpoint_port = *port;
		if (connected)
			put_peer(bpf_get_socket_cookie(ctx), &peer);
		if (ctx->protocol == IPPROTO_UDP) // sockets.py finds connected sockets there
			put_reverse(ctx, &peer);
	} else if (connected) { // of UDP, or of TCP after a connection that failed
		delete_peer(bpf_get_socket_cookie(ctx), ctx->protocol);
	}
	return result;
}

// Replace an endpoint by the Service that the socket has connected or sent to.
INLINE int restore(struct bpf_sock_addr *ctx, struct address *address, __be16 *port)
{
	struct reverse_key key = {
		.cookie = bpf_get_socket_cookie(ctx),
		.endpoint = *address,
		.port = *port,
	};
	struct peer *peer = find_peer(key.cookie);
	struct reverse *known;

	if (peer && peer->endpoint_port == *port && same_address(&peer->endpoint, address)) {
		*address = peer->frontend;
		*port = peer->frontend_port;
		return REPLACED;
	}
	known = bpf_map_lookup_elem(&reverses, &key);
	if (!known)
		return LEAVE;
	*address = known->frontend;
	*port = known->port;
	return REPLACED;
}

INLINE void load_ipv4(struct bpf_sock_addr *ctx, struct address *address)
{
	set_ipv4(address, ctx->user_ip4);
}

INLINE void load_ipv6(struct bpf_sock_addr *ctx, struct address *address)
{
	address->words[0] = ctx->user_ip6[0];
	address->words[1] = ctx->user_ip6[1];
	address->words[2] = ctx->user_ip6[2];
	address->words[3] = ctx->user_ip6[3];
}

INLINE void store_ipv4(struct bpf_sock_addr *ctx, const struct address *address)
{
	ctx->user_ip4 = address->words[3];
}

INLINE void store_ipv6(struct bpf_sock_addr *ctx, const struct address *address)
{
	ctx->user_ip6[0] = address->words[0];
	ctx->user_ip6[1] = address->words[1];
	ctx->user_ip6[2] = address->words[2];
	ctx->user_ip6[3] = address->words[3];
}

#define SOCKET_PROGRAM(hook, version, connected) \
	SEC("cgroup/" #hook #version) int sm_##hook##version(struct bpf_sock_addr *ctx) \
	{ \
		__be16 port = (__be16)ctx->user_port; \
		struct address address; \
		int result; \
\
		load_ipv##version(ctx, &address); \
		result = send(ctx, &address, &port, connected, version); \
		if (result < 0) { \
			bpf_set_retval(result); \
			return 0; \
		} \
		if (result == REPLACED) { \
			store_ipv##version(ctx, &address); \
			ctx->user_port = port; \
		} \
		return 1; \
	}

SOCKET_PROGRAM(connect, 4, 1)
SOCKET_PROGRAM(connect, 6, 1)
SOCKET_PROGRAM(sendmsg, 4, 0)
SOCKET_PROGRAM(sendmsg, 6, 0)

// Programs of these hooks cannot refuse.
#define RESTORING_PROGRAM(hook, version) \
	SEC("cgroup/" #hook #version) int sm_##hook##version(struct bpf_sock_addr *ctx) \
	{ \
		__be16 port = (__be16)ctx->user_port; \
		struct address address; \
\
		load_ipv##version(ctx, &address); \
		if (restore(ctx, &address, &port) == REPLACED) { \
			store_ipv##version(ctx, &address); \
			ctx->user_port = port; \
		} \
		return 1; \
	}

RESTORING_PROGRAM(recvmsg, 4)
RESTORING_PROGRAM(recvmsg, 6)
RESTORING_PROGRAM(getpeername, 4)
RESTORING_PROGRAM(getpeername, 6)

// Refuse to bind to a node port: the Service would get the connections.
INLINE int guard(struct bpf_sock_addr *ctx, struct address *address)
{
	const struct config *config = get_config();
	struct frontend_key key = { .port = (__be16)ctx->user_port, .protocol = ctx->protocol };
	struct frontend frontend;

	if (!config || !(config->flags & CONFIG_GUARD_NODE_PORTS) || !key.port ||
	    bpf_get_netns_cookie(ctx) != config->host_cookie)
		return 1;
	if (!is_unspecified(address) && !serves_node_ports(address, 1))
		return 1;
	if (is_ipv4(address))
		set_ipv4(&key.address, 0);
	if (!read_frontend(&key, &frontend)) {
		// `::` includes IPv4, unless the socket excludes it, which cannot be seen here.
		if (is_ipv4(address) || !is_unspecified(address))
			return 1;
		set_ipv4(&key.address, 0);
		if (!read_frontend(&key, &frontend))
			return 1;
	}
	count(BIND_REFUSED);
	bpf_set_retval(-EADDRINUSE);
	return 0;
}

SEC("cgroup/bind4") int sm_bind4(struct bpf_sock_addr *ctx)
{
	struct address address;

	load_ipv4(ctx, &address);
	return guard(ctx, &address);
}

SEC("cgroup/bind6") int sm_bind6(struct bpf_sock_addr *ctx)
{
	struct address address;

	load_ipv6(ctx, &address);
	return guard(ctx, &address);
}

// A socket is closed. Packets that it has still to send need no peer.
SEC("cgroup/sock_release") int sm_release(struct bpf_sock *ctx)
{
	delete_peer(bpf_get_socket_cookie(ctx), ctx->protocol);
	return 1;
}
