"""Stores as earlier versions wrote them."""

from __future__ import annotations

from sqlalchemy import create_engine, text


def to_layout_2(url):
    """As the second layout had it: without counters."""
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.execute(text("DROP TABLE counters"))
        for index in ("trajectories_under_lease", "leases_unsettled"):
            connection.execute(text(f"DROP INDEX {index}"))
        connection.execute(text("UPDATE meta SET value = '2' WHERE name = 'layout'"))
    engine.dispose()


def to_layout_1(url):
    """As the first layout had it."""
    to_layout_2(url)
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.execute(text("DROP TABLE answer_keys"))
        connection.execute(text("DROP INDEX leases_of_job"))
        for table, columns in {
            "turns": ("depth", "request", "answer"),
            "trajectories": ("depth", "prompt_tokens", "train", "named", "trains", "closed_at"),
            "leases": ("job", "step"),
        }.items():
            for column in columns:
                connection.execute(text(f"ALTER TABLE {table} DROP COLUMN {column}"))
        for table in ("turns", "trajectories"):
            connection.execute(text(f"UPDATE {table} SET class = 'pure' WHERE class = 'not_auditable'"))
        connection.execute(text("UPDATE meta SET value = '1' WHERE name = 'layout'"))
    engine.dispose()
