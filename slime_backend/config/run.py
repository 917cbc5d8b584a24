"""`RunConfig` is the one configuration object of a run: sections, made of flat keys."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from slime_backend.config.audit import AuditConfig
from slime_backend.config.engines import EnginesConfig
from slime_backend.config.model import ModelConfig
from slime_backend.config.publication import PublicationConfig
from slime_backend.config.section import Section
from slime_backend.config.task import TaskConfig
from slime_backend.config.tracking import TrackingConfig
from slime_backend.config.trainer import TrainerConfig
from slime_backend.engine_client.keys import without_keys
from slime_backend.policy import Policy, check_radix_setting


class RunConfig(BaseModel):
    """This has all settings of a run.

    It is made of flat keys, named as the flags, and read by sections: a callee gets the section that it needs.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="names runs/<name>")
    runs_dir: str = Field("runs", description="where runs/<name>/ is made")
    model: ModelConfig
    publication: PublicationConfig
    engines: EnginesConfig
    task: TaskConfig
    trainer: TrainerConfig
    audit: AuditConfig
    tracking: TrackingConfig
    gateway: Mapping[str, object] | None = Field(None, description="for `serve` and `up`; read by reef_service.config")

    if TYPE_CHECKING:

        def __init__(self, **flat_keys: Any) -> None: ...

    @model_validator(mode="before")
    @classmethod
    def _into_sections(cls, keys: Mapping[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {section: {} for section in SECTIONS}
        for key, value in keys.items():
            if key not in SECTION_OF:
                close = difflib.get_close_matches(str(key), SECTION_OF, n=1)
                raise ValueError(f"unknown key {key!r}" + (f"; did you mean {close[0]!r}?" if close else ""))
            section = SECTION_OF[key]
            (found if section is None else found[section])[key] = value
        return found

    @model_validator(mode="after")
    def _safe(self) -> RunConfig:
        if self.engines.disable_radix_cache is False:
            check_radix_setting(self.policy, True, "disable_radix_cache=false")
        return self

    @property
    def policy(self) -> Policy:
        return self.publication.policy

    @property
    def run_dir(self) -> Path:
        return Path(self.runs_dir) / self.name

    def to_record(self) -> dict[str, Any]:
        """Return the flat keys and values that may be recorded: without the engines' API keys."""
        found: dict[str, Any] = {"name": self.name, "runs_dir": self.runs_dir}
        for section in SECTIONS:
            found |= getattr(self, section).model_dump(by_alias=True)
        return {**found, "gateway": self.gateway, "engine_flags": without_keys(self.engines.flags)}


SECTIONS: dict[str, type[Section]] = {
    name: field.annotation
    for name, field in RunConfig.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, Section)
}
# The section that each flat key belongs to; None: the configuration itself.
SECTION_OF: dict[str, str | None] = {
    **{name: None for name in RunConfig.model_fields if name not in SECTIONS},
    **{key: section for section, kind in SECTIONS.items() for key in kind.flat_keys()},
}
