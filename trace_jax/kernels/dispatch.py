"""Which version of an op runs: "auto" picks by platform and says so once; a name is obeyed.

On NVIDIA GPUs that are no Hopper the large ops (routed products, paged attention, append,
quantizer) run in Triton. Routing, top-k, norms with rotation, residuals with norms, and fake
quantization have no Triton version: plain XLA, their reference, serves there.
"""

import logging
from collections.abc import Callable, Mapping

import jax

logger = logging.getLogger(__name__)

# What an op's version returns when it can run a call: None, or the reason why it cannot.
Refusal = str | None

_logged: set[tuple[str, str]] = set()


def device():
    """The device that a program runs on unless it says otherwise."""
    default = jax.config.jax_default_device
    return default if hasattr(default, "platform") else jax.devices(default)[0]


def platform() -> str:
    """Platform of the default device: "cpu", "gpu" or "tpu"."""
    name = device().platform
    return "gpu" if name in ("cuda", "rocm") else name


def choose(
    op: str,
    version: str,
    refusals: Mapping[str, Callable[[], Refusal]],
    preference: Mapping[str, tuple[str, ...]],
) -> str:
    """The version of `op` to run.

    Args:
      op: its name, for messages.
      version: "auto" or a key of `refusals`.
      refusals: for each version a function that says why it cannot run this
        call here, or None if it can.
      preference: platform -> versions that "auto" tries, best first.

    Raises:
      ValueError: unknown version; or a named version that cannot run this call:
        it never falls back.
    """
    if version != "auto":
        if version not in refusals:
            raise ValueError(f"{op}: no version {version!r}; write auto, {', '.join(refusals)}")
        reason = refusals[version]()
        if reason is not None:
            raise ValueError(f"{op}: version {version!r} cannot run this call: {reason}")
        return version
    reasons = []
    for name in preference.get(platform(), ()):
        reason = refusals[name]()
        if reason is None:
            _log_once(op, name, reasons)
            return name
        reasons.append(f"{name}: {reason}")
    _log_once(op, "reference", reasons)
    return "reference"


def _log_once(op: str, name: str, reasons: list[str]) -> None:
    message = f"{op} on {platform()}: {name}" + (f" ({'; '.join(reasons)})" if reasons else "")
    if (op, message) not in _logged:
        _logged.add((op, message))
        logger.info(message)
