"""Stores of earlier layouts are brought to this version's, in one transaction, when they are opened for writing.

1 -> 2    leases of a job, one branch of a session that trains, answers that can be given again
2 -> 3    counters
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby

from sqlalchemy import Column, Connection, Index, Table, bindparam, func, inspect, select, update
from sqlalchemy.schema import CreateColumn

from reef_service.store import schema
from reef_service.store.choice import choose_branch
from reef_service.store.counters import count_again
from reef_service.store.turn_classes import NOT_AUDITABLE, class_of
from reef_service.store.turns import record_of


def migrate(connection: Connection, layout: int) -> bool:
    """Bring the tables from `layout` to schema.LAYOUT; False, with nothing changed, where nothing is known of it."""
    if not all(step in _STEPS for step in range(layout, schema.LAYOUT)):
        return False
    for step in range(layout, schema.LAYOUT):
        _STEPS[step](connection)
    meta = schema.meta
    connection.execute(update(meta).where(meta.c.name == "layout").values(value=str(schema.LAYOUT)))
    return layout <= schema.LAYOUT


def _jobs_and_branches(connection: Connection) -> None:
    for table in (schema.turns, schema.trajectories, schema.leases):
        _add_columns(connection, table)
    _fill_depths(connection)
    _class_again(connection)
    t = schema.trajectories.c
    for session in connection.scalars(select(t.session).where(t.scored_at.is_not(None)).distinct()).all():
        choose_branch(connection, session)


def _add_columns(connection: Connection, table: Table) -> None:
    """Add the columns and indexes that the table lacks; each column has a default or takes NULL."""
    there = {column["name"] for column in inspect(connection).get_columns(table.name)}
    for column in table.columns:
        if column.name not in there:
            connection.exec_driver_sql(f"ALTER TABLE {table.name} ADD COLUMN {_definition(connection, column)}")
    for index in table.indexes:
        if isinstance(index, Index):
            index.create(connection, checkfirst=True)


def _definition(connection: Connection, column: Column[object]) -> str:
    return str(CreateColumn(column).compile(dialect=connection.dialect))


def _fill_depths(connection: Connection) -> None:
    """Count each turn's place in its conversation, and note each trajectory's."""
    turns, trajectories = schema.turns, schema.trajectories
    place_turn = update(turns).where(turns.c.receipt == bindparam("of_receipt")).values(depth=bindparam("new_depth"))
    place_tip = (
        update(trajectories)
        .where(trajectories.c.session == bindparam("of_session"), trajectories.c.tip == bindparam("of_tip"))
        .values(depth=bindparam("new_depth"), prompt_tokens=bindparam("new_tokens"))
    )
    t = turns.c
    rows = connection.execute(
        select(t.session, t.receipt, t.parent, (func.length(t.prompt_ids) / 4).label("tokens")).order_by(
            t.session, t.finished_at
        )
    ).all()
    for session, found in groupby(rows, key=lambda row: row.session):
        depths: dict[str, int] = {}
        for row in found:
            depth = depths[row.receipt] = depths.get(row.parent, 0) + 1
            connection.execute(place_turn, {"of_receipt": row.receipt, "new_depth": depth})
            connection.execute(
                place_tip,
                {
                    "of_session": session,
                    "of_tip": row.receipt,
                    "new_depth": depth,
                    "new_tokens": int(row.tokens),
                },
            )


def _class_again(connection: Connection) -> None:
    """Turns whose sampling parameters change the distribution were called after their KV alone."""
    turns, trajectories = schema.turns, schema.trajectories
    t = trajectories.c
    changed: set[tuple[str, int]] = set()
    query = select(turns).where(turns.c.provenance.contains('"sampling":'), turns.c["class"] != "")
    for row in connection.execute(query).mappings().all():
        if class_of(record_of(row)) == NOT_AUDITABLE:
            found = update(turns).where(turns.c.receipt == row["receipt"])
            connection.execute(found.values({"class": NOT_AUDITABLE}))
            changed.add((row["session"], row["trajectory"]))
    for session, number in changed:
        of_it = update(trajectories).where(t.session == session, t.number == number, trajectories.c["class"] != "")
        connection.execute(of_it.values({"class": NOT_AUDITABLE}))


def _counters(connection: Connection) -> None:
    for table in (schema.trajectories, schema.leases):
        _add_columns(connection, table)
    count_again(connection)


_STEPS: dict[int, Callable[[Connection], None]] = {1: _jobs_and_branches, 2: _counters}
