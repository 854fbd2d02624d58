"""Runs a container of the image as its DaemonSet says, without a container runtime.

What a runtime would do is done by hand: a mount namespace with a read-only root, /proc whose
settings are read-only unless privileged, the capabilities and the user of the security context.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Object = dict[str, Any]

_ENTER = """
mount --bind "$1" "$1"
mount -t proc proc "$1/proc"
mount -t sysfs sysfs "$1/sys"
mount --rbind /dev "$1/dev"
if [ "$2" = read-only ]; then
    mount --bind "$1/proc/sys" "$1/proc/sys"
    mount -o remount,bind,ro "$1/proc/sys"
fi
mount -o remount,bind,ro "$1"
root=$1
shift 2
exec chroot "$root" "$@"
"""


def security(container: Object) -> list[str]:
    """The beginning of a command line that gives up what a container must not have."""
    context = container["securityContext"]
    if context.get("privileged"):
        return []
    names = [f"+{name.lower()}" for name in context["capabilities"]["add"]]
    argv = ["/usr/local/bin/setpriv-net", "--inh-caps=-all"]
    argv.append(f"--bounding-set={','.join(['-all', *names])}")
    if user := context.get("runAsUser"):
        argv += [f"--reuid={user}", f"--regid={context['runAsGroup']}", "--clear-groups"]
    if not context["allowPrivilegeEscalation"]:
        argv.append("--no-new-privs")
    return argv


def argv(root: Path, netns: str, container: Object, variables: dict[str, str]) -> list[str]:
    """The command line that starts a container; its process is the container's first.

    Args:
        root: the container's root filesystem.
        netns: name of the network namespace.
        container: of a DaemonSet's pod.
        variables: values of $(NAME) in its arguments.
    """
    words = [*container.get("command", ["/usr/local/bin/kube-proxy"]), *container["args"]]
    for name, value in variables.items():
        words = [word.replace(f"$({name})", value) for word in words]
    settings = "writable" if container["securityContext"].get("privileged") else "read-only"
    path = "PATH=/usr/local/bin:/usr/sbin:/usr/bin"
    environment = ["env", "-i", path, "LANG=C.UTF-8"]
    enter = ["unshare", "--mount", "--propagation=private", "sh", "-ec", _ENTER, "sh"]
    # env is the host's: it runs before chroot, and its PATH counts after it.
    inside = [*security(container), *words]
    return ["ip", "netns", "exec", netns, *environment, *enter, str(root), settings, *inside]


def prepare(root: Path, files: dict[str, str]) -> None:
    """Make the mount points and files that a runtime would mount."""
    for name in ("proc", "dev", "lib/modules"):
        (root / name).mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        path = root / name.lstrip("/").replace("var/run/", "run/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def buildah(storage: Path, *words: str) -> str:
    """Run buildah on a storage of the test's own; what it prints."""
    place = ["--root", str(storage / "root"), "--runroot", str(storage / "run")]
    command: Sequence[str] = ["buildah", *place, "--storage-driver", "vfs", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.strip()
