"""Settings, validated, no logic.

Arguments of a call beat the engine's config, which beats environment variables, which beat what calibration found
for the model (its profile), which beats the defaults.

The environment is read again at each request, so that an operator can change it while the process runs.
"""

from kvboost_rag.config.calibrated import CalibratedDefaults, ReuseMode
from kvboost_rag.config.checks import HALF_CHARACTER, ConfigError, check_namespace, lone_surrogate
from kvboost_rag.config.encoding import CHUNK_TOKENS, EncodingConfig
from kvboost_rag.config.environment import KernelSetting, cache_dir, kernel_setting
from kvboost_rag.config.generation import GenerationParams
from kvboost_rag.config.reuse import DiskLoad, ResolvedConfig, ReuseConfig

__all__ = [
    "CHUNK_TOKENS",
    "HALF_CHARACTER",
    "CalibratedDefaults",
    "ConfigError",
    "DiskLoad",
    "EncodingConfig",
    "GenerationParams",
    "KernelSetting",
    "ResolvedConfig",
    "ReuseConfig",
    "ReuseMode",
    "cache_dir",
    "check_namespace",
    "kernel_setting",
    "lone_surrogate",
]
