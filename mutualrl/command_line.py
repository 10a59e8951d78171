"""The command line: a config file, overrides by dotted path, a work folder; anything wrong is one line."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Sequence

from absl import flags
from ml_collections import config_flags

from mutualrl.config import ConfigError, RunConfig, read


def read_command_line(argv: Sequence[str]) -> tuple[RunConfig, str]:
    """Settings and work folder from `--config=FILE [--config.path.to.setting=value …] [--workdir=FOLDER]`.

    Values may also stand in a file given by `--flagfile`. The work folder defaults to `runs/<name of the config file>`.

    Raises:
      ConfigError: a flag, file, setting or value is wrong; the message is one line.
    """
    values = flags.FlagValues()
    holder = config_flags.DEFINE_config_file("config", None, "config file", flag_values=values)
    flags.DEFINE_string("workdir", "", "folder of the run", flag_values=values)
    saved = sys.argv
    try:
        # ml_collections reads sys.argv itself to find out which settings are overridden.
        sys.argv = values.read_flags_from_files(list(argv), force_gnu=False)
        rest = values(sys.argv)
        if len(rest) > 1:
            raise ConfigError(f"{rest[1]!r}: not a flag; settings are given as --config.path.to.setting=value")
        path = next((m[1] for a in sys.argv if (m := re.match(r"--?config=([^:]+)", a))), None)
        if path is None:
            raise ConfigError("--config=FILE is missing, e.g. --config=configs/demo.py")
        if not Path(path).is_file():
            raise ConfigError(f"--config={path}: no such file")
        return read(holder.value), values["workdir"].value or f"runs/{Path(path).stem}"
    except ConfigError:
        raise
    except Exception as error:  # absl and ml_collections raise many types for one thing: a wrong flag
        raise ConfigError(_one_line(error)) from error
    finally:
        sys.argv = saved


def _one_line(error: Exception) -> str:
    """A library's complaint about a flag, without its line breaks, object dumps and doubled quotes."""
    text = " ".join(str(error).replace("\\n", " ").split())
    text = re.sub(r"Other fields present: .*?\}\"?\s*", "", text)
    return text.strip("'\"") or type(error).__name__
