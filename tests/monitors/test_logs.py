import json
import os

from autotune.masking import Secrets
from autotune.monitors import logs

SECRETS = Secrets(["0123456789abc"])


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


def trial(tmp_path, **files):
    folder = tmp_path / "trials" / "0000"
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_bytes(content)
    return folder


def test_sealing_takes_secrets_out_of_logs_byte_by_byte_otherwise(tmp_path):
    folder = trial(tmp_path, stdout__log=b"\xff\r\nlogin 0123456789abc\n", stderr__log=b"plain \xe2\x82\xac\n")
    untouched = (folder / "stderr.log").stat().st_ino
    logs.seal(folder, SECRETS)
    assert (folder / "stdout.log").read_bytes() == b"\xff\r\nlogin ***\n"
    assert (folder / "stderr.log").stat().st_ino == untouched, "a log without secrets is not written again"
    logs.seal(folder, SECRETS)
    assert sorted(os.listdir(folder)) == ["stderr.log", "stdout.log"]


def test_sealing_keeps_a_result_a_document(tmp_path):
    document = {"error": {"message": "bad 0123456789abc", "api_key": "x"}, "steps": [1.5], "status": "failed", "count": None}
    folder = trial(tmp_path, **{"result.rank0.json": json.dumps(document).encode()})
    logs.seal(folder, SECRETS)
    assert json.loads((folder / "result.rank0.json").read_text()) == {
        **document,
        "error": {"message": "bad ***", "api_key": "***"},
    }


def test_sealing_masks_a_result_that_a_program_has_overwritten(tmp_path):
    folder = trial(tmp_path, **{"result.rank0.json": b"{ token: 0123456789abc"})
    logs.seal(folder, SECRETS)
    assert (folder / "result.rank0.json").read_text() == "{ token: ***"


def test_sealing_removes_half_written_results_and_the_scratch_folder(tmp_path):
    folder = trial(tmp_path, **{"result.rank0.json.77.tmp": b'{"error": "0123456789abc'})
    (folder / "scratch" / "wandb").mkdir(parents=True)
    (folder / "scratch" / "wandb" / "run").write_text("0123456789abc")
    logs.seal(folder, SECRETS)
    assert not list(folder.iterdir())


def test_leftovers_are_sealed_and_finished_trials_are_not_touched_again(tmp_path):
    folder = trial(tmp_path, stdout__log=b"0123456789abc")
    logs.seal_leftovers(tmp_path / "trials", SECRETS)
    assert (folder / "stdout.log").read_bytes() == b"***"
    (folder / "trial.json").write_text("{}")
    (folder / "stdout.log").write_bytes(b"0123456789abc")
    logs.seal_leftovers(tmp_path / "trials", SECRETS)
    assert (folder / "stdout.log").read_bytes() == b"0123456789abc"
