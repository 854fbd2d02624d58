#!/usr/bin/env bash
# Build the container image: rootfs.tar from Debian packages and the locked Python packages, then
# deploy/image/Dockerfile with docker, podman or buildah. No image is pulled.
#
# Environment:
#   BUILDER    docker, podman or buildah; the first one that works otherwise
#   IMAGE      name and tag; steersman:VERSION otherwise
#   STORAGE    directory for podman's and buildah's storage; the user's own otherwise
#   MIRROR     Debian mirror; mmdebstrap's default otherwise
#   SOURCE_DATE_EPOCH   time of everything in it; that of the last commit otherwise
#   OUT, PYTHON         where results go (build/image), and an interpreter that has steersman
# Result: the image in the builder's storage, and in OUT: steersman.oci.tar (for
# `ctr -n k8s.io images import`), rootfs.tar, sbom.spdx.json.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PATH:/usr/sbin:/sbin" PIP_DISABLE_PIP_VERSION_CHECK=1

suite=bookworm
packages=python3-minimal,libpython3-stdlib,iptables,nftables,ipset,kmod,libbpf1,libstdc++6,util-linux
out=${OUT:-build/image}
python=${PYTHON:-.venv/bin/python}

say() { printf 'image: %s\n' "$*" >&2; }
fail() { say "$*"; exit 1; }

works() {
    case $1 in
        docker) docker info >/dev/null 2>&1 ;;
        *) command -v "$1" >/dev/null ;;
    esac
}

find_builder() {
    local each
    for each in ${BUILDER:-docker podman buildah}; do
        works "$each" && printf '%s\n' "$each" && return
    done
    return 1
}

install_tools() {
    [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || return 0
    local wanted=()
    command -v mmdebstrap >/dev/null || wanted+=(mmdebstrap)
    find_builder >/dev/null || wanted+=(buildah)
    [ ${#wanted[@]} = 0 ] && return
    say "installing ${wanted[*]}"
    export DEBIAN_FRONTEND=noninteractive
    apt-get install -qq -y --no-install-recommends "${wanted[@]}" >/dev/null 2>&1 ||
        { apt-get update -qq && apt-get install -qq -y --no-install-recommends "${wanted[@]}" \
            >/dev/null; } || fail "could not install ${wanted[*]}"
}

python_packages() {
    say "Python packages"
    "$python" scripts/image_lock.py >"$out/requirements.txt"
    rm -rf "$out/python" "$out/wheel"
    # What runs is Debian's Python, whatever Python builds.
    "$python" -m pip install --quiet --no-deps --require-hashes --only-binary :all: \
        --python-version 3.11 --implementation cp --abi cp311 --abi abi3 --abi none \
        --platform "manylinux_2_28_$(uname -m)" --platform "manylinux_2_17_$(uname -m)" \
        --platform "manylinux2014_$(uname -m)" --platform any \
        --target "$out/python" -r "$out/requirements.txt"
    "$python" -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir "$out/wheel" .
    rm -rf "$out/python/bin"
    "$python" -m zipfile --extract "$out"/wheel/*.whl "$out/python" # pip would note where from
}

root_filesystem() {
    say "root filesystem from Debian packages ($suite)"
    mmdebstrap --quiet --variant=extract --components=main --include="$packages" \
        --hook-dir=/usr/share/mmdebstrap/hooks/merged-usr \
        --extract-hook="scripts/image_rootfs.sh \"\$1\" $out" \
        "$suite" - ${MIRROR:+"$MIRROR"} | "$python" scripts/image_layer.py "$out/rootfs.tar"
}

build_image() {
    local flags=()
    [ "$builder" != docker ] && [ -n "${STORAGE:-}" ] &&
        flags=(--root "$STORAGE/root" --runroot "$STORAGE/run" --storage-driver vfs)
    local build=(build)
    [ "$builder" != docker ] && build=(build --timestamp "$SOURCE_DATE_EPOCH")
    say "$image with $builder"
    cp deploy/image/Dockerfile "$out/Dockerfile"
    printf '*\n!rootfs.tar\n' >"$out/.dockerignore"
    "$builder" "${flags[@]}" "${build[@]}" --quiet --tag "$image" --build-arg "VERSION=$version" \
        --build-arg "REVISION=$(git rev-parse HEAD 2>/dev/null || echo unknown)" \
        --build-arg "CREATED=$(date -u -d "@$SOURCE_DATE_EPOCH" +%Y-%m-%dT%H:%M:%SZ)" \
        "$out" >/dev/null
    rm -f "$out/steersman.oci.tar"
    case $builder in
        docker) docker save --output "$out/steersman.oci.tar" "$image" ;;
        podman) podman "${flags[@]}" save --quiet --format oci-archive \
            --output "$out/steersman.oci.tar" "$image" ;;
        buildah) buildah "${flags[@]}" push --quiet "$image" \
            "oci-archive:$out/steersman.oci.tar:$image" ;;
    esac
}

install_tools
command -v mmdebstrap >/dev/null || fail "mmdebstrap is missing (apt-get install mmdebstrap)"
builder=$(find_builder) || fail "none of ${BUILDER:-docker, podman, buildah} works here"
version=$("$python" -c 'import steersman; print(steersman.__version__)')
image=${IMAGE:-steersman:$version}
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || date +%s)}
export SOURCE_DATE_EPOCH

mkdir -p "$out"
python_packages
root_filesystem
build_image
say "done: $image, $(du -h "$out/steersman.oci.tar" | cut -f1) in $out/steersman.oci.tar"
