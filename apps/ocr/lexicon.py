"""French as deeds and registers use it: words that are written with accents, and the names of parties and months.

A word is here only if its letters can be accented in one way alone and are no word without: ``a`` and ``à``, ``signe``
and ``signé``, ``règle`` and ``réglé`` are left as they were read.
"""

from __future__ import annotations

import unicodedata

MONTHS = (
    "janvier", "février", "mars", "avril", "mai", "juin",
    "juillet", "août", "septembre", "octobre", "novembre", "décembre",
)  # fmt: skip

#: Who a deed, a plan or a register names, by the label before the name.
PARTIES = (
    "acheteur", "acquéreur", "arpenteur-géomètre", "bailleur", "bénéficiaire", "caution", "cédant", "cessionnaire",
    "comparant", "constituant", "copropriétaire", "créancier", "débiteur", "déclarant", "demandeur", "défendeur",
    "donataire", "donateur", "emprunteur", "héritier", "légataire", "liquidateur", "locataire", "locateur",
    "mandataire", "notaire", "prêteur", "propriétaire", "requérant", "syndicat", "testateur", "titulaire", "vendeur",
)  # fmt: skip

_WORDS = """
    accès acquéreur acquéreurs acquérir adéquat année années antérieur antérieure août après arpenteur-géomètre
    arrière assermentée aussitôt autorité autorités avère bientôt bâtiment bâtiments bénéfice bénéficiaire caractère
    clôture clôtures complètement complémentaire compétence compétent compétente conformément conséquence contiguë
    coopérative coordonnées copropriété créance créancier créanciers créancière cédant célibataire degré dernière
    deuxième différent différente débiteur débiteurs débitrice décembre déclarant déclaration déclarations décret
    décès décédée défaut défense définitif déjà délai délais délivrée département dépôt désignation désignée détenteur
    dûment enregistrée expédition extrême exécution façade façon fenêtre fenêtres foncière frontière février géomètre
    gérant hypothèque hypothèques hypothécaire héritier héritiers immobilière immobilières impôt impôts indivisément
    indéterminé inférieur inférieure intermédiaire intégral intégralement intérêt intérêts kilomètre lisière localité
    légal légale légalement légataire léguer mitoyenneté modalité montréal municipalité mère mètre mètres même
    mêmes naître numérique numéro numéros nécessaire obligée paraît paraître perpétuité personnalité pièce pièces
    première premières privilège procès procédure propriétaire propriétaires propriété propriétés présence présent
    présentation présentes présentée prévu prévue prêteur publicité publiée péremption périmètre période
    qualité quatrième québec québécois reconnaît représentant représentante représentée requérant responsabilité
    rivière rivières règlement règlements réalisation réception réciproque récépissé réfection référence régime région
    régulier régulière rénovation répartition résidant résidence résidentiel résiliation résolution résulte réunion
    saisie-exécution société sociétés solidarité spécial spéciale spécifique supérieur supérieure sécurité séparation
    séparément série sûreté sûretés totalité troisième très trésor tutélaire témoin témoins tôt unanimité utilité
    validité vérification véritable zéro échéance échéances écrit édifice également élément éléments époux
    équipement érigée établie établissement été évaluation êtes être île
"""


def plain(text: str) -> str:
    """Without accents, in lower case."""
    return "".join(c for c in unicodedata.normalize("NFD", text.lower()) if not unicodedata.combining(c))


#: From the letters alone to the word as it is written.
ACCENTED = {plain(word): word for word in _WORDS.split() if plain(word) != word}
PARTY_OF = {plain(name): name for name in PARTIES}
MONTH_OF = {plain(name): number for number, name in enumerate(MONTHS, 1)}
