"""Views by key and by image: both orders always have the same."""

from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.encoder.cache.tiers import ViewIndex


class Entry(NamedTuple):
    content: bytes
    number: int


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.booleans(), st.binary(max_size=1), st.binary(max_size=1)), max_size=40))
def test_the_index_finds_what_a_plain_dict_finds(moves: list[tuple[bool, bytes, bytes]]) -> None:
    index: ViewIndex[Entry] = ViewIndex({b"first": Entry(b"p", -1)})
    plain = {b"first": Entry(b"p", -1)}
    for number, (adds, key, content) in enumerate(moves):
        if adds:
            index[key] = Entry(content, number)
            plain[key] = Entry(content, number)
        else:
            assert index.pop(key, None) == plain.pop(key, None)
        index.check()
        assert dict(index.items()) == plain
        assert (len(index), {*index}) == (len(plain), {*plain})
        assert {*index.of(content)} == {key for key, entry in plain.items() if entry.content == content}
