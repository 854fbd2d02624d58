#!/usr/bin/env bash
# Build the Debian package: steersman and the Python packages that it needs as a virtual environment
# of its own in /usr/lib/steersman, for each version of Python that there is a wheel for. One package
# serves Debian 12 and later, and Ubuntu 24.04 and later.
#
# Environment:
#   OUT      where results go (build/deb)
#   ARCH     amd64 or arm64; this machine's otherwise. Nothing of it is run, so both can be built.
#   WHEELS   directory with steersman's wheel for ARCH; built otherwise
#   SOURCE_DATE_EPOCH   time of everything in it; that of the last commit otherwise
#   PYTHON   an interpreter that has steersman (.venv/bin/python)
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PATH:/usr/sbin:/sbin" LC_ALL=C.UTF-8
umask 022

say() { printf 'deb: %s\n' "$*" >&2; }
fail() { say "$*"; exit 1; }

for tool in dpkg-buildpackage dh; do
    command -v $tool >/dev/null || fail "$tool is missing (apt-get install dpkg-dev debhelper)"
done
python=${PYTHON:-.venv/bin/python}
out=$(realpath -m "${OUT:-build/deb}")
arch=${ARCH:-$(dpkg --print-architecture)}
case $arch in
    amd64) machine=x86_64 ;;
    arm64) machine=aarch64 ;;
    *) fail "there is no package for $arch, only for amd64 and arm64" ;;
esac
version=$("$python" -c 'import steersman; print(steersman.__version__)')
# A release candidate comes before its release.
version=${version/rc/~rc}-1
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}
export SOURCE_DATE_EPOCH

tree=$out/steersman-$version
files=$tree/files
lib=$files/usr/lib/steersman
rm -rf "$tree"
mkdir -p "$lib/bin" "$lib/lib" "$files/usr/bin" "$files/usr/share/man/man1"

say "Python packages for $machine"
"$python" scripts/runtime_tree.py "$lib/packages" --machine "$machine" ${WHEELS:+--wheels "$WHEELS"}
# What `python3 -m venv` makes, for any of those versions.
ln -s /usr/bin/python3 "$lib/bin/python3"
printf 'home = /usr/bin\ninclude-system-site-packages = false\n' >"$lib/pyvenv.cfg"
for minor in 11 12 13 14; do
    mkdir "$lib/lib/python3.$minor"
    ln -s ../../packages "$lib/lib/python3.$minor/site-packages"
done
cat >"$files/usr/bin/steersman" <<'LAUNCHER'
#!/usr/lib/steersman/bin/python3 -IB
from steersman.__main__ import main

raise SystemExit(main())
LAUNCHER
chmod 755 "$files/usr/bin/steersman"

say "man pages and completion"
share=$files/usr/share
mkdir -p "$share"/{bash-completion/completions,zsh/vendor-completions,fish/vendor_completions.d}
"$python" - "$share" <<'TEXTS'
import sys
from contextlib import redirect_stdout
from pathlib import Path

from steersman.cli.command import command_names
from steersman.cli.main import main

share = Path(sys.argv[1])
texts = {f"man/man1/steersman-{name}.1": ["man", name] for name in command_names()} | {
    "man/man1/steersman.1": ["man"],
    "bash-completion/completions/steersman": ["completion", "bash"],
    "zsh/vendor-completions/_steersman": ["completion", "zsh"],
    "fish/vendor_completions.d/steersman.fish": ["completion", "fish"],
}
for path, words in texts.items():
    with (share / path).open("w") as file, redirect_stdout(file):
        assert main(words) == 0, words
TEXTS

install -Dm644 deploy/debian/config.yaml "$files/etc/steersman/config.yaml"
cp -r deploy/debian "$tree/debian"
rm "$tree/debian/config.yaml"
printf 'steersman (%s) unstable; urgency=medium\n\n  * See changelog.gz beside this file.\n\n -- %s  %s\n' \
    "$version" "$(sed -n 's/^Maintainer: //p' deploy/debian/control)" \
    "$(date -u -R -d "@$SOURCE_DATE_EPOCH")" >"$tree/debian/changelog"
install -Dm644 -t "$share/doc/steersman" NOTICE README.md
cp CHANGELOG.md "$tree"

say "steersman_${version}_$arch.deb"
(cd "$tree" && dpkg-buildpackage -us -uc -b -d -a"$arch" --admindir=/var/lib/dpkg) \
    >"$out/build.log" 2>&1 || { tail -20 "$out/build.log" >&2; fail "see $out/build.log"; }
rm -rf "$tree"
say "done: $out/steersman_${version}_$arch.deb"
