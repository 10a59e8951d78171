"""The command line: a config file, overrides by dotted path, a work folder; anything wrong is one line."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from absl import flags
from ml_collections import ConfigDict, config_flags

from mutualrl.config import ConfigError, RunConfig, read


def read_command_line(argv: Sequence[str]) -> tuple[RunConfig, str]:
    """Settings and work folder of a run from `--config=FILE [--config.path.to.setting=value …] [--workdir=FOLDER]`.

    Raises:
      ConfigError: a flag, file, setting or value is wrong; the message is one line.
    """
    config, workdir, _ = parse(argv)
    return read(config), workdir


def parse(argv: Sequence[str], internal: str = "") -> tuple[ConfigDict, str, str]:
    """A config file's ConfigDict with overrides, the work folder, and the value of a further flag.

    Values may also stand in a file given by `--flagfile`. The work folder defaults to `runs/<name of the config file>`.

    Args:
      internal: name of a flag that a program sets for its own processes; '' for none.

    Raises:
      ConfigError: a flag, file, setting or value is wrong; the message is one line.
    """
    values = flags.FlagValues()
    config_flags.DEFINE_config_file("config", None, "config file", flag_values=values)
    flags.DEFINE_string("workdir", "", "folder of the run", flag_values=values)
    if internal:
        flags.DEFINE_string(internal, "", "set by this program for its own processes", flag_values=values)
    saved = sys.argv
    try:
        # ml_collections reads sys.argv itself to find out which settings are overridden.
        argv = values.read_flags_from_files(list(argv), force_gnu=False)
        path = _config_path(argv)
        _check_overrides(_defaults(path), argv)
        sys.argv = argv
        rest = values(argv)
        if len(rest) > 1:
            raise ConfigError(f"{rest[1]!r}: not a flag; settings are given as --config.path.to.setting=value")
        workdir = values["workdir"].value or f"runs/{Path(path.partition(':')[0]).stem}"
        return values["config"].value, workdir, values[internal].value if internal else ""
    except ConfigError:
        raise
    except Exception as error:  # absl and ml_collections raise many types for one thing: a wrong flag
        raise ConfigError(" ".join(str(error).split()) or type(error).__name__) from error
    finally:
        sys.argv = saved


def _config_path(argv: Sequence[str]) -> str:
    """The config file named by --config, which must exist; what follows a colon is an argument of its `get_config`."""
    for flag, following in zip(argv, [*argv[1:], ""]):
        if match := re.fullmatch(r"--?config(?:=(.*))?", flag):
            path = match[1] if match[1] is not None else following
            if not Path(path.partition(":")[0]).is_file():
                raise ConfigError(f"--config={path}: no such file")
            return path
    raise ConfigError("--config=FILE is missing, e.g. --config=configs/demo.py")


def _defaults(path: str) -> ConfigDict:
    """What the config file's `get_config` returns, before overrides; its own ConfigError comes out as it is."""
    file, colon, argument = path.partition(":")
    try:
        config = runpy.run_path(file)["get_config"](*([argument] if colon else []))
    except ConfigError:
        raise
    except Exception as error:  # whatever a config file does
        raise ConfigError(f"--config={file}: {type(error).__name__}: {' '.join(str(error).split())}") from error
    if not isinstance(config, ConfigDict):
        raise ConfigError(f"--config={file}: get_config returns {type(config).__name__}; it must return a ConfigDict")
    return config


def _check_overrides(config: ConfigDict, argv: Sequence[str]) -> None:
    """Refuses overrides of settings that do not exist, or of another type, by the name they were given."""
    for flag in argv:
        match = re.match(r"--?(?:no)?(config\.[^=]+)(?:=(.*))?", flag, re.DOTALL)
        if not match:
            continue
        node, where = config, "config"
        for key in match[1].split(".")[1:]:
            if not hasattr(node, "keys") or key not in node:
                allowed = f"; allowed are {', '.join(sorted(node.keys()))}" if hasattr(node, "keys") else ""
                raise ConfigError(f"{where}.{key}: no such setting{allowed}")
            node, where = node[key], f"{where}.{key}"
        kind = type(node).__name__
        try:
            if match[2] is not None and isinstance(node, (int, float)):
                {"bool": _boolean}.get(kind, type(node))(match[2])
        except ValueError as error:
            allowed = {"bool": "true or false", "int": "a whole number", "float": "a number"}[kind]
            raise ConfigError(f"{where}={match[2]}: must be {allowed}") from error


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "false", "t", "f", "1", "0", "yes", "no", "y", "n"):
        raise ValueError(text)
    return text.lower() in ("true", "t", "1", "yes", "y")
