"""Turns output that was written for a terminal into plain text."""

import pytest

from autotune.plain_text import plain, shortened


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("two options, \x1b[1mdo those\x1b[0m. ", "two options, do those. "),
        ("\x1b[1;38;5;196mValueError\x1b[0m: \x1b[35mbad\x1b[m", "ValueError: bad"),
        ("\x1b]8;;file:///x\x1b\\train.py\x1b]8;;\x1b\\ \x1b]0;title\x07done", "train.py done"),
        ("\x1b[2K\x1b[1A 50%\r100%\r\ndone\x1b(B\x1b7", " 50%\n100%\ndone"),
        ("cut in the middle of a colour \x1b[1;3", "cut in the middle of a colour "),
        ("a\x00b\x07c\x08d\te\nf", "abcd\te\nf"),
        ("\x9b1mbold\x9b0m and \x85", "bold and "),
        ("[1m stays where it was typed", "[1m stays where it was typed"),
    ],
)
def test_escape_sequences_are_removed(text, expected):
    assert plain(text) == expected


def test_shortened_text_ends_after_a_sentence_if_it_fills_half_of_the_limit():
    assert shortened("First one is so long. Second one is cut somewhere", 40) == "First one is so long. …"
    assert shortened("Oh. A sentence that goes on and on and on", 30) == "Oh. A sentence that goes on…"


def test_shortened_text_ends_between_words_and_stays_within_the_limit():
    text = " ".join(["word"] * 100)
    for most in range(20, 60):
        cut = shortened(text, most)
        assert len(cut) <= most
        assert set(cut.removesuffix("…").split()) == {"word"}


def test_a_single_long_word_is_cut_at_the_limit_and_fitting_text_is_unchanged():
    assert shortened("x" * 100, 10) == "x" * 9 + "…"
    assert shortened("x" * 10, 10) == "x" * 10
