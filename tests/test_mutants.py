"""The faults of `mutants.py` stand where it says, and name tests that are there."""

import pytest
from mutants import MUTANTS, ROOT


@pytest.mark.parametrize(
    "mutant", MUTANTS, ids=[f"{n}-{one.place}" for n, one in enumerate(MUTANTS)]
)
def test_a_fault_can_be_brought_back(mutant):
    source = (ROOT / mutant.path).read_text()
    assert mutant.apply(source) != source
    compile(mutant.apply(source), str(mutant.path), "exec")
    assert all((ROOT / path).exists() for path in mutant.tests.split())
