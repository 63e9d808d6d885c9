import re

import pytest

from autotune.monitors import logs


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("HF_TOKEN=abc", "HF_TOKEN=***"),
        ('{"api_key": "abc", "lr": 0.1}', '{"api_key": "***", "lr": 0.1}'),
        ("aws_secret_access_key = AB/CD+EF", "aws_secret_access_key = ***"),
        ("clientSecret: xyz", "clientSecret: ***"),
        ("password='hunter2'", "password='***'"),
        ("--password hunter2 --epochs 3", "--password *** --epochs 3"),
        ("--api-key=hunter2", "--api-key=***"),
        ("Authorization: Bearer abcdefghijklmnop", "Authorization: ***"),
        ("https://me:pass@host/x?token=abc&n=1", "https://***@host/x?token=***&n=1"),
        ("postgresql+psycopg2://user:p%40ss@db:5432/x", "postgresql+psycopg2://***@db:5432/x"),
        ("using hf_abcdefghijklmnopqrst now", "using *** now"),
        ("key=abc", "key=***"),
    ],
)
def test_secrets_are_masked(text, masked):
    assert logs.mask(text) == masked


@pytest.mark.parametrize(
    "text",
    [
        "KeyError: 'batch'",
        "Missing key: conv1.weight",
        "tokens_per_s=1234 num_tokens: 5",
        "tokenizer=bert",
        "ValueError: expected 3 channels, got 4",
        "mail someone@example.org, see https://example.org/a",
        "monkey=1 keyboard=2",
        "--key-frames --token",
    ],
)
def test_what_only_resembles_a_secret_stays(text):
    assert logs.mask(text) == text


def test_given_secrets_are_masked_wherever_they_stand():
    secrets = logs.secrets_in({"WANDB_API_KEY": "0123456789", "HOME": "/root/home", "USE_TOKEN": "1"})
    assert secrets == ["0123456789"]
    assert logs.mask("login with 0123456789 done, 1 try", secrets) == "login with *** done, 1 try"


def test_masking_a_long_line_takes_no_quadratic_time():
    assert logs.mask("a" * 200_000) == "a" * 200_000
    assert logs.mask("a:" * 50_000).startswith("a:")


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


def test_a_program_that_appends_goes_on_behind_what_was_kept(flooded):
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
