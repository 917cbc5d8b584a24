"""What the store refuses, in one line each."""

from slime_backend.errors import ReefError


class StoreError(ReefError, RuntimeError):
    """The store can't be opened, read or written."""


class UnknownReceipts(StoreError):
    """A report names turns that are not stored."""


class ReportConflict(StoreError):
    """A report's id was used before for another report."""


class UnknownLease(StoreError):
    """No lease of that id was ever given."""


class LeaseGone(StoreError):
    """The lease ran out and its samples were given to somebody else."""
