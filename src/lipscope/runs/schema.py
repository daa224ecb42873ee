"""The store's tables, as the sequence of migrations that made them.

A new store runs through all of them, an older one through those it lacks. A migration that was released is never changed.
"""

from __future__ import annotations

import sqlite3

# "Lips" in ASCII: tells a store from other SQLite databases.
APPLICATION_ID = 0x4C697073

MIGRATIONS = (
    # 1: plans, runs, where they ran, tasks and rows. What was measured is JSON: its columns may grow. The checksum of a row
    # covers all its other columns.
    """
    CREATE TABLE plans (id INTEGER PRIMARY KEY, digest TEXT NOT NULL UNIQUE, text TEXT NOT NULL, created TEXT NOT NULL);
    CREATE TABLE environments (id INTEGER PRIMARY KEY, digest TEXT NOT NULL UNIQUE, content TEXT NOT NULL);
    CREATE TABLE runs (
        id INTEGER PRIMARY KEY, plan INTEGER NOT NULL REFERENCES plans(id), engine TEXT NOT NULL,
        environment INTEGER NOT NULL REFERENCES environments(id), started TEXT NOT NULL, finished TEXT
    );
    CREATE TABLE tasks (
        id INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE, status TEXT NOT NULL CHECK (status IN ('done', 'failed')),
        identity TEXT NOT NULL, labels TEXT NOT NULL, row_count INTEGER NOT NULL, error TEXT, trace TEXT,
        seconds REAL NOT NULL, flops REAL NOT NULL, run INTEGER NOT NULL REFERENCES runs(id),
        environment INTEGER NOT NULL REFERENCES environments(id), finished TEXT NOT NULL
    );
    CREATE TABLE rows (
        id INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE, task TEXT NOT NULL REFERENCES tasks(key),
        model TEXT, text TEXT, kind TEXT, layer INTEGER, head INTEGER, scope TEXT, mask TEXT, n INTEGER, input INTEGER,
        document INTEGER, dtype TEXT, measured TEXT NOT NULL, checksum TEXT NOT NULL
    );
    """,
    # 2: which tasks a plan asks for, so that one store can serve several plans; how often a task was tried.
    """
    CREATE TABLE plan_tasks (
        plan INTEGER NOT NULL REFERENCES plans(id), task TEXT NOT NULL, PRIMARY KEY (plan, task)
    ) WITHOUT ROWID;
    INSERT INTO plan_tasks SELECT DISTINCT runs.plan, tasks.key FROM tasks JOIN runs ON tasks.run = runs.id;
    ALTER TABLE tasks ADD COLUMN attempts INTEGER NOT NULL DEFAULT 1;
    CREATE INDEX rows_of_task ON rows (task);
    """,
)

VERSION = len(MIGRATIONS)

# Columns of a row that say what it is; everything else it holds was measured.
KEY_COLUMNS = ("model", "text", "kind", "layer", "head", "scope", "mask", "n", "input", "document", "dtype")
RECORD = f"key, task, {', '.join(KEY_COLUMNS)}, measured, checksum"


def migrate(connection: sqlite3.Connection, to: int = VERSION) -> int:
    """Bring a store to schema version ``to``, each step in one transaction; returns the version it had."""
    had: int = connection.execute("PRAGMA user_version").fetchone()[0]
    for version in range(had + 1, to + 1):
        # PRAGMAs take no parameters; both numbers are our own.
        connection.executescript(
            f"BEGIN IMMEDIATE; {MIGRATIONS[version - 1]} PRAGMA application_id = {APPLICATION_ID}; "
            f"PRAGMA user_version = {version}; COMMIT;"
        )
    return had
