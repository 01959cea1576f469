"""The local booster: what it mends, what it leaves alone, what it finds."""

from __future__ import annotations

import pytest

from apps.ocr.cleaner import accented, clean, found_in, joined, mended
from apps.ocr.lexicon import ACCENTED, plain


@pytest.mark.parametrize(
    ("block", "paragraph"),
    [
        ("le proprié-\ntaire du lot", "le propriétaire du lot"),
        ("de celles-\nci et de\nmême", "de celles-ci et de même"),
        ("à Trois-\nRivières", "à Trois-Rivières"),
        ("la sous-\nlocation", "la sous-location"),
        ("l'inscrip-\ntion et l'arrière-\nplan", "l'inscription et l'arrière-plan"),
        ("Vente -\nZoé Côté -\n24 680", "Vente - Zoé Côté - 24 680"),
        ("  deux   espaces \n\tet  un  ", "deux espaces et un"),
    ],
)
def test_lines_become_paragraphs_and_broken_words_are_whole_again(block: str, paragraph: str) -> None:
    """B3, B4: de-hyphenation and line joining, with the hyphens that are a word's own kept."""
    assert joined(block) == paragraph


@pytest.mark.parametrize(
    ("read", "meant"),
    [
        ("Debiteur: Zoe", "Débiteur : Zoe"),
        ("ler aout 1987", "1er août 1987"),
        ("A 10:35 le HYPOTHEQUE .", "A 10:35 le HYPOTHÈQUE."),
        ("il signe, il a marche ou il reside la", "il signe, il a marche ou il reside la"),
    ],
)
def test_what_readers_commonly_miss_is_mended_and_what_is_ambiguous_is_left(read: str, meant: str) -> None:
    """B4: accents by a lexicon of French, only where there is one way to write a word."""
    assert mended(read) == meant


def test_the_lexicon_changes_no_letter_but_accents() -> None:
    """B4: restoring accents is all it does."""
    assert len(ACCENTED) > 200
    assert all(plain(word) == letters for letters, word in ACCENTED.items())
    assert accented("Quebec") == "Québec"
    assert accented("arpenteur-geometre") == "arpenteur-géomètre"


def test_signs_that_a_database_refuses_are_left_out() -> None:
    """B3: a NUL in the text would make PostgreSQL refuse the row."""
    assert clean(["l\u2019acte\x00 no\u00a01\ufb01n"]) == "l'acte no 1fin"


def test_number_date_and_parties_are_found() -> None:
    """B3, B4: the fields of a document."""
    text = clean(
        [
            "ACTE DE VENTE\n\nNuméro d'inscription : 12 345 678\n\nDate de signature : 3 mai 1999",
            "Vendeur : Zoé Côté\n\nAcquereur: Société Hélios inc.\n\nLe 1er juin 1987, le notaire a dit : oui.",
        ]
    )
    assert found_in(text) == {
        "number": "12 345 678",
        "date": "1999-05-03",
        "parties": [{"role": "vendeur", "name": "Zoé Côté"}, {"role": "acquéreur", "name": "Société Hélios inc."}],
    }


def test_a_label_begins_a_paragraph_of_its_own() -> None:
    """B4: a reader that saw no space between lines does not cost a document its parties."""
    text = clean(["Vendeur : Zoé Côté\nAcquéreur : Société\nHélios inc."])
    assert text == "Vendeur : Zoé Côté\nAcquéreur : Société Hélios inc."
    assert [party["name"] for party in found_in(text)["parties"]] == ["Zoé Côté", "Société Hélios inc."]


def test_a_document_that_says_nothing_of_it_has_no_fields() -> None:
    """B4: nothing is made up."""
    assert found_in("Une page sans rien.") == {"parties": []}
