"""The command line and the configuration file (behaviour 1): read, defaulted, converted, checked.

    document -> defaults -> for one mode -> flags over it -> platform defaults -> rules -> settings

Nothing here acts on a configuration, and only `read_file` touches the file system.
"""

from steersman.config.commandline import Parsed, parse_command_line, read_file, reload_file
from steersman.config.defaults import default_config, in_mode
from steersman.config.errors import ConfigError, Invalid, UsageError, findings
from steersman.config.features import enabled
from steersman.config.flags import FLAGS
from steersman.config.flags_upstream import Flag, Group
from steersman.config.help import flagz, help_text
from steersman.config.load import load
from steersman.config.reload import reload_plan
from steersman.config.rules import validate
from steersman.config.settings import to_failover_settings, to_mode_options, to_node_config
from steersman.config.types import ProxyConfig
from steersman.config.write import check_config, configz, show_config, to_yaml

__all__ = [
    "FLAGS",
    "ConfigError",
    "Flag",
    "Group",
    "Invalid",
    "Parsed",
    "ProxyConfig",
    "UsageError",
    "check_config",
    "configz",
    "default_config",
    "enabled",
    "findings",
    "flagz",
    "help_text",
    "in_mode",
    "load",
    "parse_command_line",
    "read_file",
    "reload_file",
    "reload_plan",
    "show_config",
    "to_failover_settings",
    "to_mode_options",
    "to_node_config",
    "to_yaml",
    "validate",
]
