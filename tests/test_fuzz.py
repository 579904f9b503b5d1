"""Readers of bytes that somebody else wrote: whatever these are, they are refused in words or read right.

`scripts/fuzz MINUTES` looks for longer; what it finds is kept in `data/fuzz/` and runs here ever after.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz_targets import CORPUS, TARGETS, Target, inputs

each_target = pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)


@each_target
def test_what_was_kept_is_read_or_refused(target: Target) -> None:
    for data in target.corpus():
        target.run(data)


@each_target
@settings(max_examples=100)
@given(data=st.data())
def test_anything_is_read_or_refused(target: Target, data: st.DataObject) -> None:
    target.run(data.draw(inputs(target)))


def test_everything_that_is_kept_has_a_target() -> None:
    assert {path.name for path in CORPUS.iterdir()} <= {target.name for target in TARGETS}
