"""Errors of the provenance package, apart from the modules that need torch."""

from slime_backend.errors import ReefError


class RecordError(ReefError, ValueError):
    """An engine's answer or a stored record isn't a complete rollout."""


class StalenessError(ReefError, RuntimeError):
    """A rollout was sampled by a version that the trainer doesn't know."""


class LedgerError(ReefError, RuntimeError):
    """The ledger can't be opened or asked; the message says why and what to do."""


class ConversionError(ReefError, RuntimeError):
    """A segment's lines could not be turned into Parquet; nothing was changed."""


class AuditError(ReefError, RuntimeError):
    """The run can't be audited; the message says what is missing."""


class ReportError(ReefError, RuntimeError):
    """The report can't be written; the message says why and what to do."""
