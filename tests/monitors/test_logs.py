import re

import pytest

from autotune.monitors import logs


def test_tail_starts_at_a_line_and_replaces_invalid_bytes(tmp_path):
    file = tmp_path / "log"
    file.write_bytes(b"first line\n" * 1000 + b"\xff last\n")
    end = logs.tail(file, 100)
    assert end.startswith("first line\n")
    assert end.endswith("\N{REPLACEMENT CHARACTER} last\n")
    assert logs.tail(tmp_path / "absent") == ""


def test_tail_has_no_terminal_control_sequences(tmp_path):
    file = tmp_path / "log"
    file.write_bytes(b"\x1b[1mTraceback\x1b[0m\n 10%\r 20%\n\x1b[35mValueError\x1b[0m: bad\n")
    assert logs.tail(file) == "Traceback\n 10%\n 20%\nValueError: bad\n"


def test_one_endless_line_still_has_a_tail(tmp_path):
    file = tmp_path / "log"
    file.write_text("x" * 50_000)
    assert logs.tail(file, 100) == "x" * 100


@pytest.fixture
def flooded(tmp_path):
    file = tmp_path / "log"
    file.write_bytes(b"the beginning\n" + b"line\n" * (2 * logs.MAX_BYTES // 5) + b"the end\n")
    return file


def test_a_flooded_log_keeps_its_beginning_and_its_end(flooded):
    size_bytes = flooded.stat().st_size
    logs.bound(flooded)
    text = flooded.read_text()
    assert text.startswith("the beginning\nline\n")
    assert text.endswith("line\nthe end\n")
    left_out = int(re.search(r"\n\[autotune: (\d+) bytes left out here\]\n", text)[1])
    assert size_bytes - left_out == len(re.sub(r"\n\[autotune: .*\]\n", "", text))
    assert len(text) < 2 * logs.KEEP_BYTES


@pytest.mark.parametrize("is_copied", [False, True])
def test_no_line_of_a_shortened_log_is_cut_in_two(tmp_path, monkeypatch, is_copied):
    if is_copied:  # as on a file system that cannot take the middle out
        monkeypatch.setattr(logs, "_take_out_middle", lambda *_: False)
    line = b"a line that ends with a secret: " + b"7h1s-1s-s3cr3t" * 5
    file = tmp_path / "log"
    file.write_bytes((line + b"\n") * (logs.MAX_BYTES // len(line)))
    logs.bound(file)
    assert file.stat().st_size < 2 * logs.KEEP_BYTES
    others = [found for found in file.read_bytes().splitlines() if found != line]
    assert all(found.startswith(b"[autotune: ") or not found.strip(b".") for found in others), others


def test_program_can_keep_appending_to_a_log_that_was_shortened(flooded):
    with flooded.open("ab", buffering=0) as out:
        logs.bound(flooded)
        out.write(b"and on\n")
    assert flooded.read_text().endswith("the end\nand on\n")


def test_a_log_of_usual_length_is_left_alone(tmp_path):
    file = tmp_path / "log"
    file.write_bytes(b"\xff" * 1000)
    logs.bound(file)
    assert file.read_bytes() == b"\xff" * 1000
    logs.bound(tmp_path / "absent")
