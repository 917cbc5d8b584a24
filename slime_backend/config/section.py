"""`Section` is the base of a configuration's sections: a frozen model whose aliases are the keys that users write."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A section has the settings of one concern of a run.

    A field is named for its reader (`config.audit.rollouts`); its alias, where it has one, is the flat key
    (`audit_rollouts`) that a YAML file, `--set` and an error name.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    @classmethod
    def flat_keys(cls) -> list[str]:
        """Return the keys that users write, in order."""
        return [field.alias or name for name, field in cls.model_fields.items()]
