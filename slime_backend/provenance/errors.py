"""Errors of the provenance package, apart from the modules that need torch."""


class RecordError(ValueError):
    """An engine's answer or a stored record isn't a complete rollout."""


class AuditError(RuntimeError):
    """The run can't be audited; the message says what is missing."""
