"""The configuration of a run has frozen sections, one per concern, and is read from flat keys.

model        the model of v0, the seed               trainer      steps, optimizer, staleness, hardware
publication  layout, prefix sharing, transport       audit        how much, how exactly, when
engines      how many, on what, flags, deadlines     tracking     W&B, TensorBoard
task         what the engines generate, groups in flight         gateway      for reef_service.config, which checks it
"""

from slime_backend.config.audit import AuditConfig
from slime_backend.config.engines import EnginesConfig
from slime_backend.config.errors import ConfigError
from slime_backend.config.model import ModelConfig
from slime_backend.config.publication import PublicationConfig
from slime_backend.config.reading import load_config, make_config
from slime_backend.config.run import RunConfig
from slime_backend.config.task import TaskConfig
from slime_backend.config.tracking import TrackingConfig
from slime_backend.config.trainer import TrainerConfig

__all__ = [
    "AuditConfig",
    "ConfigError",
    "EnginesConfig",
    "ModelConfig",
    "PublicationConfig",
    "RunConfig",
    "TaskConfig",
    "TrackingConfig",
    "TrainerConfig",
    "load_config",
    "make_config",
]
