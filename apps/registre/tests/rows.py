"""Rows for the tests of registre."""

from __future__ import annotations

from typing import Any

from databases import Db


def documents(db: Db, n: int = 1, **columns: Any) -> list[int]:
    """Documents that wait for their extraction."""
    given = {"document_number": lambda i: f"1 {i:03d} 001", "document_type": "actes", "circonscription": "Montréal"}
    return db.populate("extraction_queue", n, given | {"cadastre": "Cadastre du Québec"} | columns)


def sessions(db: Db, n: int = 1, **columns: Any) -> list[Any]:
    """Search sessions that wait for their company search."""
    return db.populate("search_sessions", n, {"company_name": lambda i: f"Boulangerie {i}"} | columns)


def searches(db: Db, n: int = 1, **columns: Any) -> list[Any]:
    """Movable-rights searches of one session, which is past its company search."""
    if "search_session_id" not in columns:
        columns["search_session_id"] = sessions(db, status="pending_name_selection", req_completed=True)[0]
    return db.populate("rdprm_searches", n, {"search_name": lambda i: f"Menuiserie {i}"} | columns)
