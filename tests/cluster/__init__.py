"""Upstream's own network tests on a real cluster, with steersman as its only proxy.

    KUBE_BIN=DIR python -m tests.cluster --image build/image/steersman.oci.tar --modes nftables,ebpf

DIR holds `kind`, `kubectl` and `e2e.test` of one Kubernetes version; docker or podman runs kind's
nodes. For each mode: a cluster of three nodes in three zones, dual-stack, without kube-proxy; the
image and the overlay of deploy/kustomize for that mode; then the tests of SIG Network. The result
is a table (which test, which mode, passed, failed, skipped and why), for docs/support.md.
"""
