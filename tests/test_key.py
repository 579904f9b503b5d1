"""Keys name what was compiled: they must not depend on anything else, and must depend on all of it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachemgr.errors import UsageError
from cachemgr.key import Factor, Relations, broken, compare, derive, folder, from_folder, is_key, misplaced, sight

GOLDEN = Path(__file__).parent / "data" / "keys.json"
ROLES = ("guard", "match", "blind")

texts = st.text(st.characters(codec="utf-8"), max_size=8)
factors = st.builds(Factor, name=texts, value=texts | st.none(), role=st.sampled_from(ROLES))
factor_sets = st.lists(factors, max_size=6, unique_by=lambda factor: factor.name)
some_factors = st.lists(factors, min_size=1, max_size=6, unique_by=lambda factor: factor.name)


def known_guards(found: list[Factor]) -> list[Factor]:
    return [Factor(factor.name, factor.value or "", factor.role) for factor in found]


@pytest.mark.parametrize("case", json.loads(GOLDEN.read_text()), ids=lambda case: case["title"])
def test_keys_of_released_factor_sets_never_change(case: dict[str, object]) -> None:
    rows = case["factors"]
    assert isinstance(rows, list)
    assert derive(Factor(*row) for row in rows) == case["key"]


@given(some_factors, st.randoms())
def test_the_order_of_factors_does_not_matter(found: list[Factor], random: object) -> None:
    shuffled = list(found)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert derive(shuffled) == derive(found)


@given(some_factors, texts)
def test_every_value_matters(found: list[Factor], value: str) -> None:
    for at, factor in enumerate(found):
        changed = [*found[:at], Factor(factor.name, value, factor.role), *found[at + 1 :]]
        assert (derive(changed) == derive(found)) == (factor.value == value)


@given(some_factors, texts)
def test_every_name_matters(found: list[Factor], name: str) -> None:
    for at, factor in enumerate(found):
        if name not in {other.name for other in found}:
            changed = [*found[:at], Factor(name, factor.value, factor.role), *found[at + 1 :]]
            assert derive(changed) != derive(found)


@given(some_factors)
def test_leaving_a_factor_out_matters(found: list[Factor]) -> None:
    for at in range(len(found)):
        assert derive(found[:at] + found[at + 1 :]) != derive(found)


@given(factor_sets, st.sampled_from(ROLES))
def test_the_role_is_not_in_the_key(found: list[Factor], role: str) -> None:
    assert derive(Factor(factor.name, factor.value, role) for factor in found) == derive(found)  # type: ignore[arg-type]


def test_an_unknown_value_is_not_the_word_that_would_spell_it() -> None:
    assert len({derive([Factor("cuda", value, "guard")]) for value in (None, "", "null", "None")}) == 4


def test_a_factor_given_twice_is_refused() -> None:
    with pytest.raises(UsageError, match="`torch` is given twice"):
        derive([Factor("torch", "1", "guard"), Factor("torch", "1", "guard")])


def test_keys_are_the_same_in_every_process() -> None:
    code = "from cachemgr.key import Factor, derive; print(derive({Factor(c, c, 'match') for c in 'abcdefgh'}))"
    keys = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("0", "1", "12345")
    }
    assert len(keys) == 1
    assert is_key(keys.pop())


@given(factor_sets)
def test_a_key_survives_being_a_file_name(found: list[Factor]) -> None:
    key = derive(found)
    assert ":" not in folder(key)
    assert from_folder(folder(key)) == key


@pytest.mark.parametrize("name", ["", "k1-", "k1-" + "0" * 31, "k1-" + "G" * 32, "k2-" + "0" * 32, "layers"])
def test_other_file_names_are_no_keys(name: str) -> None:
    assert from_folder(name) is None


@given(factor_sets, factor_sets)
def test_exact_means_that_nothing_differs(wanted: list[Factor], stored: list[Factor]) -> None:
    comparison = compare(wanted, stored)
    assert (comparison.result == "exact") == (comparison.differs == ())
    if comparison.result == "exact":
        assert derive(wanted) == derive(stored)


@given(factor_sets)
def test_known_factors_are_exactly_themselves(found: list[Factor]) -> None:
    known = known_guards(found)
    assert compare(known, list(reversed(known))).result == "exact"


@given(some_factors, st.data())
def test_differences_name_exactly_the_factors_that_differ(found: list[Factor], data: st.DataObject) -> None:
    wanted = known_guards(found)
    changed = data.draw(st.sets(st.sampled_from(wanted)))
    stored = [Factor(f.name, f.value + "!", f.role) if f in changed and f.value is not None else f for f in wanted]
    comparison = compare(wanted, stored)
    assert {(d.factor, d.role) for d in comparison.differs} == {(f.name, f.role) for f in changed}
    assert all(d.stored == f"{d.wanted}!" for d in comparison.differs)
    assert comparison.blind_equal == all(factor.role != "blind" for factor in changed)
    roles = {factor.role for factor in changed}
    assert comparison.result == ("none" if "guard" in roles else "near" if roles else "exact")


@given(some_factors)
def test_a_missing_factor_is_a_difference_on_either_side(found: list[Factor]) -> None:
    assert {d.factor for d in compare(found, []).differs} == {factor.name for factor in found}
    assert {d.factor for d in compare([], found).differs} == {factor.name for factor in found}


def test_an_unknown_guard_equals_nothing_not_even_itself() -> None:
    unknown = [Factor("device.name", None, "guard")]
    assert compare(unknown, unknown).result == "none"
    assert compare(unknown, [Factor("device.name", "H200", "guard")]).result == "none"


def test_an_unknown_match_equals_another_unknown() -> None:
    unknown = [Factor("cpu.threads", None, "match")]
    assert compare(unknown, unknown).result == "exact"


def test_of_two_roles_the_stricter_counts() -> None:
    comparison = compare([Factor("x", "1", "match")], [Factor("x", "2", "guard")])
    assert (comparison.result, comparison.differs[0].role) == ("none", "guard")


def test_guards_are_told_first() -> None:
    wanted = [Factor("a", "1", "match"), Factor("b", "1", "blind"), Factor("c", "1", "guard")]
    assert [difference.factor for difference in compare(wanted, []).differs] == ["c", "b", "a"]


@pytest.mark.parametrize(
    ("recorded", "host", "names"),
    [
        (Relations(), Relations(), []),
        (Relations(cpu_features=("avx", "avx2")), Relations(cpu_features=("avx", "avx2", "avx512f")), []),
        (Relations(cpu_features=("avx2", "avx512f")), Relations(cpu_features=("avx2",)), ["cpu_features"]),
        (Relations(cpu_features=("avx2",)), Relations(), ["cpu_features"]),
        (Relations(cuda_runtime="12.8"), Relations(driver_cuda="13.0"), []),
        (Relations(cuda_runtime="12.10"), Relations(driver_cuda="12.9"), ["cuda_runtime"]),
        (Relations(cuda_runtime="12.8"), Relations(), ["cuda_runtime"]),
        (Relations(driver_cuda="13.0"), Relations(), []),
    ],
)
def test_relations_hold_where_the_host_offers_what_is_needed(
    recorded: Relations, host: Relations, names: list[str]
) -> None:
    assert [relation.relation for relation in broken(recorded, host)] == names


@pytest.mark.parametrize(
    ("recorded", "host", "names"),
    [
        ({}, {}, []),
        ({"rank_0_0": 0}, {"rank_0_0": 0, "rank_1_0": 1}, []),
        ({"rank_0_0": 0, "rank_1_0": 1}, {"rank_0_0": 0, "rank_1_0": 2}, ["device ordinal of rank_1_0"]),
        ({"rank_8_0": 0}, {"rank_0_0": 0}, []),
        ({"rank_0_0": 0}, {}, ["device ordinals"]),
        ({}, {"rank_0_0": 0}, ["device ordinals"]),
    ],
)
def test_a_rank_must_sit_on_the_device_ordinal_it_was_compiled_for(
    recorded: dict[str, int], host: dict[str, int], names: list[str]
) -> None:
    found = misplaced(Relations(ordinals=recorded), Relations(ordinals=host))
    assert [relation.relation for relation in found] == names


def test_sight_is_what_the_engine_cannot_see() -> None:
    factors = [Factor("torch", "2.13", "guard"), Factor("tokens", "3", "blind"), Factor("length", "1", "match")]
    assert sight(factors) == sight([*factors[:2], Factor("length", "2", "match")])
    assert sight(factors) != sight([factors[0], Factor("tokens", "5", "blind"), factors[2]])
    assert sight(factors) != sight([Factor("torch", "2.14", "guard"), *factors[1:]])


def test_an_unknown_guard_has_no_sight_to_share() -> None:
    assert sight([Factor("torch", None, "guard")]) == ""
