"""The mutations of ``make mutations`` still fit the source they take something out of."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutations import MUTATIONS, ROOT, Mutation, chosen, copied


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copied(tmp_path_factory.mktemp("mutated"))


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_every_mutation_fits_its_source_exactly_once(mutation: Mutation, package: Path) -> None:
    """Issue, mutations: one that fits no longer shows nothing, and says so here."""
    kept = (package / mutation.file).read_text()
    mutation.apply(package)
    changed, _ = (package / mutation.file).read_text(), (package / mutation.file).write_text(kept)
    assert changed != kept
    for test in mutation.tests:
        path, _, name = test.partition("::")
        assert f"def {name.partition('[')[0]}" in (ROOT / path).read_text()


def test_a_mutation_that_does_not_fit_is_told_loudly(package: Path) -> None:
    with pytest.raises(SystemExit, match="stands 0 times"):
        Mutation("gone", "store/lane/claim.py", (("no such text", ""),), ()).apply(package)
    with pytest.raises(SystemExit, match="no mutation"):
        chosen(["nothing like it"])
