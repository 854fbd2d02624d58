"""`steersman plan`: what a change would do before it is made."""

from __future__ import annotations

from typing import TYPE_CHECKING

from steersman.cli.command import Command, Example, option
from steersman.modes.specs import DEFAULT_MODE

if TYPE_CHECKING:
    from steersman.config import Parsed
    from steersman.operate.answer import Answer


async def _answer(parsed: Parsed) -> Answer:
    from steersman.operate.plan_change import plan_change  # noqa: PLC0415

    values = parsed.values
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
        "Give the flags that you would run with: another --proxy-mode, a --config file, other\n"
        "--manifests. Settings that you do not give are those of the running process. Without\n"
        "any flag it shows what this version would change in the kernel, for example after an\n"
        "upgrade, or with the rules of another kube-proxy in force. Nothing is written.\n"
        "\n"
        "As root the kernel is compared, with the rules of all modes and any kube-proxy in it.\n"
        "Otherwise the present rules are those that the running process wrote, or with\n"
        "--from-mode those that the mode would have for the same objects."
    ),
    flags=(
        option("objects", "List the kernel objects, too.", kind="bool"),
        option("script", "Print the input of this tool instead: nft, iptables-restore and so on."),
        option(
            "from-mode",
            "Assume the rules of this mode instead of looking at the kernel.",
            completes="mode",
        ),
    ),
    examples=(
        Example(
            f"steersman plan --proxy-mode {DEFAULT_MODE}", "what a switch of the mode would do"
        ),
        Example("steersman plan --masquerade-all", "what another setting, or --config, would do"),
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
)
