"""What every command shares: one clear line for an error, JSON as the last line."""

import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path

from absl import app, flags
from ml_collections import config_flags

from trace_jax import methods
from trace_jax.checkpoint import CheckpointError
from trace_jax.config import Config, freeze, to_dict
from trace_jax.loop import Result, TrainingStopped

STOPPED = 130  # as a shell reports a command ended by Ctrl-C
REFUSED = 2
FAILED = 1  # it ran to its end, and a part of it failed


def run(main: Callable[[], None]) -> None:
    """Runs `main` under absl flags; expected errors become one line and an exit code."""

    def guarded(argv):
        logging.getLogger().setLevel(logging.WARNING)  # absl's default shows libraries' chatter
        if len(argv) > 1:
            text = f"unexpected argument {argv[1]!r}; settings are written --config.key=value"
            _end(text, REFUSED)
        try:
            main()
        except TrainingStopped as stop:
            _end(str(stop), STOPPED)
        except KeyboardInterrupt:
            _end("stopped at once; --resume goes on from the newest checkpoint", STOPPED)
        except (ValueError, CheckpointError, OSError) as error:
            _end(f"error: {' '.join(str(error).split())}", REFUSED)

    app.run(guarded, flags_parser=_parse)


def _parse(argv):
    """absl's parser, with a bad setting as one line in place of a traceback."""
    try:
        return flags.FLAGS(argv)
    except (flags.Error, AttributeError, KeyError, TypeError, ValueError, OSError) as error:
        text = " ".join(str(error).split())
        _end(f"error: {text}", REFUSED)


def _end(message: str, code: int):
    print(message, file=sys.stderr)
    sys.exit(code)


def config_of(holder) -> Config:
    """The frozen configuration of a --config flag; what other flags say beats its method."""
    given = config_flags.get_override_values(flags.FLAGS[holder.name])
    return freeze(holder.value, given)


def header(config: Config) -> str:
    """One line: the method and its settings, and what is emulated."""
    tree = to_dict(config)
    shown = {"mode": config.mode}
    if config.method:
        shown = {"method": config.method} | methods.settings(tree, config.method)
    if config.rollout.engine_noise:
        shown["rollout.engine_noise"] = config.rollout.engine_noise
    text = "  ".join(f"{k} {v}" for k, v in shown.items())
    return f"{text}  (FP4 products are emulated in BF16)"


def summary(result: Result, report: Path | None) -> dict:
    """The JSON line of a finished run."""
    last = result.last
    return {
        "accuracy_before": round(result.before["accuracy"], 4),
        "accuracy_after": round(result.after["accuracy"], 4),
        "accuracy_own": round(result.own["accuracy"], 4),
        "accuracy_bf16": round(result.bf16["accuracy"], 4),
        "mean_abs_logprob_gap": last.get("mismatch/gap_mean"),
        "kl_k3": last.get("mismatch/k3"),
        "code_agreement": last.get("agreement/mean"),
        "guidance_bytes_per_token": last.get("guidance/bytes_per_token"),
        "seconds": round(result.seconds, 1),
        "report": str(report) if report else None,
        "checkpoint": str(result.checkpoint) if result.checkpoint else None,
    }


def print_json(value: dict) -> None:
    print(json.dumps(value), flush=True)
