#!/usr/bin/env bash
# Turn extracted Debian packages into the image's root filesystem; a hook of mmdebstrap.
# Arguments: the root filesystem; the directory with Python packages, where the SBOM goes, too.
set -euo pipefail
root=$1 out=$2
debs=$root/var/cache/apt/archives

# Installed only because others depend on them, for parts that are left out here.
unused='dpkg tar libdb5.3 libsqlite3-0 libkrb5-3 libkrb5support0 libk5crypto3 libgssapi-krb5-2
libkeyutils1 libcom-err2 libtirpc3 libtirpc-common libnsl2 libreadline8 readline-common
libncursesw6 media-types libpam-modules libpam-modules-bin libpam-runtime login debconf
ncurses-bin libsystemd0 libblkid1 libmount1 libsmartcols1 libudev1 libacl1 liblz4-1
libgcrypt20 libgpg-error0 libpam0g libselinux1 libpcre2-8-0 libaudit1 libaudit-common
util-linux-extra python3-minimal'

# Of util-linux, only setpriv is wanted; of Python, what a server does not use is not.
unwanted='usr/share/doc-base usr/share/bash-completion usr/share/bug usr/share/lintian
usr/share/locale usr/share/man usr/share/pixmaps usr/share/applications usr/share/info
usr/share/binfmts usr/share/python3 usr/share/menu usr/share/initramfs-tools usr/share/gcc
usr/share/perl5 usr/share/debconf usr/share/polkit-1 usr/share/util-linux usr/share/readline
usr/share/dpkg usr/share/iptables usr/lib/mime usr/lib/binfmt.d usr/libexec
etc/cron.daily etc/logrotate.d etc/init.d etc/pam.d etc/default etc/gss etc/fstab
etc/alternatives usr/lib/systemd usr/lib/udev
usr/lib/python3.11/lib2to3 usr/lib/python3.11/pydoc_data usr/lib/python3.11/unittest
usr/lib/python3.11/distutils usr/lib/python3.11/ensurepip usr/lib/python3.11/curses
usr/lib/python3.11/sqlite3 usr/lib/python3.11/dbm
usr/lib/python3.11/turtle.py usr/lib/python3/dist-packages'

package_name() { dpkg-deb --field "$1" Package; }

remove_unused_packages() {
    local name deb
    for name in $unused; do
        for deb in "$debs/$name"_*.deb; do
            [ -e "$deb" ] || continue
            dpkg-deb --fsys-tarfile "$deb" | tar -t | grep -v '/$' |
                (cd "$root" && xargs -r rm -f)
            rm "$deb"
        done
    done
}

remove_files() {
    local name
    for name in $unwanted; do rm -rf "${root:?}/$name"; done
    rm -rf "$root"/usr/lib/*/{krb5,engines-3,ossl-modules} "$root"/usr/sbin/{arp,eb}tables*
    find "$root"/usr/lib/*/gconv -type f ! -name 'UTF-*' -delete
    find "$root/usr/lib/python3.11/lib-dynload" -regextype posix-extended -regex \
        '.*/(_curses|_curses_panel|_dbm|_gdbm|_sqlite3|_codecs_[a-z0-9]*|nis|ossaudiodev|readline)\..*' \
        -delete
    find "$root"/usr/share/doc -type f ! -name copyright -delete
    # util-linux brings 150 programs.
    dpkg-deb --fsys-tarfile "$debs"/util-linux_*.deb | tar -t |
        grep -v -e '/$' -e '/setpriv$' -e /copyright$ | (cd "$root" && xargs -r rm -f)
}

# What the packages' own scripts would have done.
configure() {
    install -d -m 1777 "$root/tmp"
    install -d "$root"/{etc,run,proc,sys,usr/local/bin,var/lib/dpkg/status.d,usr/share/sbom}
    rm -rf "$root"/var/run && ln -s ../run "$root/var/run"
    printf 'root:x:0:0:root:/:/nonexistent\nsteersman:x:65532:65532::/:/nonexistent\n' \
        >"$root/etc/passwd"
    printf 'root:x:0:\nsteersman:x:65532:\n' >"$root/etc/group"
    printf 'hosts: files dns\n' >"$root/etc/nsswitch.conf"
    mv "$root/usr/bin/setpriv" "$root/usr/local/bin/setpriv-net" # see image_layer.py
    # An iptables without variant: nft's, as Debian chooses. Legacy's are there by their names.
    local name
    for name in iptables iptables-save iptables-restore ip6tables ip6tables-save ip6tables-restore; do
        ln -sf xtables-nft-multi "$root/usr/sbin/$name"
    done
}

install_steersman() {
    local name function
    install -d "$root/usr/lib/python3"
    cp -r "$out/python" "$root/usr/lib/python3/dist-packages"
    for name in kube-proxy steersman; do
        function=$([ "$name" = steersman ] && echo main || echo kube_proxy)
        printf '#!/usr/bin/python3.11 -I\nfrom steersman.__main__ import %s\n\nraise SystemExit(%s())\n' \
            "$function" "$function" >"$root/usr/local/bin/$name"
        chmod 755 "$root/usr/local/bin/$name"
    done
    # The container's root is read-only: what is not compiled now is compiled at every start.
    find "$root/usr/lib/python3"* -name __pycache__ -prune -exec rm -rf {} +
    chroot "$root" /usr/bin/python3.11 -m compileall -q --invalidation-mode unchecked-hash \
        /usr/lib/python3.11 /usr/lib/python3/dist-packages
}

describe() {
    local deb
    for deb in "$debs"/*.deb; do # where scanners of images without dpkg look
        dpkg-deb --field "$deb" >"$root/var/lib/dpkg/status.d/$(package_name "$deb")"
    done
    python3 scripts/image_sbom.py "$root" "$out/sbom.spdx.json"
    cp "$out/sbom.spdx.json" "$root/usr/share/sbom/steersman.spdx.json"
}

remove_unused_packages
remove_files
configure
install_steersman
describe
