"""A run's settings: frozen dataclasses, checked before any device work.

Config files build an `ml_collections.ConfigDict` (`default()` gives one with every
key); `freeze` turns it into a `Config` and refuses what cannot work, each time in
one line that says what to write.
"""

from trace_jax.config.build import default, freeze, to_dict
from trace_jax.config.checks import MODES
from trace_jax.config.errors import ConfigError, require
from trace_jax.config.sections import (
    CheckpointConfig,
    Config,
    DistributedConfig,
    EvalConfig,
    GuidanceConfig,
    InitConfig,
    LedgerConfig,
    MeshConfig,
    OptimConfig,
    PrecisionConfig,
    RLConfig,
    RolloutConfig,
    TaskConfig,
    WarmupConfig,
)
