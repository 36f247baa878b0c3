"""What a guide to webhooks shows: FastAPI, SQLAlchemy and SQLite, one commit a request.

`naive` is how such guides write it: look whether the event is there, then insert it, everything
else as it comes by default. `careful` lets a unique constraint decide, in WAL mode with a full
sync, and rolls back what was there.
"""

import hashlib
import hmac
import json
import sys
import time

import uvicorn
from fastapi import FastAPI, HTTPException, Request
from sqlalchemy import Engine, String, create_engine, event, func, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from tests.bench.events import SECRET

TOLERANCE_S = 86_400


class Base(DeclarativeBase):
    pass


class Event(Base):
    __tablename__ = "events"
    id: Mapped[int] = mapped_column(primary_key=True)
    event_id: Mapped[str] = mapped_column(String(64), index=True)
    type: Mapped[str] = mapped_column(String(64))
    payload: Mapped[str]


class UniqueEvent(Base):
    __tablename__ = "unique_events"
    id: Mapped[int] = mapped_column(primary_key=True)
    event_id: Mapped[str] = mapped_column(String(64), unique=True)
    type: Mapped[str] = mapped_column(String(64))
    payload: Mapped[str]


class Credit(Base):
    __tablename__ = "credits"
    id: Mapped[int] = mapped_column(primary_key=True)
    invoice: Mapped[str] = mapped_column(String(64), unique=True)
    customer: Mapped[str] = mapped_column(String(64))
    amount: Mapped[int]


def verified(header: str, body: bytes) -> dict[str, str]:
    parts = dict(part.split("=", 1) for part in header.split(","))
    content = f"{parts['t']}.".encode() + body
    expected = hmac.new(SECRET.encode(), content, hashlib.sha256).hexdigest()
    late = abs(time.time() - int(parts["t"])) > TOLERANCE_S
    if late or not hmac.compare_digest(expected, parts["v1"]):
        raise HTTPException(status_code=401)
    found: dict[str, str] = json.loads(body)
    return found


def naive(engine: Engine, found: dict[str, str], body: bytes) -> None:
    with Session(engine) as session:
        known = session.scalar(select(Event).where(Event.event_id == found["id"]))
        if known is not None:
            return
        session.add(Event(event_id=found["id"], type=found["type"], payload=body.decode()))
        session.add(credit_of(found))
        session.commit()


def careful(engine: Engine, found: dict[str, str], body: bytes) -> None:
    with Session(engine) as session:
        session.add(UniqueEvent(event_id=found["id"], type=found["type"], payload=body.decode()))
        session.add(credit_of(found))
        try:
            session.commit()
        except IntegrityError:
            session.rollback()


def credit_of(found: dict[str, str]) -> Credit:
    invoice = found["data"]["object"]  # type: ignore[index]  # it is parsed JSON
    return Credit(invoice=invoice["id"], customer=invoice["customer"], amount=100)  # type: ignore[index]


def application(engine: Engine, kind: str) -> FastAPI:
    app = FastAPI()
    store = {"naive": naive, "careful": careful}[kind]

    @app.post("/webhooks/stripe")
    async def receive(request: Request) -> dict[str, bool]:
        body = await request.body()
        found = verified(request.headers["stripe-signature"], body)
        store(engine, found, body)
        return {"received": True}

    @app.get("/events")
    def events() -> int:
        with Session(engine) as session:
            table = {"naive": Event, "careful": UniqueEvent}[kind]
            return session.scalar(select(func.count()).select_from(table)) or 0

    return app


def open_file(path: str, kind: str) -> Engine:
    engine = create_engine(f"sqlite:///{path}", connect_args={"check_same_thread": False})
    if kind == "careful":

        @event.listens_for(engine, "connect")
        def set_up(connection, record) -> None:  # type: ignore[no-untyped-def]
            connection.execute("pragma journal_mode = wal")
            connection.execute("pragma synchronous = full")
            connection.execute("pragma busy_timeout = 5000")

    Base.metadata.create_all(engine)
    return engine


if __name__ == "__main__":
    kind, path, port = sys.argv[1:]
    uvicorn.run(
        application(open_file(path, kind), kind),
        port=int(port),
        log_level="warning",
        access_log=False,
    )
