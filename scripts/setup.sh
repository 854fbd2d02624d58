#!/usr/bin/env bash
# Set up all that `make` needs: Debian packages (as root, when missing), a virtual environment in
# .venv, the locked dependencies and steersman itself. Done already: returns at once.
# `scripts/setup.sh tests` also installs what only tests and developers call; `scripts/setup.sh
# all-tests` what browsers, packages, the virtual machine and Windows' Python need, too.
#
# Environment: PYTHON, an interpreter to use (3.11 or newer); pip's own settings (index, proxy).
# Without root: says in one line what is missing for demo, kernel tests and benchmarks.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PATH:/usr/sbin:/sbin" PIP_DISABLE_PIP_VERSION_CHECK=1

venv=.venv
stamp=$venv/.steersman-setup

say() { printf 'setup: %s\n' "$*" >&2; }

# Command of each tool that demo, checks and benchmarks call, and its Debian package.
missing_packages() {
    local tool package
    [ -e /usr/include/bpf/bpf_helpers.h ] || echo libbpf-dev # no command: headers, with clang
    while read -r tool package; do
        command -v "$tool" >/dev/null || printf '%s\n' "$package"
    done <<'TOOLS' | sort -u
iptables iptables
ip6tables-legacy iptables
nft nftables
clang clang
llvm-strip llvm
ipset ipset
conntrack conntrack
ip iproute2
ping iputils-ping
unshare util-linux
sysctl procps
TOOLS
}

# With Python.h the decoder of protobuf is compiled; an interpreter of another kind has its own.
python_headers() {
    local python
    python=$(find_python) || return 0
    "$python" - <<'PYTHON'
import os, sys, sysconfig

if sys.base_prefix == "/usr" and not os.path.exists(sysconfig.get_path("include") + "/Python.h"):
    print("libpython3.%d-dev" % sys.version_info[1])
PYTHON
}

# What only tests need; they are skipped with a reason where it is missing. Each function is
# installed apart: not every distribution has all of these packages.

developer_tools() { # shells that complete, pages of the manual, `make image`, `make format`
    local tool package
    while read -r tool package; do
        command -v "$tool" >/dev/null || printf '%s\n' "$package"
    done <<'TOOLS'
buildah buildah
clang-format clang-format
fish fish
groff groff-base
mmdebstrap mmdebstrap
zsh zsh
TOOLS
}

browser_packages() { # tests/browser
    command -v chromium-headless-shell chromium >/dev/null || echo chromium-headless-shell
}

monitoring_packages() { # tests/monitoring
    command -v promtool >/dev/null || echo prometheus # with systemd it also starts a service
}

machine_packages() { # the virtual machine of tests/vm
    local tool package
    [ "$(uname -m)" = x86_64 ] || return 0
    while read -r tool package; do
        command -v "$tool" >/dev/null || printf '%s\n' "$package"
    done <<'TOOLS'
qemu-system-x86_64 qemu-system-x86
busybox busybox-static
depmod kmod
ipvsadm ipvsadm
TOOLS
}

package_tools() { # tests/packaging, `make deb`, and the extension in C for the other machine
    local other=arm64 machine=aarch64
    [ "$(uname -m)" = x86_64 ] || other=amd64 machine=x86_64
    command -v dh >/dev/null || echo debhelper
    command -v lintian >/dev/null || echo lintian
    command -v ld.lld >/dev/null || echo lld
    [ -d /usr/$machine-linux-gnu/include ] || echo libc6-dev-$other-cross
}

windows_packages() { # tests/windows
    [ "$(uname -m)" = x86_64 ] || return 0
    [ -x /usr/lib/wine/wine64 ] || command -v wine64 >/dev/null || echo wine64
    command -v x86_64-w64-mingw32-gcc >/dev/null || echo gcc-mingw-w64-x86-64-win32
}

can_install() { [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; }

install_packages() {
    say "installing $*"
    export DEBIAN_FRONTEND=noninteractive
    # Another apt may hold dpkg's lock, as on a machine that has just booted.
    local apt=(apt-get -qq -y -o DPkg::Lock::Timeout=300)
    "${apt[@]}" install --no-install-recommends "$@" >/dev/null 2>&1 ||
        { update_lists "${apt[@]}" && "${apt[@]}" install --no-install-recommends "$@" >/dev/null; }
}

# apt waits for dpkg's lock, but not for that of its lists.
update_lists() {
    local output attempt
    for attempt in $(seq 100); do
        output=$("$@" update 2>&1) && return
        grep -q 'lists/lock' <<<"$output" || break
        [ "$attempt" != 1 ] || say "waiting for another apt to end"
        sleep 3
    done
    printf '%s\n' "$output" >&2
    return 1
}

system_tools() {
    local kind packages
    for kind in "$@"; do
        packages=$($kind | tr '\n' ' ')
        [ -z "$packages" ] && continue
        if can_install; then
            # shellcheck disable=SC2086 - one word per package
            install_packages $packages || say "could not install: $packages"
        else
            say "missing for demo, tests and benchmarks: ${packages% } (apt-get install, as root)"
        fi
    done
}

# An interpreter that runs (a shim of pyenv may not), is new enough and can make environments.
find_python() {
    local candidate
    for candidate in ${PYTHON:-} python3.11 python3 python3.12 python3.13 /usr/bin/python3; do
        if "$candidate" -c 'import sys, venv, ensurepip; assert sys.version_info >= (3, 11)' \
            >/dev/null 2>&1; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    return 1
}

make_venv() {
    local python
    if ! python=$(find_python); then
        can_install && install_packages python3 python3-venv
        python=$(find_python) || {
            say "missing: Python 3.11 or newer with venv (apt-get install python3-venv, as root)"
            exit 1
        }
    fi
    "$python" -m venv --clear "$venv"
}

# The directory is part of it: a virtual environment does not survive being moved.
wanted=$(cat requirements.lock pyproject.toml scripts/setup.sh src/steersman/source/*.c <(pwd) | sha256sum)
is_current() { [ -x "$venv/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; }

kinds=(missing_packages python_headers)
case ${1:-} in
"") ;;
tests) kinds+=(developer_tools monitoring_packages) ;;
all-tests) kinds+=(developer_tools monitoring_packages browser_packages machine_packages package_tools windows_packages) ;;
windows) kinds+=(windows_packages) ;;
*) say "unknown argument $1" && exit 2 ;;
esac
if is_current; then
    system_tools "${kinds[@]}"
    exit
fi
"$venv/bin/python" -c 'import pip' 2>/dev/null || make_venv
# pip works while apt does: on two cores this takes as long as the slower of them.
# --no-deps: the lock is complete; pip 23 refuses a pinned package that another one wants with an extra.
say "installing the locked Python packages into $venv"
"$venv/bin/python" -m pip install --quiet --require-hashes --no-deps -r requirements.lock &
pip=$!
trap 'kill "$pip" 2>/dev/null || true' EXIT
system_tools "${kinds[@]}"
wait "$pip"
trap - EXIT
# Last, because it compiles the programs of the ebpf mode, and the decoder.
"$venv/bin/python" -m pip install --quiet --no-deps --no-build-isolation --editable .
printf '%s\n' "$wanted" >"$stamp"
