"""`accelerate-spot launch`: accelerate's options and YAML, the core's supervised launcher.

One process or many, the workers are started by torch's agent inside of `spot_core.pytorch.launch`: signals reach them,
the time-out follows the grace, a clean stop is told from a crash. The script is run by `accelerate_spot.launch.runner`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from accelerate_spot import refusals
from accelerate_spot.launch import _compat, configuration, runner
from accelerate_spot.section import HANDOVER, KEY, Section, checked
from spot_core.errors import ConfigError
from spot_core.launch.supervisor import Supervisor
from spot_core.pytorch import launch as core


def launch(argv: Sequence[str], supervisor: Supervisor) -> int:
    """Run the script with `argv` and return the exit code for this process.

    Raises ConfigError before anything starts; SystemExit from accelerate's parser (`--help`, wrong options).
    """
    parser = _compat.parser()
    parser.prog = "accelerate-spot launch"
    parser.add_argument(
        "--spot",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help=f"a value of {KEY}, instead of the one in the file; may be given several times",
    )
    args = parser.parse_args(list(argv))
    path = args.config_file or _compat.default_file()
    with contextlib.ExitStack() as stack:
        section: Mapping[str, Any] = {}
        if path is not None:
            rest, section = configuration.read(path)
            args.config_file = stack.enter_context(configuration.for_accelerate(path, rest))
        os.environ[HANDOVER] = json.dumps({**section, **_given(args.spot)})
        active = Section.active()
        args, defaults = _compat.with_defaults(args)
        options = _workers(args, defaults, active)
        return core.supervise(options, supervisor)


def _given(pairs: Sequence[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals:
            raise ConfigError(f"--spot {pair}: give NAME=VALUE.")
        try:
            values[name] = json.loads(text)
        except ValueError:
            values[name] = text
    return checked(values, "--spot")


def _workers(args: argparse.Namespace, defaults: Any, section: Section) -> argparse.Namespace:
    """torchrun's options for what accelerate's ones ask for; the environment of the workers is set in this process."""
    _refuse(args, defaults)
    script = [*(["-m"] if args.module else []), args.training_script, *args.training_script_args]
    many = args.multi_gpu or args.use_fsdp or (args.num_processes or 1) > 1 or (args.num_machines or 1) > 1
    if many:
        environment = _compat.many_processes_environment(args)
        if args.cpu or args.use_cpu:
            environment["ACCELERATE_USE_CPU"] = "true"  # or each worker would be a training of its own
    else:
        environment = _compat.one_process_environment(args)
        environment[runner.DROPPED] = "1"
        args.standalone, args.nproc_per_node = True, "1"
    os.environ.update(environment)
    options = core.parser().parse_args([runner.__name__])
    for name, value in vars(args).items():
        if hasattr(options, name):
            setattr(options, name, value)
    options.module, options.no_python = True, False
    options.training_script, options.training_script_args = runner.__name__, script
    options.run = section.run
    options.grace, options.exit_code = section.settings.grace_s, section.settings.exit_code
    return options


def _refuse(args: argparse.Namespace, defaults: Any) -> None:
    for name, what in {
        "use_deepspeed": "DeepSpeed",
        "use_megatron_lm": "Megatron-LM",
        "tpu": "TPUs",
    }.items():
        if getattr(args, name, False):
            raise ConfigError(
                f"accelerate-spot does not support {what}: it drives the model itself.",
                hint="Use one process, DDP (MULTI_GPU, MULTI_CPU), or FSDP with fsdp_version: 2.",
            )
    if args.use_fsdp and str(args.fsdp_version) != "2":
        raise ConfigError(refusals.OLD_FSDP, hint=refusals.OLD_FSDP_HINT)
    if defaults is not None and "SAGEMAKER" in str(defaults.compute_environment):
        raise ConfigError("accelerate-spot does not start jobs on SageMaker.", hint="Start it on the machine itself.")
    if args.no_python:
        raise ConfigError(
            "--no_python starts a program that this launcher cannot put the run into.",
            hint="Leave it out, and give the Python script.",
        )
    if getattr(args, "mpirun_hostfile", None):
        raise ConfigError(
            "accelerate-spot does not start mpirun.",
            hint="Use torch's own launching (num_processes, num_machines, main_process_ip) instead.",
        )
