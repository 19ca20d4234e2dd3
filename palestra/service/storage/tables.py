"""Tables of the service's database, and statements that change one of their rows. Times are seconds since 1970."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import sqlalchemy as sql

TableRow: TypeAlias = "sql.Row[*tuple[Any, ...]]"  # quoted: SQLAlchemy 2.0's rows have another parameter
meta = sql.MetaData()
_id = sql.String(400)

sessions = sql.Table(
    "sessions",
    meta,
    sql.Column("id", _id, primary_key=True),
    sql.Column("owner", sql.String(200), nullable=False, index=True),
    sql.Column("created", sql.Float, nullable=False),
    sql.Column("seen", sql.Float, nullable=False),  # time of the last heartbeat or request
    sql.Column("finished", sql.Float),
    sql.Column("info", sql.JSON, nullable=False),
)
models = sql.Table(
    "models",
    meta,
    sql.Column("id", _id, primary_key=True),
    sql.Column("session", _id, nullable=False, index=True),
    sql.Column("owner", sql.String(200), nullable=False, index=True),
    sql.Column("base", _id, nullable=False),
    sql.Column("lora", sql.JSON, nullable=False),  # rank, seed, train_mlp, train_attn, train_unembed
    sql.Column("info", sql.JSON, nullable=False),
    sql.Column("created", sql.Float, nullable=False),
    sql.Column("used", sql.Float, nullable=False),
    # live: in memory or restorable from `saved`; lost: the worker died after unsaved changes; gone: unloaded
    sql.Column("state", sql.String(16), nullable=False),
    sql.Column("changed", sql.BigInteger, nullable=False),  # sequence number of the last request that changed it
    sql.Column("kept", sql.BigInteger, nullable=False),  # value of `changed` at the last save
    sql.Column("saved", sql.Text),  # folder of the weight store
)
samplers = sql.Table(
    "samplers",
    meta,
    sql.Column("id", _id, primary_key=True),
    sql.Column("session", _id, nullable=False, index=True),
    sql.Column("owner", sql.String(200), nullable=False),
    sql.Column("base", _id, nullable=False),
    sql.Column("path", sql.Text),  # tinker:// path of the weights
    sql.Column("folder", sql.Text),  # folder of the weight store; null: the bare base
    sql.Column("created", sql.Float, nullable=False),
)
checkpoints = sql.Table(
    "checkpoints",
    meta,
    sql.Column("path", sql.String(600), primary_key=True),
    sql.Column("owner", sql.String(200), nullable=False, index=True),
    sql.Column("run", _id, nullable=False, index=True),
    sql.Column("kind", sql.String(16), nullable=False),  # training, sampler, external
    sql.Column("base", _id, nullable=False),
    sql.Column("lora", sql.JSON, nullable=False),
    sql.Column("folder", sql.Text, nullable=False),
    sql.Column("size", sql.BigInteger, nullable=False),
    sql.Column("created", sql.Float, nullable=False),
    sql.Column("expires", sql.Float),
    sql.Column("public", sql.Boolean, nullable=False),
    sql.Column("info", sql.JSON, nullable=False),
)
# Started uploads of external weights; `folder` of the weight store is there once a file has arrived.
uploads = sql.Table(
    "uploads",
    meta,
    sql.Column("id", _id, primary_key=True),
    sql.Column("owner", sql.String(200), nullable=False),
    sql.Column("base", _id, nullable=False),
    sql.Column("lora", sql.JSON, nullable=False),
    sql.Column("info", sql.JSON, nullable=False),
    sql.Column("folder", sql.Text, nullable=False),
    sql.Column("created", sql.Float, nullable=False),
    sql.Column("expires", sql.Float, nullable=False),  # time until which its URLs are valid
)
requests = sql.Table(
    "requests",
    meta,
    sql.Column("serial", sql.BigInteger().with_variant(sql.Integer, "sqlite"), primary_key=True, autoincrement=True),
    sql.Column("id", sql.String(32), nullable=False, unique=True),
    sql.Column("owner", sql.String(200), nullable=False, index=True),
    sql.Column("kind", sql.String(32), nullable=False),
    sql.Column("key", sql.String(600), unique=True),
    sql.Column("model", _id, index=True),
    sql.Column("seq", sql.BigInteger),
    sql.Column("state", sql.String(8), nullable=False, index=True),
    sql.Column("takes", sql.Integer, nullable=False, server_default="0"),  # number of times a worker took it
    sql.Column("body", sql.LargeBinary),
    sql.Column("result", sql.LargeBinary),
    sql.Column("result_kind", sql.String(20)),
    sql.Column("created", sql.Float, nullable=False),
    sql.Column("finished", sql.Float, index=True),  # time of the answer, in the order of commits
)
# One row: what the worker last told of itself, for the console.
worker_status = sql.Table(
    "worker_status",
    meta,
    sql.Column("id", sql.String(16), primary_key=True),
    sql.Column("status", sql.JSON, nullable=False),
)
# One row: the mark of the data folder that holds the weights to which the other tables refer.
folders = sql.Table("folders", meta, sql.Column("mark", sql.String(64), primary_key=True))


def update_row(table: sql.Table, id: str, **values: Any) -> sql.Update:
    """Returns the statement that sets columns of the row with primary key `id`."""
    (column,) = table.primary_key.columns
    return sql.update(table).where(column == id).values(values)


def upsert_row(table: sql.Table, values: Mapping[str, Any]) -> list[sql.Executable]:
    """Returns the statements that insert a row, replacing the one with the same primary key."""
    (column,) = table.primary_key.columns
    return [delete_row(table, values[column.name]), sql.insert(table).values(dict(values))]


def delete_row(table: sql.Table, id: str) -> sql.Delete:
    """Returns the statement that deletes the row with primary key `id`."""
    (column,) = table.primary_key.columns
    return sql.delete(table).where(column == id)
