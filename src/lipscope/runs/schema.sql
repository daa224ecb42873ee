-- The tables of a store. What was measured is JSON: its columns may grow. A checksum covers all other columns of its record,
-- and a plan knows how many tasks it asks for. The order of the tables is part of the format: recovery counts on their first
-- pages.
CREATE TABLE plans (
    id INTEGER PRIMARY KEY, digest TEXT NOT NULL UNIQUE, text TEXT NOT NULL, created TEXT NOT NULL,
    task_count INTEGER NOT NULL DEFAULT 0, checksum TEXT NOT NULL DEFAULT ''
);
CREATE TABLE environments (
    id INTEGER PRIMARY KEY, digest TEXT NOT NULL UNIQUE, content TEXT NOT NULL, checksum TEXT NOT NULL DEFAULT ''
);
CREATE TABLE runs (
    id INTEGER PRIMARY KEY, plan INTEGER NOT NULL REFERENCES plans(id), engine TEXT NOT NULL,
    environment INTEGER NOT NULL REFERENCES environments(id), started TEXT NOT NULL, finished TEXT,
    checksum TEXT NOT NULL DEFAULT ''
);
CREATE TABLE tasks (
    id INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE, status TEXT NOT NULL CHECK (status IN ('done', 'failed')),
    identity TEXT NOT NULL, labels TEXT NOT NULL, row_count INTEGER NOT NULL, error TEXT, trace TEXT,
    seconds REAL NOT NULL, flops REAL NOT NULL, run INTEGER NOT NULL REFERENCES runs(id),
    environment INTEGER NOT NULL REFERENCES environments(id), finished TEXT NOT NULL, attempts INTEGER NOT NULL DEFAULT 1,
    checksum TEXT NOT NULL DEFAULT ''
);
CREATE TABLE plan_tasks (
    plan INTEGER NOT NULL REFERENCES plans(id), task TEXT NOT NULL, checksum TEXT NOT NULL DEFAULT '',
    PRIMARY KEY (plan, task)
) WITHOUT ROWID;
CREATE TABLE rows (
    id INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE, task TEXT NOT NULL REFERENCES tasks(key),
    model TEXT, text TEXT, kind TEXT, layer INTEGER, head INTEGER, scope TEXT, mask TEXT, n INTEGER, input INTEGER,
    document INTEGER, dtype TEXT, measured TEXT NOT NULL, checksum TEXT NOT NULL
);
CREATE INDEX rows_of_task ON rows (task);
