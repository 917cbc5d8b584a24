"""The audit at the end of a run, or beside it."""

from __future__ import annotations

from pydantic import Field

from slime_backend.config.section import Section


class AuditConfig(Section):
    """How much is audited, how exactly, and when."""

    rollouts: int = Field(240, alias="audit_rollouts", ge=0, description="rollouts to audit; 0: none")
    tolerance: float = Field(1e-4, alias="audit_tolerance", gt=0)
    beside: bool = Field(
        False, alias="audit_beside", description="audit in a process beside the training instead of at the end"
    )
    deadline_s: float = Field(
        600, alias="audit_deadline_s", gt=0, description="of audit_beside: how long it may go on after the run's end"
    )
