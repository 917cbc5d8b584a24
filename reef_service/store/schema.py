"""The tables. Plain columns that SQLite and PostgreSQL both know; times are seconds since the epoch.

    turns          one answered request: tokens, log-probs, provenance, and what of the conversation they stand for
    trajectories   turns in a row, each beginning with the tokens of the one before; a fork begins another
    leases         trajectories that a trainer has been given and has not yet confirmed
    reports        scores and texts from agents, by an id of theirs
    answer_keys    keys under which clients may ask for an answer again, of answers that are in `turns`
    publications   weight versions in the order in which the fleet came to them
    counters       how many of what there are (counters.py)

A trajectory takes further turns until it has a score, so what was scored is what is trained on, and each turn is
trained on in one trajectory: its own. Of a session's trajectories one trains (`choice.py`).

What changes here changes LAYOUT, and `migrations.py` brings older stores to it.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Column,
    Double,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
)

LAYOUT = 3  # of the tables; written into `meta`
tables = MetaData()

meta = Table("meta", tables, Column("name", String, primary_key=True), Column("value", String, nullable=False))

turns = Table(
    "turns",
    tables,
    Column("receipt", String, primary_key=True),
    Column("session", String, nullable=False),
    Column("trajectory", Integer, nullable=False),  # number in the session
    Column("parent", String),  # the turn whose tokens this one's prompt begins with
    Column("label", String, nullable=False),  # the group that a client named, "" without
    Column("api", String, nullable=False),
    Column("state", String, nullable=False),  # turns.TurnState
    Column("engine", String, nullable=False),
    Column("submitted_at", Double, nullable=False),
    Column("finished_at", Double, nullable=False),
    Column("prompt_ids", LargeBinary, nullable=False),  # int32, little endian
    Column("output_ids", LargeBinary, nullable=False),
    Column("logprobs", LargeBinary, nullable=False),  # float64, little endian
    Column("provenance", Text, nullable=False),  # JSON: spans, segments, prefills; sampling if there is any
    Column("class", String, nullable=False),  # "" where provenance is incomplete
    Column("oldest", Integer, nullable=False),  # publication that its oldest sampled token is of
    Column("finish_reason", String, nullable=False),
    Column("temperature", Double, nullable=False),
    Column("attempts", Integer, nullable=False),
    # The conversation up to and with this turn's answer: what a next request must begin with to go on from it.
    Column("history_kind", String, nullable=False),
    Column("history_length", Integer, nullable=False),
    Column("history_digest", String, nullable=False),
    Column("depth", Integer, nullable=False, server_default="1"),  # turns from the beginning of the conversation to it
    Column("request", String, nullable=False, server_default=""),  # digest of the request, to know a retry of it
    Column("answer", Text, nullable=False, server_default=""),  # JSON: what a retry is answered, "" where it can't be
    Index("turns_of_session", "session", "submitted_at"),  # each further index is a page more in every commit
)

trajectories = Table(
    "trajectories",
    tables,
    Column("session", String, primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("label", String, nullable=False),
    Column("tip", String, nullable=False),  # receipt of the last turn
    Column("turns", Integer, nullable=False),
    Column("class", String, nullable=False),  # the strongest of its turns
    Column("oldest", Integer, nullable=False),
    Column("sound", Integer, nullable=False),  # 1 while every turn's provenance is complete
    Column("score", Double),
    Column("scored_at", Double),
    Column("lease", String),
    Column("lease_ends", Double),
    Column("trained_at", Double),
    Column("depth", Integer, nullable=False, server_default="1"),  # of its last turn
    Column("prompt_tokens", Integer, nullable=False, server_default="0"),  # of its last turn
    Column("train", Integer, nullable=False, server_default="1"),  # 0: a client marked it as not to be trained on
    Column("named", Integer, nullable=False, server_default="0"),  # 1: a score named one of its turns
    Column("trains", Integer, nullable=False, server_default="0"),  # 1: it is its session's branch that trains
    Column("closed_at", Double),  # its group was closed without it: it is given to nobody
    Index("trajectories_by_score", "trained_at", "scored_at"),
)
# Of what a lease was given on and nothing else, so that it costs other rows nothing.
_under_lease = trajectories.c.lease_ends.is_not(None)
Index("trajectories_under_lease", trajectories.c.lease_ends, sqlite_where=_under_lease, postgresql_where=_under_lease)

leases = Table(
    "leases",
    tables,
    Column("id", String, primary_key=True),
    Column("holder", String, nullable=False),
    Column("given_at", Double, nullable=False),
    Column("ends_at", Double, nullable=False),
    Column("acked_at", Double),
    Column("released_at", Double),
    Column("samples", Text, nullable=False),  # JSON: [[session, number], ...] in the order of the batch
    Column("job", String, nullable=False, server_default=""),  # the only one that may use it; "" for none in particular
    Column("step", Integer),  # of the job
    Index("leases_of_job", "job", "step"),
)
_unsettled = leases.c.acked_at.is_(None) & leases.c.released_at.is_(None)
Index("leases_unsettled", leases.c.ends_at, sqlite_where=_unsettled, postgresql_where=_unsettled)

reports = Table(
    "reports",
    tables,
    Column("id", String, primary_key=True),
    Column("digest", String, nullable=False),  # of the complete report, to know a retry from another one
    Column("body", Text, nullable=False),  # JSON
    Column("outcome", Text, nullable=False),  # JSON: what was answered
    Column("at", Double, nullable=False),
)

answer_keys = Table(
    "answer_keys",
    tables,
    Column("session", String, primary_key=True),  # "" for requests without one
    Column("key", String, primary_key=True),
    Column("request", String, nullable=False),  # digest of the request that the key was used for
    Column("receipt", String, nullable=False),
    Column("at", Double, nullable=False),
)

publications = Table(
    "publications",
    tables,
    Column("number", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True),
    Column("version", String, nullable=False),
    Column("state", String, nullable=False),
    Column("checkpoint", String, nullable=False),
    Column("at", Double, nullable=False),
    # JSON of PublicationReport, "{}" where the version was found, not published.
    Column("report", Text, nullable=False),
)

counters = Table(
    "counters",
    tables,
    Column("name", String, primary_key=True),
    Column("value", BigInteger, nullable=False),
)
