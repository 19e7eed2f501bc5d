"""The longest known beginning of a body is found, with what its items were read to."""

from __future__ import annotations

import json
from typing import Any

from stenograph.dialects.prefixes import NUM_ENDS, Begun, Made, Prefixes

HEAD = '{"model": "m", "messages": ['


def body(*texts: str, head: str = HEAD) -> bytes:
    return f"{head}{', '.join(json.dumps({'text': text}) for text in texts)}]}}".encode()


def items(begun: Begun) -> tuple[Any, ...]:
    """What is known of the list, as it was built."""
    known = (*(begun.made.built or ()), *begun.made.then)
    assert len(known) == begun.made.num_items
    return known


def read(prefixes: Prefixes, *texts: str) -> tuple[Any, ...]:
    """What is known of the body of `texts`; all of it is known from then on."""
    written = body(*texts)
    begun = prefixes.find(written)
    begins = [i for i in range(len(written)) if written[i:].startswith(b'{"text"')]
    ends = [end for end in begins[1:][-NUM_ENDS:] if end > begun.end]
    known = items(begun)
    built = (*known, *texts[len(known) :])
    at = len(texts) - len(ends)
    prefixes.keep(written, begun, begins[0], ends, Made(len(texts), built[:at], built[at:]))
    return known


def texts(num: int, of: str = "a") -> list[str]:
    return [f"{of}{i}" for i in range(num)]


def test_a_list_that_was_added_to_is_known_up_to_its_last_item() -> None:
    prefixes = Prefixes()
    first = texts(20)
    assert read(prefixes, *first) == ()
    again = read(prefixes, *texts(22))
    assert len(again) == 19
    assert all(one is other for one, other in zip(again, first, strict=False))
    assert read(prefixes, *texts(24)) == tuple(texts(21))


def test_the_body_less_what_is_known_is_the_rest_of_it() -> None:
    prefixes, whole = Prefixes(), body("a", "b", "c", "d")
    read(prefixes, "a", "b", "c")
    begun = prefixes.find(whole)
    assert items(begun) == ("a", "b")
    assert whole[: begun.start] + whole[begun.end :] == body("c", "d")


def test_what_stands_before_a_change_among_the_last_items_is_known() -> None:
    for num_changed in range(1, NUM_ENDS):
        prefixes = Prefixes()
        read(prefixes, *texts(20))
        assert len(read(prefixes, *texts(20 - num_changed), *texts(4, "b"))) == 20 - num_changed


def test_a_change_far_before_leaves_nothing_known() -> None:
    prefixes = Prefixes()
    read(prefixes, *texts(20))
    assert items(prefixes.find(body("b0", *texts(20)[1:]))) == ()
    assert items(prefixes.find(body(*texts(20), head=HEAD.replace('"m"', '"n"')))) == ()


def test_a_list_that_was_cut_short_is_known_by_what_came_before() -> None:
    prefixes = Prefixes()
    for num in range(3, 21):
        read(prefixes, *texts(num))
    assert items(prefixes.find(body(*texts(12), "b"))) == tuple(texts(12))
    assert items(prefixes.find(body(*texts(12)))) == tuple(texts(11))


def test_conversations_that_go_on_by_turns_are_each_known() -> None:
    prefixes, names = Prefixes(), "abcdefgh"
    for num in (3, 5, 7, 9):
        for name in names:
            known = read(prefixes, *texts(num, name))
            assert num == 3 or known == tuple(texts(num - 3, name))


def test_what_came_long_ago_is_forgotten() -> None:
    prefixes = Prefixes()
    read(prefixes, *texts(4, "old"))
    for i in range(30):
        read(prefixes, *texts(4, f"{i} "))
    assert items(prefixes.find(body(*texts(4, "old")))) == ()
    assert items(prefixes.find(body(*texts(4, "29 ")))) == tuple(texts(3, "29 "))


def test_what_is_gone_on_with_stays_known() -> None:
    prefixes = Prefixes()
    read(prefixes, *texts(4))
    for i in range(60):
        read(prefixes, *texts(4, f"{i} "))
        assert items(prefixes.find(body(*texts(4)))) == tuple(texts(3))
