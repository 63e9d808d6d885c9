import os
import subprocess
import time

from autotune.launchers import shared_memory


def dead_process():
    with subprocess.Popen(["true"]) as process:
        process.wait()
    return process.pid


def made(folder, name):
    (folder / name).touch()
    return name


def test_segments_that_carry_the_id_of_a_dead_process_of_ours_go(tmp_path):
    ours, strangers, now_s = dead_process(), dead_process(), time.time()
    left = sorted(made(tmp_path, name) for name in (f"torch_{ours}_123_0", f"torch_{ours}_123_1", f"pym-{ours}-abc_d1"))
    kept = [f"torch_{strangers}_5_0", f"torch_{ours}0_1_2", f"x_torch_{ours}_1_2", "psm_21467", f"torch_{os.getpid()}_1_1"]
    for name in kept:
        made(tmp_path, name)
    assert sorted(shared_memory.remove({ours: now_s, os.getpid(): now_s}, tmp_path)) == left
    assert sorted(entry.name for entry in tmp_path.iterdir()) == sorted(kept)


def test_segment_older_than_the_process_was_made_by_another_with_its_id(tmp_path):
    ours = dead_process()
    made(tmp_path, f"torch_{ours}_123_0")
    assert shared_memory.remove({ours: time.time() + 60}, tmp_path) == []


def test_system_without_such_a_folder_has_none(tmp_path):
    assert shared_memory.remove({1: 0.0}, tmp_path / "nowhere") == []
