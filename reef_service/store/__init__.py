"""What the gateway keeps: turns, trajectories, reports, leases, publications. SQLite by default, PostgreSQL by URL.

with open_store("sqlite:///runs/gateway/gateway.sqlite") as store:
    placed = await store.add_turn(turn)       # on the disk when it returns
    lease = await store.lease(wish)
    await store.ack(lease.id)
"""

from reef_service.store.errors import LeaseGone, ReportConflict, StoreError, UnknownLease, UnknownReceipts
from reef_service.store.store import Store, open_records, open_store

__all__ = [
    "LeaseGone",
    "ReportConflict",
    "Store",
    "StoreError",
    "UnknownLease",
    "UnknownReceipts",
    "open_records",
    "open_store",
]
