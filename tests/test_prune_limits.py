"""Which things have to go: every limit alone, mixes, what is shared, and what is kept."""

import pytest

from cachemgr.prune.limits import Choice, Item, Limits, Part, choose, ranks

DAY = 86400.0
NOW = 1000 * DAY
MB = 1_000_000


def item(
    name: str, *, age: float, used: float, size: int = 10, shared: str = "", group: str = "m", kept: str = ""
) -> Item:
    """A thing that was made and used so many days ago, of so many MB; half of it may be shared with others."""
    parts = [Part(name, size * MB, 1)]
    if shared:
        parts = [Part(name, size * MB // 2, 1), Part(shared, size * MB // 2, 1)]
    return Item(name, group, NOW - age * DAY, NOW - used * DAY, tuple(parts), kept)


FOUR = [
    item("a", age=40, used=1),
    item("b", age=30, used=20),
    item("c", age=20, used=10, group="n"),
    item("d", age=10, used=10.5),
]


def chosen(items: list[Item], limits: Limits, *, free: int = 0) -> Choice:
    return choose(items, limits, now=NOW, free=free)


def names(choice: Choice) -> str:
    return "".join(goner.name for goner in choice.goners)


@pytest.mark.parametrize(
    ("limits", "gone"),
    [
        (Limits(), ""),
        (Limits(max_size=40 * MB), ""),
        (Limits(max_size=40 * MB - 1), "b"),
        (Limits(max_size=20 * MB), "bd"),
        (Limits(max_size=0), "bdca"),
        (Limits(max_files=3), "b"),
        (Limits(min_free=15 * MB), "b"),
        (Limits(min_free=5 * MB), ""),
        (Limits(older_than=25 * DAY), "ba"),
        (Limits(unused_for=10.2 * DAY), "bd"),
        (Limits(keep_last=1), "bd"),
        (Limits(keep_last=2), "b"),
        (Limits(keep_last=3), ""),
        (Limits(keep_last=2, max_size=10 * MB), "bdc"),
        (Limits(older_than=35 * DAY, max_files=2), "ab"),
        (Limits(unused_for=15 * DAY, older_than=35 * DAY, keep_last=2), "ba"),
    ],
)
def test_the_least_recently_used_go_until_every_limit_holds(limits: Limits, gone: str) -> None:
    assert names(chosen(FOUR, limits, free=10 * MB)) == gone


def test_what_is_shared_is_freed_with_the_last_that_has_it() -> None:
    items = [item("a", age=9, used=9, shared="s"), item("b", age=8, used=8, shared="s"), item("c", age=7, used=7)]
    choice = chosen(items, Limits(max_size=20 * MB))
    assert [(goner.name, goner.bytes, goner.files) for goner in choice.goners] == [("a", 5 * MB, 1)]
    choice = chosen(items, Limits(max_size=19 * MB))
    assert [(goner.name, goner.bytes) for goner in choice.goners] == [("a", 5 * MB), ("b", 10 * MB)]
    assert sum(goner.bytes for goner in choice.goners) == 15 * MB, "bytes counted are bytes freed"


def test_what_is_kept_stays_and_an_unreachable_limit_is_said() -> None:
    items = [item("a", age=9, used=9, kept="pinned"), item("b", age=8, used=8), item("c", age=7, used=7, kept="used")]
    choice = chosen(items, Limits(max_size=15 * MB))
    assert names(choice) == "b"
    assert [(kept.name, kept.kept) for kept in choice.kept] == [("a", "pinned"), ("c", "used")]
    assert choice.notes == ("20.0 MB are more than 15.0 MB, and what is left is kept",)


def test_what_a_limit_does_not_ask_for_is_not_said_to_be_kept() -> None:
    items = [item("a", age=9, used=9, kept="pinned"), item("b", age=3, used=3, kept="pinned")]
    choice = chosen(items, Limits(older_than=5 * DAY))
    assert [kept.name for kept in choice.kept] == ["a"]
    assert choice.notes == ()


def test_what_is_unfit_goes_whatever_the_limits_say() -> None:
    items = [Item("z", "m", NOW, NOW, (Part("z", MB, 1),), unfit="too old a torch"), FOUR[0]]
    (goner,) = chosen(items, Limits()).goners
    assert (goner.name, goner.why) == ("z", "too old a torch")


def test_ranks_count_those_of_the_same_model_and_device_that_were_used_later() -> None:
    assert ranks(FOUR) == {"a": 0, "d": 1, "b": 2, "c": 0}
