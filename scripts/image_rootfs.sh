#!/usr/bin/env bash
# Turn extracted Debian packages into the image's root filesystem; a hook of mmdebstrap.
# Arguments: the root filesystem; the directory with Python packages, where the SBOM goes, too; the
# architecture; a Python of the version that is in the root filesystem.
set -euo pipefail
root=$1 out=$2 arch=$3 python=$4
debs=$root/var/cache/apt/archives

# Installed only because others depend on them, for parts that are left out here.
unused='dpkg tar libdb5.3 libsqlite3-0 libkrb5-3 libkrb5support0 libk5crypto3 libgssapi-krb5-2
libkeyutils1 libcom-err2 libtirpc3 libtirpc-common libnsl2 libreadline8 readline-common
libncursesw6 media-types libpam-modules libpam-modules-bin libpam-runtime login debconf
ncurses-bin libsystemd0 libblkid1 libmount1 libsmartcols1 libudev1 libacl1 liblz4-1
libgcrypt20 libgpg-error0 libpam0g libselinux1 libpcre2-8-0 libaudit1 libaudit-common
util-linux-extra python3-minimal'

# Of util-linux, only setpriv is wanted.
unwanted='usr/share/doc-base usr/share/bash-completion usr/share/bug usr/share/lintian
usr/share/locale usr/share/man usr/share/pixmaps usr/share/applications usr/share/info
usr/share/binfmts usr/share/python3 usr/share/menu usr/share/initramfs-tools usr/share/gcc
usr/share/gdb usr/share/perl5 usr/share/debconf usr/share/polkit-1 usr/share/util-linux
usr/share/readline usr/share/dpkg usr/share/iptables usr/lib/mime usr/lib/binfmt.d usr/libexec
etc/cron.daily etc/logrotate.d etc/init.d etc/pam.d etc/default etc/gss etc/fstab
etc/alternatives usr/lib/systemd usr/lib/udev usr/lib/python3/dist-packages'

# Parts of Python's library that no module of the program imports, nor of what it needs:
# tests/e2e/test_image.py imports all of them in the image.
library='lib2to3 pydoc_data unittest distutils ensurepip curses sqlite3 dbm test venv xml xmlrpc
multiprocessing msilib turtledemo idlelib tkinter config-3.11-* turtle.py pydoc.py doctest.py pdb.py
mailbox.py imaplib.py nntplib.py telnetlib.py ftplib.py smtplib.py poplib.py cgi.py cgitb.py
_pydecimal.py aifc.py wave.py sunau.py sndhdr.py imghdr.py chunk.py crypt.py plistlib.py
_aix_support.py _osx_support.py antigravity.py this.py tabnanny.py pyclbr.py pipes.py xdrlib.py
uu.py sched.py rlcompleter.py cmd.py code.py codeop.py symtable.py modulefinder.py
lib-dynload/_test* lib-dynload/xx* lib-dynload/_xx* lib-dynload/_ctypes_test* lib-dynload/audioop*
lib-dynload/_crypt.* lib-dynload/nis.* lib-dynload/spwd.* lib-dynload/_tkinter* lib-dynload/_curses*
lib-dynload/_dbm* lib-dynload/_gdbm* lib-dynload/_sqlite3* lib-dynload/_codecs_*
lib-dynload/_multibytecodec* lib-dynload/ossaudiodev* lib-dynload/readline*
lib-dynload/_multiprocessing* lib-dynload/_posixshmem*'
encodings='__init__|aliases|ascii|charmap|cp437|hex_codec|idna|iso8859_1|latin_1|punycode'
encodings="$encodings|raw_unicode_escape|unicode_escape|undefined|utf_.*"
# Of the C library: vector functions, name services and tools that nothing here is linked with.
libraries='libmvec.so* libnsl.so* libcrypt.so* libexpatw.so* libnss_compat.so* libnss_hesiod.so*
libthread_db.so* libc_malloc_debug.so* libmemusage.so libpcprofile.so libtic.so*
krb5 engines-3 ossl-modules'

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
    # The names are patterns below these directories.
    # shellcheck disable=SC2086
    (cd "$root/usr/lib/python3.11" && rm -rf $library)
    # shellcheck disable=SC2086
    (cd "$root"/usr/lib/*-linux-gnu && rm -rf $libraries)
    find "$root/usr/lib/python3.11/encodings" -regextype posix-extended -type f \
        ! -regex ".*/($encodings)\.py" -delete
    rm -rf "$root"/usr/sbin/{arp,eb}tables*
    find "$root"/usr/lib/*/gconv -type f ! -name 'UTF-*' -delete
    find "$root/usr/share/doc" -type f ! -name copyright -delete
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
    # A pod of `steersman connectivity` may have any image with python3.
    ln -s python3.11 "$root/usr/bin/python3"
    # An iptables without variant: nft's, as Debian chooses. Legacy's are there by their names.
    local name
    for name in iptables iptables-save iptables-restore ip6tables ip6tables-save ip6tables-restore; do
        ln -sf xtables-nft-multi "$root/usr/sbin/$name"
    done
}

install_steersman() {
    local name function packages=usr/lib/python3/dist-packages
    install -d "$root/usr/lib/python3"
    cp -r "$out/python-$arch" "$root/$packages"
    for name in kube-proxy steersman; do
        function=$([ "$name" = steersman ] && echo main || echo kube_proxy)
        printf '#!/usr/bin/python3.11 -IOO\nfrom steersman.__main__ import %s\n\nraise SystemExit(%s())\n' \
            "$function" "$function" >"$root/usr/local/bin/$name"
        chmod 755 "$root/usr/local/bin/$name"
    done
    # The container's root is read-only: what is not compiled now is compiled at every start. Of
    # Python's library and of packages, only what is compiled stays; our own sources are shown in
    # tracebacks. Docstrings and assertions are for those who change the program: without them a
    # process is 1 MB smaller.
    find "$root/usr/lib/python3"* -name __pycache__ -prune -exec rm -rf {} +
    local compile=(-m compileall -q -o 2 --invalidation-mode unchecked-hash)
    if [ "$arch" = "$(dpkg --print-architecture)" ]; then
        chroot "$root" /usr/bin/python3.11 "${compile[@]}" -b /usr/lib/python3.11 "/$packages"
        find "$root/$packages/steersman" -name '*.pyc' -delete
        chroot "$root" /usr/bin/python3.11 "${compile[@]}" "/$packages/steersman"
    else
        "$python" "${compile[@]}" -b -s "$root" -p / "$root/usr/lib/python3.11" "$root/$packages"
        find "$root/$packages/steersman" -name '*.pyc' -delete
        "$python" "${compile[@]}" -s "$root" -p / "$root/$packages/steersman"
    fi
    find "$root/usr/lib/python3.11" "$root/$packages" -name '*.py' \
        ! -path "$root/$packages/steersman/*" -delete
}

describe() {
    local deb
    for deb in "$debs"/*.deb; do # where scanners of images without dpkg look
        dpkg-deb --field "$deb" >"$root/var/lib/dpkg/status.d/$(package_name "$deb")"
    done
    "$python" scripts/image_sbom.py "$root" "$out/sbom-$arch.spdx.json"
    cp "$out/sbom-$arch.spdx.json" "$root/usr/share/sbom/steersman.spdx.json"
    install -d "$root/usr/share/doc/steersman"
    "$python" scripts/notice.py --image "$root" >"$root/usr/share/doc/steersman/NOTICE"
}

remove_unused_packages
remove_files
configure
install_steersman
describe
