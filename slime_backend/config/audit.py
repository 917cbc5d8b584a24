"""This section configures a run's audit."""

from __future__ import annotations

from pydantic import Field

from slime_backend.config.section import Section


class AuditConfig(Section):
    """These settings choose how many rollouts are audited, how exactly, and when."""

    rollouts: int = Field(240, alias="audit_rollouts", ge=0, description="rollouts to audit; 0: none")
    tolerance: float | None = Field(
        None,
        alias="audit_tolerance",
        gt=0,
        description="largest |difference of log-prob|; none: 1e-4 for 32 bits, likelihoods for 16",
    )
    concurrent: bool = Field(
        False, alias="audit_beside", description="audit in a separate process during the training instead of at the end"
    )
    deadline_s: float = Field(
        600,
        alias="audit_deadline_s",
        gt=0,
        description="with audit_beside: how long the audit may go on after the run's end",
    )
