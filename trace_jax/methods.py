"""Training methods by name: this project's and its rivals', each a set of settings.

`--config.method=NAME` fills in what the method is about; a setting given by hand stays.
All but `naive` replay the rollout's routes, and those that TRACE's paper (arXiv 2610.07767)
ran cap the token ratio at 5, as it did.
"""

from collections.abc import Collection, Mapping
from typing import Any

_CAPPED = {"rl.correction": "tis", "rl.correction_cap": 5.0}
_ALL_SITES = ("expert_in", "expert_mid", "k", "v")

METHODS: dict[str, dict[str, Any]] = {
    # BF16 rollout and trainer: the reference. post_hoc is judged after quantizing the policy.
    "bf16": {"mode": "bf16"},
    "post_hoc": {"mode": "post_hoc"},
    "post_hoc_4over6": {"mode": "post_hoc", "precision.weights": "nvfp4_4over6"},
    # FP4 rollout, BF16 trainer, and what has been proposed against the gap between them.
    "naive": {"mode": "naive", "rl.routing_replay": False},
    "routing_replay": {"mode": "naive"},  # R3, arXiv 2510.11370
    "tis": {"mode": "naive", "rl.correction": "tis", "rl.correction_cap": 2.0},
    "icepop": {"mode": "naive", "rl.correction": "icepop"},  # arXiv 2510.18855
    "score_centering": {"mode": "naive", "rl.score_centering": 128},  # arXiv 2609.20807
    # FP4 on both sides, each with its own rounding.
    "qat": {"mode": "qat", **_CAPPED},
    "w4a16": {"mode": "w4a16", **_CAPPED},
    "quads": {"mode": "quads", **_CAPPED},  # arXiv 2607.15810
    # QaRL with TBPO (arXiv 2604.07853): its band is around the policy that sampled.
    "qarl": {"mode": "qat", "rl.algorithm": "tbpo", "rl.old_logprobs": "rollout"},
    # Guided: the paper's whole codes, the paper's one bit, and one bit everywhere.
    "trace_codes": {"mode": "trace", "guidance.bits": 4, "guidance.layers": "all", **_CAPPED},
    "trace": {"mode": "trace", **_CAPPED},
    "trace_all": {
        "mode": "trace",
        "guidance.layers": "all",
        "guidance.sites": _ALL_SITES,
        **_CAPPED,
    },
}


def apply(
    tree: Mapping[str, Any], defaults: Mapping[str, Any], given: Collection[str] = ()
) -> dict[str, Any]:
    """A nested `tree` of settings with those of its method put where it has the default.

    Args:
      tree: settings with a known "method"; keys may be missing.
      defaults: every setting at its default, nested alike.
      given: dotted paths that stay although they have it.
    """
    out = {k: dict(v) if isinstance(v, Mapping) else v for k, v in tree.items()}
    for path, value in METHODS[tree["method"]].items():
        *group, key = path.split(".")
        here, default = out, defaults
        for name in group:
            here, default = here.setdefault(name, {}), default[name]
        held = here.get(key, default[key])
        if path not in given and held == default[key]:
            here[key] = value
    return out


def settings(tree: Mapping[str, Any], method: str) -> dict[str, Any]:
    """{path: value in `tree`} of what the method sets: what a run's header shows."""
    out = {}
    for path in METHODS[method]:
        value = tree
        for name in path.split("."):
            value = value[name]
        out[path] = value
    return out
