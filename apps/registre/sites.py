"""The three sites: their addresses and what is where on their pages. A site that has changed is changed here.

Paths are below the address in the settings. Selectors are Playwright's: CSS, ``text=...``, ``role=...``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Site:
    """One site as an operator knows it."""

    name: str
    #: Of its settings: ``{prefix}_URL``, and with a login ``{prefix}_USER`` and ``{prefix}_PASSWORD``.
    prefix: str
    paths: Mapping[str, str]
    selectors: Mapping[str, str]
    #: Where its login page is; empty where there is none.
    login: str = ""


@dataclass(frozen=True)
class Search:
    """A search page of the land registry: its path, and which column goes into which field."""

    path: str
    fields: Mapping[str, str] = field(default_factory=dict)


_LOGIN = {
    "login_form": "#connexion",
    "login_user": "#code-utilisateur",
    "login_password": "#mot-de-passe",
    "login_submit": "#ouvrir-session",
    "login_error": ".message-erreur",
}

LAND = Site(
    name="the land registry",
    prefix="LAND_REGISTRY",
    login="/foncier/connexion",
    paths={
        "home": "/foncier/accueil",
        "actes": "/foncier/recherche/actes",
        "plans_cadastraux": "/foncier/recherche/plans_cadastraux",
        "index": "/foncier/recherche/index",
    },
    selectors=_LOGIN
    | {
        "number": "#numero",
        "circonscription": "#circonscription",
        "cadastre": "#cadastre",
        "search": "#rechercher",
        "refusal": ".message-refus",
        "download": "#telecharger",
        "home": "#consulter",
    },
)

#: ``document_type`` -> its search. What is none of them is searched as ``index``.
SEARCHES = {
    "actes": Search("actes", {"circonscription": "circonscription", "number": "document_number"}),
    "plans_cadastraux": Search(
        "plans_cadastraux",
        {"circonscription": "circonscription", "cadastre": "cadastre", "number": "document_number"},
    ),
    "index": Search(
        "index", {"circonscription": "circonscription", "cadastre": "cadastre", "number": "document_number"}
    ),
}

COMPANIES = Site(
    name="the company register",
    prefix="COMPANY_REGISTER",
    paths={"search": "/req/recherche"},
    selectors={
        "name": "#nom",
        "terms": "#conditions",
        "search": "#rechercher",
        "results": "#resultats",
        "company": ".entreprise a",
        "identification": "#identification",
        "neq": "#identification .neq",
        "company_name": "#identification .nom",
        "status": "#identification .statut",
        "address": "#identification .adresse",
        "registered_on": "#identification .date",
        "other_name": "#noms tr.nom",
        "other_name_value": ".valeur",
        "other_name_kind": ".nature",
    },
)

RIGHTS = Site(
    name="the movable-rights register",
    prefix="RIGHTS_REGISTER",
    login="/rdprm/connexion",
    paths={"search": "/rdprm/recherche"},
    selectors=_LOGIN
    | {
        "name": "#nom",
        "search": "#rechercher",
        "results": "#resultats",
        "inscription": "#resultats tr.inscription",
        "number": ".numero",
        "nature": ".nature",
        "registered_on": ".date",
        "debtor": ".debiteur",
        "creditor": ".creancier",
        "amount": ".montant",
        "next": "#suivant",
        "home": "#recherche",
    },
)
