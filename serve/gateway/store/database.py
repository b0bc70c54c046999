"""Tables and connections of the job store, and its migration: SQLite in WAL mode, or PostgreSQL.

Durations are measured on the store's own clock (`clock.seconds`, see `clock.py`), which is independent of the wall
clock. Times named `*_at` are wall-clock seconds since 1970, for display only.
"""

import math
import secrets
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Engine,
    Float,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    create_engine,
    event,
    inspect,
    make_url,
    select,
)
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from megadit.models.shared.addresses import shown
from megadit.models.shared.errors import UserError
from megadit.serve.gateway.store import patience

SCHEMA_VERSION = 9
_SECONDS_TO_WAIT_FOR_A_LOCK = 30
_SECONDS_TO_STAND_STILL = 10.0
"""Longest idle time of a gateway within a transaction, before the database ends the transaction."""
_SECONDS_TO_CONNECT = 5
_SECONDS_OF_A_STATEMENT = 15.0
_SECONDS_TO_ANSWER = 20.0
"""Timeout of a database that should have ended the statement itself: its network is down."""
_SECONDS_FOR_A_PLACE = patience.SECONDS
"""Timeout for a free connection of the pool."""
CREATING, CLAIMING = 0x6D656761, 0x6D656762
"""Exclusive work of one gateway, as numbers of PostgreSQL's advisory locks."""

_metadata = MetaData()
VERSION = Table(
    "schema_version", _metadata, Column("version", Integer, primary_key=True), Column("store_id", String(32))
)
CLOCK = Table(
    "clock",
    _metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("seconds", Float, nullable=False),
)
GATEWAYS = Table(
    "gateways", _metadata, Column("name", String(200), primary_key=True), Column("beats", BigInteger, nullable=False)
)
KEYS = Table(
    "keys",
    _metadata,
    Column("id", String(16), primary_key=True),
    Column("name", String(200), nullable=False),
    Column("hash", String(64), nullable=False),
    Column("limits", Text, nullable=False),
    Column("webhook_url", Text),
    Column("webhook_secret", Text),
    Column("turn", BigInteger, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("revoked_at", Float),
    Column("tokens", Float),
    Column("tokens_tick", Float),
)
JOBS = Table(
    "jobs",
    _metadata,
    Column("number", BigInteger().with_variant(Integer, "sqlite"), primary_key=True),
    Column("id", String(40), nullable=False, unique=True),
    Column("key_id", String(16), nullable=False),
    Column("model", String(200), nullable=False),
    Column("request", Text, nullable=False),
    Column("priority", Integer, nullable=False),
    Column("status", String(16), nullable=False),
    Column("step", Integer, nullable=False),
    Column("attempts", Integer, nullable=False),
    Column("owner", String(200)),
    Column("error_code", String(64)),
    Column("error_message", Text),
    Column("created_at", Float, nullable=False),
    Column("started_at", Float),
    Column("completed_at", Float),
    Column("created_tick", Float, nullable=False),
    Column("ended_tick", Float),
    Column("expires_tick", Float),
    Column("media_type", String(64)),
    Column("num_bytes", BigInteger),
    Column("sha256", String(64)),
    Column("scores", Text),
    Column("result_name", String(80)),
    Column("conditioning_name", String(80)),
    Column("conditioning_bytes", BigInteger),
    Column("remixed_from", String(40)),
    Column("idempotency_key", String(255)),
    Column("fingerprint", String(64)),
    Column("webhook", String(16)),
    Column("traceparent", String(55)),
    Column("queued_at", Float),
    UniqueConstraint("key_id", "idempotency_key", name="one_job_for_an_idempotency_key"),
    Index("jobs_by_status", "status", "key_id", "priority", "number"),
    Index("jobs_of_a_key", "key_id", "number"),
    Index("results_by_end", "expires_tick"),
    Index("jobs_by_webhook", "webhook"),
    Index("kept_by_a_key", "key_id", "status", "num_bytes"),
    Index("conditioning_of_jobs", "conditioning_name", "key_id", "conditioning_bytes"),
    sqlite_autoincrement=True,
)
PREVIEWS = Table(
    "previews",
    _metadata,
    Column("number", BigInteger, primary_key=True, autoincrement=False),
    Column("step", Integer, nullable=False),
    Column("data", LargeBinary, nullable=False),
)
"""Latest preview of each running job."""


class Database:
    """An open store: `reading` and `writing` give a connection inside one transaction."""

    def __init__(self, url: str) -> None:
        """Opens or creates the store. Raises UserError for an invalid URL, a database that does not respond, and a
        store of a newer megadit."""
        self._engine = _engine(url)
        self._reader = self._engine.execution_options(read_only=True)
        try:
            _create_or_check(self)
        except SQLAlchemyError as error:
            raise UserError(f"the job store {shown(url)} cannot be opened: {in_a_line(error)}") from error
        with one_line_errors(url), self.reading() as connection:
            self.store_id: str = connection.execute(select(VERSION.c.store_id)).scalar_one()
            """Unique id of this store, which it keeps when it is moved."""

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        with patience.spending(), self._reader.begin() as connection:
            yield connection

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """Takes SQLite's write lock at once, so that data read in the transaction stays valid until it writes."""
        with patience.spending(), self._engine.begin() as connection:
            yield connection

    def check_writable(self) -> None:
        """Raises SQLAlchemyError if the store cannot be written now, such as while a backup holds SQLite's lock."""
        with self.writing():
            pass

    def alone(self, connection: Connection, work: int) -> None:
        """Takes an exclusive lock for this work until the transaction ends.

        SQLite's writing transactions are exclusive from their beginning.
        """
        if self._engine.dialect.name == "postgresql":
            connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({work})")

    def close(self) -> None:
        self._engine.dispose()


def store_url(store: str) -> str:
    """The URL of a store given as a URL or as a path of a file."""
    return store if "://" in store else f"sqlite:///{Path(store).absolute()}"


def is_there(store: str) -> bool:
    """Whether the file of a store exists; a remote database is assumed to exist."""
    return "://" in store or Path(store).exists()


def holds_password(url: str) -> bool:
    """Whether a store's URL holds a password, which would be visible in the process list."""
    try:
        parsed = make_url(store_url(url))
    except (ArgumentError, ValueError):
        return False  # reported when it is opened
    return parsed.password is not None or "password" in parsed.query


@contextmanager
def one_line_errors(url: str) -> Iterator[None]:
    """Turns errors of a damaged or unreachable store in the block into UserError."""
    try:
        yield
    except SQLAlchemyError as error:
        raise UserError(f"the job store {shown(url)} cannot be used: {in_a_line(error)}") from error


def in_a_line(error: SQLAlchemyError) -> str:
    """Return the database's error in one line, without the values of the statement."""
    return str(getattr(error, "orig", None) or error).partition("\n")[0]


_SQLITE = b"SQLite format 3\0"
"""First bytes of a database file."""
_POOL: dict[str, Any] = {"pool_size": 48, "pool_timeout": _SECONDS_FOR_A_PLACE, "hide_parameters": True}
"""Options of the engine; parameters of statements are hidden, since they hold prompts."""


def _engine(url: str) -> Engine:
    try:
        parsed = make_url(store_url(url))
        if parsed.get_backend_name() == "sqlite":
            if parsed.database in (None, "", ":memory:"):
                raise ArgumentError("it has no file")
            path = Path(parsed.database)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)  # it holds the secrets of webhooks
            with path.open("rb") as file:
                head = file.read(len(_SQLITE))
            if head not in (b"", _SQLITE):  # SQLite itself overwrites files of few bytes
                raise ArgumentError("it is another file")
            waiting = {"timeout": _SECONDS_TO_WAIT_FOR_A_LOCK}
            engine = create_engine(parsed, **_POOL, connect_args=waiting)
            event.listen(engine, "connect", _prepare_sqlite)
            event.listen(engine, "begin", _begin_sqlite)
            return engine
        engine = create_engine(parsed, **_POOL, pool_pre_ping=True)
        if parsed.get_backend_name() == "postgresql":
            event.listen(engine, "do_connect", _connect_postgresql)
            event.listen(engine, "connect", _prepare_postgresql)
            event.listen(engine, "begin", _begin_postgresql)
        return engine
    except (ArgumentError, ValueError):  # their messages hold the URL
        raise UserError(
            f"{shown(url)!r} is not a job store; give a file of its own, or a URL such as postgresql+psycopg://..."
        ) from None
    except ModuleNotFoundError as error:
        raise UserError(f"the job store {shown(url)} needs {error.name}, which is not installed") from error
    except OSError as error:
        raise UserError(f"the job store {shown(url)} cannot be opened: {error.strerror}") from error


def _prepare_sqlite(connection, _record) -> None:
    connection.isolation_level = None  # transactions begin where `_begin_sqlite` says, not where the driver guesses
    _turn_to_wal(connection)
    for setting in ("synchronous=FULL", "journal_size_limit=16777216"):
        connection.execute(f"PRAGMA {setting}").close()


def _connect_postgresql(_dialect, _record, arguments: list, settings: dict[str, Any]) -> Any:
    settings = {"connect_timeout": math.ceil(patience.seconds_to_answer(_SECONDS_TO_CONNECT))} | settings
    return _impatient_connection().connect(*arguments, **settings)


@cache
def _impatient_connection() -> Any:
    """psycopg's connection with a timeout of responses; by default it waits for ever."""
    import psycopg

    class Impatient(psycopg.Connection):
        def wait(self, *arguments: Any, **settings: Any) -> Any:
            try:
                return super().wait(
                    *arguments, **{"timeout": patience.seconds_to_answer(_SECONDS_TO_ANSWER)} | settings
                )
            except psycopg.OperationalError:
                if self.info.transaction_status == psycopg.pq.TransactionStatus.ACTIVE:
                    self.close()  # a late response would be taken for that of the next query
                raise

    return Impatient


def _prepare_postgresql(connection, _record) -> None:
    """Limit the time of statements and idle transactions: an idle gateway loses its transaction, with all locks."""
    limits = {
        "idle_in_transaction_session_timeout": _SECONDS_TO_STAND_STILL,
        "statement_timeout": _SECONDS_OF_A_STATEMENT,
    }
    cursor = connection.cursor()
    for name, seconds in limits.items():
        cursor.execute(f"SET {name} = '{seconds * 1000:.0f}ms'")
    cursor.close()
    connection.commit()


def _turn_to_wal(connection: sqlite3.Connection) -> None:
    """Switch to WAL, with retries, since SQLite does not wait here while another process uses the file."""
    began, seconds = time.monotonic(), patience.seconds_left(_SECONDS_TO_WAIT_FOR_A_LOCK)
    connection.execute(f"PRAGMA busy_timeout={seconds * 1000:.0f}").close()
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL").close()
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() - began > seconds:
                raise
            time.sleep(0.01)


def _begin_sqlite(connection: Connection) -> None:
    seconds = patience.seconds_left(_SECONDS_TO_WAIT_FOR_A_LOCK)
    connection.exec_driver_sql(f"PRAGMA busy_timeout={seconds * 1000:.0f}").close()
    read_only = connection.get_execution_options().get("read_only", False)
    connection.exec_driver_sql("BEGIN" if read_only else "BEGIN IMMEDIATE")


def _begin_postgresql(connection: Connection) -> None:
    seconds = patience.seconds_left(_SECONDS_OF_A_STATEMENT)
    if seconds < _SECONDS_OF_A_STATEMENT:
        connection.exec_driver_sql(f"SET LOCAL statement_timeout = '{seconds * 1000:.0f}ms'")


def _create_or_check(database: Database) -> None:
    with database.writing() as connection:
        database.alone(connection, CREATING)
        if not inspect(connection).has_table(VERSION.name):
            _metadata.create_all(connection)
            connection.execute(VERSION.insert().values(version=SCHEMA_VERSION, store_id=secrets.token_hex(16)))
            connection.execute(CLOCK.insert().values(id=1, seconds=0.0))
            return
        version = connection.execute(select(VERSION.c.version)).scalar_one()
        if version != SCHEMA_VERSION:
            raise UserError(
                f"the job store has schema {version}, and this megadit knows {SCHEMA_VERSION}: use the version that "
                "wrote it, or start a new store"
            )
