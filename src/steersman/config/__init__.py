"""The command line and the configuration file (behaviour 1): read, defaulted, converted, checked.

    v1alpha1 document -> defaults -> internal form -> flags over it -> platform defaults -> rules

Nothing here acts on a configuration, and only `read_file` touches the file system.
"""

from steersman.config.commandline import (
    Parsed,
    default_config,
    parse_command_line,
    read_file,
    reload_file,
)
from steersman.config.convert import (
    to_failover_settings,
    to_internal,
    to_mode_options,
    to_node_config,
    to_v1alpha1,
)
from steersman.config.errors import ConfigError, FieldError, Invalid, UsageError, findings
from steersman.config.features import enabled
from steersman.config.flags import FLAGS
from steersman.config.flags_upstream import Flag, Group
from steersman.config.help import flagz, help_text
from steersman.config.load import Loaded, ReloadPlan, applied, load, reload_plan
from steersman.config.rules import validate
from steersman.config.types import KubeProxyConfiguration, ProxyConfig
from steersman.config.write import CommandOutput, check_config, configz, show_config, to_yaml

__all__ = [
    "FLAGS",
    "CommandOutput",
    "ConfigError",
    "FieldError",
    "Flag",
    "Group",
    "Invalid",
    "KubeProxyConfiguration",
    "Loaded",
    "Parsed",
    "ProxyConfig",
    "ReloadPlan",
    "UsageError",
    "applied",
    "check_config",
    "configz",
    "default_config",
    "enabled",
    "findings",
    "flagz",
    "help_text",
    "load",
    "parse_command_line",
    "read_file",
    "reload_file",
    "reload_plan",
    "show_config",
    "to_failover_settings",
    "to_internal",
    "to_mode_options",
    "to_node_config",
    "to_v1alpha1",
    "to_yaml",
    "validate",
]
