"""Price points: what a source was found to ask, bid or have sold for, and by what two of them are the same one."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from datetime import date
from typing import Any
from urllib.parse import urlsplit, urlunsplit

PRICE_TYPES = ("sold", "ask", "bid")

#: One statement. What is found twice in one answer counts once, and what is known stays unless this one matches better.
UPSERT = """
insert into price_points (intake_id, source_id, dedupe_key, external_id, url, title, price_cents, price_type,
                          condition, observed_on, match_strength)
select distinct on (p.dedupe_key) i.id, s.id, p.dedupe_key, p.external_id, p.url, p.title, p.price_cents,
       p.price_type, coalesce(p.condition, 'unknown'), p.observed_on, p.match_strength
from coin_intakes i, sources s, jsonb_to_recordset(cast(:points as jsonb)) as
     p(dedupe_key text, external_id text, url text, title text, price_cents bigint, price_type text, condition text,
       observed_on date, match_strength real, place integer)
where i.id = :intake_id and s.id = :source_id  -- so that the keys may be of any type
order by p.dedupe_key, p.match_strength desc, p.place
on conflict (intake_id, source_id, dedupe_key) do update set
  external_id = excluded.external_id, url = excluded.url, title = excluded.title, price_cents = excluded.price_cents,
  price_type = excluded.price_type, condition = excluded.condition, observed_on = excluded.observed_on,
  match_strength = excluded.match_strength, updated_at = now()
where excluded.match_strength > price_points.match_strength
"""


@dataclass(frozen=True)
class Found:
    """One item of a source's answer, before it is held against the coin."""

    title: str
    url: str
    price_cents: int
    price_type: str
    day: date
    condition: str | None = None
    external_id: str | None = None

    @property
    def dedupe_key(self) -> str:
        """The source's own id where it gives one, else a hash over what makes the item this one."""
        if self.external_id:
            return f"ext_{self.external_id}"
        parts = (normal_url(self.url), normal_title(self.title), str(self.price_cents), self.day.isoformat(),
                 self.price_type)  # fmt: skip
        return "hash_" + hashlib.sha256("|".join(parts).encode()).hexdigest()[:16]

    def point(self, match_strength: float, place: int = 0) -> dict[str, Any]:
        """As ``UPSERT`` takes it, inside one JSON document; of two that are the same, the first one's place counts."""
        return {
            "dedupe_key": self.dedupe_key, "external_id": self.external_id, "url": self.url, "title": self.title,
            "price_cents": self.price_cents, "price_type": self.price_type, "condition": self.condition,
            "observed_on": self.day.isoformat(), "match_strength": match_strength, "place": place,
        }  # fmt: skip

    def kept(self) -> dict[str, Any]:
        """As the cache keeps it."""
        return asdict(self) | {"day": self.day.isoformat()}

    @classmethod
    def again(cls, kept: dict[str, Any]) -> Found:
        """From the cache."""
        return cls(**kept | {"day": date.fromisoformat(kept["day"])})


def normal_url(url: str) -> str:
    """Without query and fragment: where the visitor came from is not what is for sale. Host names have no case."""
    parts = urlsplit(url.strip())
    return urlunsplit((parts.scheme.lower(), parts.netloc.lower(), parts.path, "", ""))


def normal_title(title: str) -> str:
    """Lower case, white space folded."""
    return " ".join(title.lower().split())
