"""`steersman plan`: what a change would do before it is made."""

from __future__ import annotations

from typing import TYPE_CHECKING

from steersman.cli.command import WORLD, Command, Example, option

if TYPE_CHECKING:
    from steersman.config import Parsed
    from steersman.operate.answer import Answer


async def _answer(parsed: Parsed) -> Answer:
    from steersman.config import UsageError  # noqa: PLC0415 - as the others
    from steersman.operate.plan_change import plan_change  # noqa: PLC0415

    values = parsed.values
    if values.get("objects") and values.get("script"):
        raise UsageError("give --objects or --script, not both")
    return await plan_change(
        parsed,
        from_mode=str(values.get("from-mode", "")),
        objects=bool(values.get("objects")),
        script=str(values.get("script", "")),
    )


COMMAND = Command(
    name="plan",
    summary="show what a change would do before it is made",
    group="Change",
    description=(
        "Show what would change in the kernel. Give the flags that you would run with: another\n"
        "--proxy-mode, a --config file, other --manifests. All other settings are those of the\n"
        "running process. Without any flag it shows what this version would change, for example\n"
        "after an upgrade, or while another kube-proxy's rules are in force. Nothing is written.\n"
        "\n"
        "As root, the kernel is read, including the rules of every mode and of any kube-proxy.\n"
        "Otherwise the present rules are taken to be those that the running process wrote or,\n"
        "with --from-mode, those that the mode would have for the same objects."
    ),
    flags=(
        option("objects", "List the kernel objects, too.", kind="bool"),
        option("script", "Print the input for this tool instead: nft, iptables-restore and so on."),
        option(
            "from-mode",
            "Assume the rules of this mode instead of looking at the kernel.",
            completes="mode",
        ),
    ),
    examples=(
        Example("steersman plan --proxy-mode nftables", "what a switch of the mode would do"),
        Example("steersman plan --masquerade-all", "what another setting would do"),
        Example("steersman plan --manifests DIR --objects", "which rules new manifests change"),
        Example("steersman plan --cleanup", "what `steersman cleanup` would remove"),
        Example("steersman plan --script nft | nft -c -f -", "let the tool check it"),
    ),
    exit_codes=(
        (0, "There is nothing to do."),
        (1, "Something would change."),
        (2, "The question could not be answered."),
    ),
    answer=_answer,
    takes=WORLD | {"cleanup"},
)
