"""What the documents of the stand-in's land registry say. ``BREAK`` is where a word may be broken in print."""

from __future__ import annotations

import random

BREAK = "|"
MONTHS = [
    "janvier",
    "février",
    "mars",
    "avril",
    "mai",
    "juin",
    "juillet",
    "août",
    "septembre",
    "octobre",
    "novembre",
    "décembre",
]
FIRST = [
    "Hélène",
    "François",
    "Zoé",
    "Jérôme",
    "Anaïs",
    "Benoît",
    "Maëlle",
    "Étienne",
    "Noémie",
    "Rémi",
    "Gisèle",
    "Théo",
    "Chloé",
    "André",
    "Françoise",
]
LAST = [
    "Bélanger",
    "Côté",
    "Lévesque",
    "Gagné",
    "Thériault",
    "Hébert",
    "Desrochers",
    "Beauséjour",
    "Généreux",
    "Fréchette",
    "Laforêt",
    "Prévost",
]
TOWNS = ("Montréal", "Québec", "Trois-Rivières", "Lévis", "Gatineau", "Saint-Jérôme", "Rivière-du-Loup", "Sept-Îles")
STREETS = ("rue de l'Église", "avenue des Érables", "chemin du Côteau", "rang Saint-Édouard", "boulevard Crémazie")
FIRMS = ("Gestion Forêt boréale inc.", "Immeubles Bord-du-Fleuve ltée", "Société foncière Hélios inc.")
NATURES = ("Vente", "Hypothèque", "Donation", "Servitude", "Quittance", "Déclaration de copropriété")

CLAUSES = (
    "Le vendeur déclare qu'il est proprié|taire de l'immeuble, libre de toute prio|rité et de toute hypo|thèque, et"
    " qu'il n'a reçu aucun avis d'une auto|rité compé|tente à l'effet que l'immeuble n'est pas con|forme aux "
    "règle|ments en vigueur.",
    "L'acqué|reur paiera toutes les taxes muni|cipales et sco|laires échues et à échoir, y compris la propor|tion "
    "de celles-ci pour l'année cou|rante à compter de la date des pré|sentes, de même que les droits de mutation "
    "immo|bilière.",
    "La servi|tude de passage est consen|tie à perpé|tuité sur une lisière de ter|rain de six mètres de lar|geur, "
    "située à l'arrière de la propriété, afin de per|mettre l'accès à la rivière et l'entre|tien du fossé.",
    "Le prêteur recon|naît avoir reçu la somme entière et accorde quit|tance complète et finale; il consent à la "
    "radia|tion de l'inscrip|tion de ses droits dans le regis|tre foncier.",
    "Les par|ties déclarent avoir lu le présent acte, en com|prendre la portée et l'accepter sans réserve; elles "
    "dispen|sent le no|taire de leur en faire lecture.",
    "Le cédant a possédé l'immeuble à titre de proprié|taire de façon paisible, conti|nue, publi|que et non "
    "équi|voque pendant plus de dix années, ainsi qu'en témoignent les décla|rations asser|mentées jointes au "
    "dossier.",
    "Le bâtiment érigé sur le lot est couvert d'un toit de tôle; les fenê|tres, le système de chauf|fage et la "
    "clôture demeu|rent à la charge de l'acqué|reur, qui s'en déclare satis|fait après examen.",
)
SURVEYS = (
    "Le lot est borné au nord par le chemin public, à l'est par le ruis|seau, au sud par la forêt et à l'ouest par "
    "le lot voisin; les mesures sont en mètres et suivent le système inter|national.",
    "Les repères anciens ont été retrou|vés à l'endroit indiqué; deux bornes détruites ont été rempla|cées en "
    "présence des proprié|taires conti|gus, dûment convo|qués.",
    "La super|ficie a été calculée d'après les coor|données relevées sur le ter|rain et corri|gée de l'écart de "
    "ferme|ture, qui demeure infé|rieur à la tolé|rance régle|mentaire.",
)


def page_texts(number: str, kind: str, pages: int, chance: random.Random) -> list[list[str]]:
    """The paragraphs of each page, the first of a page being its heading. The first page is a cover: quick to read."""
    body = {"actes": _deed, "plans_cadastraux": _survey, "index": _index}[kind]
    following = [f"Inscription {number}, page {page}" for page in range(2, pages + 1)]
    return [_head(number, kind, chance), *([heading, *body(chance)] for heading in following)]


def _head(number: str, kind: str, chance: random.Random) -> list[str]:
    title = {"actes": "ACTE NOTARIÉ", "plans_cadastraux": "PLAN CADASTRAL", "index": "INDEX DES IMMEUBLES"}[kind]
    return [
        title,
        f"Circonscription foncière : {chance.choice(TOWNS)}",
        f"Numéro d'inscription : {number}",
        f"Date de présentation : {_day(chance)}",
        *_parties(kind, chance),
    ]


def _parties(kind: str, chance: random.Random) -> list[str]:
    if kind == "plans_cadastraux":
        return [f"Arpenteur-géomètre : {_person(chance)}", f"Propriétaire : {_party(chance)}"]
    if kind == "index":
        return [f"Propriétaire : {_party(chance)}"]
    giver, taker = chance.choice((("Vendeur", "Acquéreur"), ("Créancier", "Débiteur"), ("Cédant", "Cessionnaire")))
    return [f"{giver} : {_person(chance)}", f"{taker} : {_party(chance)}"]


def _deed(chance: random.Random) -> list[str]:
    place = f"L'immeuble est situé au {chance.randint(2, 999)}, {chance.choice(STREETS)}, à {chance.choice(TOWNS)}."
    return [place, *chance.sample(CLAUSES, 3)]


def _survey(chance: random.Random) -> list[str]:
    size = f"{chance.randint(300, 9800)},{chance.randint(1, 9)} mètres carrés"
    lot = f"Lot {_lot(chance)} du cadastre du Québec, superficie {size}."
    return [lot, *chance.sample(SURVEYS, 3)]


def _index(chance: random.Random) -> list[str]:
    return [f"Lot {_lot(chance)} du cadastre du Québec", *(_entry(chance) for _ in range(7))]


def _entry(chance: random.Random) -> str:
    return f"{_day(chance)} - {chance.choice(NATURES)} - {_person(chance)} - {chance.randint(10_000_000, 29_999_999)}"


def _lot(chance: random.Random) -> str:
    return f"{chance.randint(1, 6)} {chance.randint(100, 999)} {chance.randint(100, 999)}"


def _day(chance: random.Random) -> str:
    day = chance.randint(1, 28)
    return f"{'1er' if day == 1 else day} {chance.choice(MONTHS)} {chance.randint(1974, 2024)}"


def _person(chance: random.Random) -> str:
    return f"{chance.choice(FIRST)} {chance.choice(LAST)}"


def _party(chance: random.Random) -> str:
    return chance.choice(FIRMS) if chance.random() < 0.4 else _person(chance)
