"""accelerate's launcher: its parser, its defaults and its environment for the workers. The rest of it is not used.

`accelerate launch` itself leaves a single process an orphan when it is told to stop, knows no SIGUSR1, and turns every
exit code into 1. tests/accelerate/test_compat.py fails when a name vanishes.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

from accelerate.commands import launch as _launch
from accelerate.commands.config import config_args as _config
from accelerate.utils import check_cuda_p2p_ib_support
from accelerate.utils import launch as _environment


def parser() -> argparse.ArgumentParser:
    """All options of `accelerate launch`."""
    made: argparse.ArgumentParser = _launch.launch_command_parser()
    return made


def default_location() -> str:
    """Where that configuration belongs."""
    return str(_config.default_config_file)


def default_file() -> str | None:
    """The configuration that accelerate takes when none is named; None when there is none."""
    path = str(_config.default_config_file)
    return path if os.path.isfile(path) else None


def with_defaults(args: argparse.Namespace) -> tuple[argparse.Namespace, Any]:
    """The options completed from the configuration file, and that configuration.

    Why private: it is the first half of `launch_command`, whose second half starts processes.
    """
    args, defaults, _ = _launch._validate_launch_command(args)
    return args, defaults


def many_processes_environment(args: argparse.Namespace) -> dict[str, str]:
    """Variables for workers under torchrun; sets torchrun's options in `args`."""
    environment: dict[str, str] = _environment.prepare_multi_gpu_env(args)
    if not check_cuda_p2p_ib_support():
        environment.setdefault("NCCL_P2P_DISABLE", "1")
        environment.setdefault("NCCL_IB_DISABLE", "1")
    return environment


def one_process_environment(args: argparse.Namespace) -> dict[str, str]:
    """Variables for the only worker."""
    _, environment = _environment.prepare_simple_launcher_cmd_env(args)
    return dict(environment)
