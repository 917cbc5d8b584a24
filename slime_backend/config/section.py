"""What every section of a configuration is: a frozen model whose fields' aliases are the keys that users write."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """One concern of a run. A field is named for its reader (`config.audit.rollouts`); its alias, where it has one, is
    the flat key (`audit_rollouts`) that a YAML file, `--set` and an error name."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @classmethod
    def flat_keys(cls) -> list[str]:
        """The keys that users write, in order."""
        return [field.alias or name for name, field in cls.model_fields.items()]
