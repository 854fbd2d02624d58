#!/usr/bin/env bash
# Build the container image from Debian packages and the locked Python packages: an archive in OCI's
# layout, for one architecture or for several. No image is pulled, and nothing of another
# architecture is run. Two builds from the same packages have the same digest.
#
# Environment:
#   ARCHS      Debian architectures ("amd64 arm64"); this machine's otherwise
#   IMAGE      name and tag; steersman:VERSION otherwise
#   BUILDER    docker, podman or buildah: also load the image into its storage
#   STORAGE    directory for podman's and buildah's storage; the user's own otherwise
#   WHEELS     directory with steersman's wheel for each of them; built otherwise
#   MIRROR     Debian mirror; mmdebstrap's default otherwise
#   SOURCE_DATE_EPOCH   time of everything in it; that of the last commit otherwise
#   OUT, PYTHON         where results go (build/image), and a Python 3.11 that has steersman
# Result in OUT: steersman.oci.tar (for `ctr -n k8s.io images import`), its digests in digests.txt,
# provenance.json, and of each architecture rootfs-ARCH.tar and sbom-ARCH.spdx.json.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PATH:/usr/sbin:/sbin" PIP_DISABLE_PIP_VERSION_CHECK=1
umask 022

suite=bookworm
packages=python3-minimal,libpython3-stdlib,iptables,nftables,ipset,kmod,libbpf1,libstdc++6,util-linux
out=${OUT:-build/image}
python=${PYTHON:-.venv/bin/python}
archs=${ARCHS:-$(dpkg --print-architecture)}

say() { printf 'image: %s\n' "$*" >&2; }
fail() { say "$*"; exit 1; }

install_tools() {
    command -v mmdebstrap >/dev/null && return
    [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null ||
        fail "mmdebstrap is missing (apt-get install mmdebstrap)"
    say "installing mmdebstrap"
    export DEBIAN_FRONTEND=noninteractive
    local apt=(apt-get -qq -y -o DPkg::Lock::Timeout=300)
    "${apt[@]}" install --no-install-recommends mmdebstrap >/dev/null 2>&1 ||
        { "${apt[@]}" update && "${apt[@]}" install --no-install-recommends mmdebstrap >/dev/null; } ||
        fail "could not install mmdebstrap"
}

machine() {
    case $1 in
        amd64) echo x86_64 ;;
        arm64) echo aarch64 ;;
        *) fail "there is no image for $1, only for amd64 and arm64" ;;
    esac
}

root_filesystem() {
    local arch=$1
    say "$arch: Python packages"
    rm -rf "$out/python-$arch"
    "$python" scripts/runtime_tree.py "$out/python-$arch" --minor 11 --machine "$(machine "$arch")" \
        ${WHEELS:+--wheels "$WHEELS"} >/dev/null
    say "$arch: root filesystem from Debian packages ($suite)"
    mmdebstrap --quiet --variant=extract --components=main --include="$packages" \
        --architectures="$arch" --skip=check/qemu \
        --hook-dir=/usr/share/mmdebstrap/hooks/merged-usr \
        --extract-hook="scripts/image_rootfs.sh \"\$1\" $out $arch $python" \
        "$suite" - ${MIRROR:+"$MIRROR"} | "$python" scripts/image_layer.py "$out/rootfs-$arch.tar"
    rm -rf "$out/python-$arch"
}

load() {
    local flags=() archive=$out/steersman.oci.tar
    [ "$BUILDER" != docker ] && [ -n "${STORAGE:-}" ] &&
        flags=(--root "$STORAGE/root" --runroot "$STORAGE/run" --storage-driver vfs)
    case $BUILDER in
        docker) docker load --quiet --input "$archive" ;;
        podman) podman "${flags[@]}" load --quiet --input "$archive" ;;
        buildah) buildah "${flags[@]}" pull --quiet "oci-archive:$archive" ;;
        *) fail "BUILDER=$BUILDER is none of docker, podman, buildah" ;;
    esac >/dev/null
}

install_tools
"$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' ||
    fail "the image has Python 3.11, and so must PYTHON, to compile what is in it"
VERSION=$("$python" -c 'import steersman; print(steersman.__version__)')
REVISION=${REVISION:-$(git rev-parse HEAD 2>/dev/null || echo unknown)}
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || date +%s)}
export SOURCE_DATE_EPOCH VERSION REVISION
image=${IMAGE:-steersman:$VERSION}

mkdir -p "$out"
platforms=()
for arch in $archs; do
    root_filesystem "$arch"
    platforms+=("$arch=$out/rootfs-$arch.tar")
done
"$python" scripts/image_oci.py "$out/steersman.oci.tar" "$image" "${platforms[@]}" >"$out/digests.txt"
"$python" scripts/provenance.py "$image=$(head -1 "$out/digests.txt")" >"$out/provenance.json"
[ -z "${BUILDER:-}" ] || load
say "done: $image ($archs), $(du -h "$out/steersman.oci.tar" | cut -f1) in $out/steersman.oci.tar"
