import json
import os
import platform
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


def test_segments_of_a_trial_whose_supervisor_and_tuner_were_killed_go(tmp_path):
    place, ours, strangers = tmp_path / "trials" / "0007", dead_process(), dead_process()
    place.mkdir(parents=True)
    shared_memory.note(place, [[ours, time.time()]])
    with (place / shared_memory.LIST_FILE).open("a") as file:
        file.write(json.dumps({"boot_id": "another boot", "processes": [[strangers, 1.0]]}) + '\n{"boot')
    left, kept = (shared_memory.FOLDER / f"torch_{pid}_4711_0" for pid in (ours, strangers))
    try:
        left.touch()
        kept.touch()
        shared_memory.remove_left(tmp_path)
        assert not left.exists()
        assert kept.exists()
        assert list(place.iterdir()) == []
    finally:
        left.unlink(missing_ok=True)
        kept.unlink(missing_ok=True)


def test_the_list_of_another_host_is_kept_for_it(tmp_path):
    for number, host in enumerate(["far", platform.node()]):
        place = tmp_path / "trials" / f"000{number}"
        place.mkdir(parents=True)
        (place / shared_memory.LIST_FILE).write_text(json.dumps({"host": host, "boot_id": "another", "processes": [[7, 1.0]]}))
    shared_memory.remove_left(tmp_path)
    assert [file.parent.name for file in tmp_path.glob(f"trials/*/{shared_memory.LIST_FILE}")] == ["0000"]
