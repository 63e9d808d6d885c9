from autotune.monitors import logs


def test_the_tail_starts_at_a_line_and_survives_bytes(tmp_path):
    file = tmp_path / "log"
    file.write_bytes(b"first line\n" * 1000 + b"\xff last\n")
    end = logs.tail(file, 100)
    assert end.startswith("first line\n")
    assert end.endswith("\N{REPLACEMENT CHARACTER} last\n")
    assert logs.tail(tmp_path / "absent") == ""


def test_one_endless_line_still_has_a_tail(tmp_path):
    file = tmp_path / "log"
    file.write_text("x" * 50_000)
    assert logs.tail(file, 100) == "x" * 100


def test_a_flooded_log_keeps_its_end(tmp_path):
    file = tmp_path / "log"
    file.write_text("line\n" * 10_000 + "the end\n")
    logs.shorten(file, keep_bytes=1000)
    text = file.read_text()
    assert text.endswith("the end\n")
    assert "only the last" in text
    assert len(text) < 1200
