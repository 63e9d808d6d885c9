"""Every way a trial can end, given as facts, with the outcome and the reason."""

import pytest

from autotune.failures import LOSS, SCALING, classify, not_finite
from autotune.harness.protocol import UNMEASURABLE, KnobReport, RankResult, Window
from autotune.known_messages import Facts
from autotune.log_messages import raised_in
from autotune.process_ends import failed_ranks, reports_before
from autotune.records import Outcome

STEADY = Window(
    steps=20,
    seconds=2,
    samples=640,
    rate_per_s=320,
    block_rates_per_s=[],
    half_width_frac=0.01,
    is_steady=True,
    reason="narrow",
)
UNSTEADY = Window(
    steps=6, seconds=2, samples=60, rate_per_s=30, block_rates_per_s=[], half_width_frac=None, is_steady=False, reason="60 s"
)


def answer(rank=0, world_size=1, *, status="measured", window=STEADY, throughput_per_s=320.0, **more):
    return RankResult(
        trial=1,
        nonce="n",
        rank=rank,
        world_size=world_size,
        pid=1,
        status=status,
        window=window,
        throughput_per_s=throughput_per_s,
        **more,
    )


def failed(kind, message, rank=0, world_size=1, **more):
    error = {"type": kind, "message": message, "traceback": ""}
    return answer(rank, world_size, status="failed", window=None, throughput_per_s=None, error=error, **more)


def answered(*results, **more):
    return Facts(cause="result", results=results, is_harness_seen=True, **{"phase": "steady", **more})


def log(line, before=""):
    return f'{before}Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n    f()\n{line}\n'


def test_a_full_answer_is_ok_and_needs_no_reason():
    assert classify(answered(answer())) == (Outcome.ok, "")


def test_the_exit_status_of_a_measured_program_does_not_matter():
    assert classify(answered(answer(), exit_code=1))[0] is Outcome.ok


def test_a_stopped_trial_is_interrupted_whatever_it_left():
    assert classify(Facts(cause="stopped", stop_reason="budget over", results=[answer()])) == (
        Outcome.interrupted,
        "budget over",
    )


# Results that may not win


def test_a_loss_that_is_not_finite_disqualifies_any_rank():
    facts = answered(answer(0, 2), answer(1, 2, loss={"is_finite": False}, steps={"end_s": [1, 2]}))
    assert classify(facts) == (Outcome.nonfinite, "the loss is not finite after 2 steps (rank 1)")


def test_an_unsteady_window_is_unsteady_with_its_own_reason():
    assert classify(answered(answer(window=UNSTEADY))) == (Outcome.unsteady, "60 s")


def scaling(scale, skipped, skipped_in_window):
    return {"scale": scale, "skipped": skipped, "skipped_in_window": skipped_in_window}


@pytest.mark.parametrize(
    ("found", "outcome"),
    [
        (scaling(0.5, 17, 0), Outcome.nonfinite),  # the gradients never fitted fp16
        (scaling(1.0, 16, 0), Outcome.ok),  # found its scale during warm-up
        (scaling(2048.0, 40, 10), Outcome.nonfinite),  # the gradients overflow again and again
        (scaling(2048.0, 5, 5), Outcome.unsteady),  # the scaler was still looking for its scale
        (scaling(131072.0, 1, 1), Outcome.ok),  # the scaler tried a larger scale
    ],
)
def test_steps_that_a_scaler_skips_are_no_training(found, outcome):
    assert classify(answered(answer(scaling=found)))[0] is outcome


def test_a_skipping_scaler_is_counted_in_the_reason():
    reason = classify(answered(answer(scaling=scaling(2048.0, 40, 10), detected={"num_steps": 50})))[1]
    assert reason == "the gradient scaler skipped 40 of 50 optimizer steps, 10 of them in the window"


LOST = {"is_finite": False, "curve": [2.0, None, 3.0, None, None]}


def test_a_loss_that_the_program_loses_by_itself_disqualifies_nothing():
    facts = answered(answer(loss=LOST), excused=frozenset({LOSS}))
    assert classify(facts) == (Outcome.ok, "")
    facts.results = [answer(loss=LOST, scaling=scaling(0.5, 17, 0))]
    assert classify(facts)[0] is Outcome.nonfinite, "a scaler that skips all steps is no part of a lost loss"


@pytest.mark.parametrize("found", [scaling(0.5, 17, 0), scaling(2048.0, 40, 10)])
def test_steps_that_the_program_s_own_scaler_skips_disqualify_nothing(found):
    facts = answered(answer(scaling=found), excused=frozenset({SCALING}))
    assert classify(facts) == (Outcome.ok, "")
    assert list(not_finite(facts)) == [SCALING]


def test_a_scaler_that_still_looks_for_its_scale_is_unsteady_whatever_is_excused():
    facts = answered(answer(scaling=scaling(2048.0, 5, 5)), excused=frozenset({SCALING}))
    assert classify(facts)[0] is Outcome.unsteady
    assert not_finite(facts) == {}


@pytest.mark.parametrize(
    ("losses", "since"),
    [
        ([LOST], "from step 4 on"),
        ([{"is_finite": True, "curve": [1.0] * 5}, LOST], "from step 4 on"),
        ([{"is_finite": False, "curve": [1.0] * 5}], "by step 90"),  # after the losses that are recorded one by one
        ([{"is_finite": False, "curve": []}], "by step 90"),
        ([{"is_finite": False, "curve": [None] * 5}], "from step 1 on"),
    ],
)
def test_since_when_a_loss_is_not_finite_is_said_as_far_as_it_was_seen(losses, since):
    ranks = [answer(n, len(losses), loss=loss, detected={"num_steps": 90}) for n, loss in enumerate(losses)]
    assert not_finite(answered(*ranks)) == {LOSS: since}


def test_a_loss_that_stays_finite_is_no_news():
    assert not_finite(answered(answer(loss={"is_finite": True, "curve": [1.0]}, scaling=scaling(1.0, 0, 0)))) == {}


def test_an_allocator_that_retries_in_the_window_is_thrashing_and_may_not_win():
    outcome, reason = classify(answered(answer(memory={"alloc_retries": 3})))
    assert outcome is Outcome.unsteady
    assert reason.startswith("memory is thrashing")
    assert "3 times" in reason
    assert classify(answered(answer(memory={"alloc_retries": 0})))[0] is Outcome.ok


@pytest.mark.parametrize("status", ["not applicable", "overridden by the program"])
def test_a_knob_that_did_not_take_effect_is_named_with_its_reason(status):
    facts = answered(answer(knobs={"loader.num_workers": KnobReport(status, "no DataLoader")}), asked={"loader.num_workers": 4})
    assert classify(facts) == (Outcome.invalid, f"loader.num_workers=4: {status}: no DataLoader")


def test_a_knob_nobody_reports_on_did_not_take_effect():
    outcome, reason = classify(answered(answer(), asked={"precision.amp": "bf16"}))
    assert outcome is Outcome.invalid
    assert reason.startswith("precision.amp=bf16:")


def test_running_eagerly_past_the_recompile_limit_is_not_a_compiled_trial():
    knobs = {"compile.mode": KnobReport("applied")}
    facts = answered(answer(knobs=knobs, compiled={"recompile_limit_hit": True}), asked={"compile.mode": "default"})
    assert classify(facts)[0] is Outcome.invalid


def test_a_program_that_ends_too_early_is_told_how_many_steps_were_seen():
    facts = answered(answer(status="ended", window=None, throughput_per_s=None, steps={"end_s": [1.0, 2.0]}))
    outcome, reason = classify(facts)
    assert outcome is Outcome.error
    assert "2 optimizer steps" in reason
    assert "more epochs" in reason


def test_a_program_that_gives_up_with_an_exit_status_is_told_that():
    facts = answered(answer(status="ended", window=None, throughput_per_s=None), exit_code=3, log_tail="no data in x\n")
    assert classify(facts) == (Outcome.error, "exit status 3: no data in x")


def test_an_answer_without_steps_says_that_nothing_trained():
    outcome, reason = classify(answered(answer(status="ended", window=None, throughput_per_s=None)))
    assert outcome is Outcome.error
    assert reason.startswith("no optimizer step was seen")


@pytest.mark.parametrize("rate", [0.0, float("nan"), -1.0])
def test_a_rate_that_is_no_rate_does_not_win(rate):
    assert classify(answered(answer(throughput_per_s=rate)))[0] is Outcome.error


def test_inspecting_needs_no_number():
    assert classify(answered(answer(window=None, throughput_per_s=None), mode="inspect")) == (Outcome.ok, "")


# Exceptions

NCCL_SHM = "Error: failed to extend /dev/shm/nccl-WU88OE to 9637892 bytes, error: No space left on device (28)"
CUDNN = "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input."
MEMORY_FULL = {"peak_reserved_bytes": 97, "capacity_bytes": 100}
CPU_OOM = (
    "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes. "
    "Error code 12 (Cannot allocate memory)"
)


@pytest.mark.parametrize(
    ("kind", "message", "outcome"),
    [
        ("torch.OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB.", Outcome.device_oom),
        ("torch.cuda.OutOfMemoryError", "anything", Outcome.device_oom),
        ("torch.AcceleratorError", "CUDA error: out of memory", Outcome.device_oom),
        ("RuntimeError", "CUDA driver error: out of memory", Outcome.device_oom),
        ("RuntimeError", "Triton Error [CUDA]: out of memory", Outcome.device_oom),
        ("torch.distributed.DistBackendError", "ncclUnhandledCudaError\nCuda failure 2 'out of memory'", Outcome.device_oom),
        ("torch.distributed.DistBackendError", f"ncclSystemError: System call failed.\n{NCCL_SHM}", Outcome.host_oom),
        ("torch.distributed.DistBackendError", "NCCL error in: x.cpp\nFailed to CUDA calloc async 4 bytes", Outcome.device_oom),
        ("RuntimeError", CPU_OOM, Outcome.host_oom),
        ("RuntimeError", "DefaultCPUAllocator: not enough memory: you tried to allocate 99 bytes.", Outcome.host_oom),
        ("MemoryError", "", Outcome.host_oom),
        ("OSError", "[Errno 12] Cannot allocate memory", Outcome.host_oom),
        ("RuntimeError", "unable to allocate shared memory(shm) for file </torch_1>: (28)", Outcome.host_oom),
        ("RuntimeError", "DataLoader worker (pid 4) is killed by signal: Bus error. It is possible that ...", Outcome.host_oom),
        ("OSError", "[Errno 24] Too many open files", Outcome.error),
        ("ValueError", "the memory of this error is out", Outcome.error),
        ("KeyError", "'out of memory'", Outcome.error),
    ],
)
def test_an_exception_is_read_by_class_first_and_known_message_second(kind, message, outcome):
    assert classify(answered(failed(kind, message)))[0] is outcome


PINNED = """Caught AcceleratorError in pin memory thread for device 0.
Original Traceback (most recent call last):
  File "/x/torch/utils/data/_utils/pin_memory.py", line 72, in pin_memory
    return data.pin_memory()
torch.AcceleratorError: CUDA error: out of memory
"""


def test_pinned_memory_is_the_host_s():
    by_thread, by_program = failed("torch.AcceleratorError", PINNED), failed("RuntimeError", "CUDA error: out of memory")
    by_program.error["traceback"] = '  File "train.py", line 9, in main\n    x = x.pin_memory()\n'
    for one in (by_thread, by_program):
        outcome, reason = classify(answered(one, device_used_frac=0.4))
        assert outcome is Outcome.host_oom
        assert reason.startswith("page-locked memory ran out: ")
        assert reason.endswith("Error: CUDA error: out of memory")
        assert classify(answered(one, device_used_frac=0.99))[0] is Outcome.device_oom


@pytest.mark.parametrize(
    "said", ["operation failed due to a previous error during capture", "capturing stream has unjoined work"]
)
def test_memory_that_runs_out_while_a_graph_is_captured_is_the_device_s(said):
    first = log("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")
    result = failed("torch.AcceleratorError", f"CUDA error: {said}")
    assert classify(answered(result))[0] is Outcome.error
    result.error["traceback"] = f"{first}\nDuring handling of the above exception, another exception occurred:\n"
    outcome, reason = classify(answered(result))
    assert outcome is Outcome.device_oom
    assert reason == f"memory ran out in the capture of a CUDA graph: AcceleratorError: CUDA error: {said}"


def test_the_device_s_out_of_memory_is_known_by_its_class_in_a_log():
    # The message of cudaMallocAsync is worded differently.
    said = "torch.OutOfMemoryError: Allocation on device 0 would exceed allowed memory. (out of memory)"
    assert classify(Facts(exit_code=1, log_tail=log(said)))[0] is Outcome.device_oom


def test_an_exception_is_named_by_the_last_line_of_its_traceback():
    facts = answered(failed("my.pkg.ShapeError", "mat1 and mat2\nmore"), exit_code=1, log_tail=log("ZeroDivisionError: no"))
    assert classify(facts) == (Outcome.error, "ShapeError: mat1 and mat2 more")


@pytest.mark.parametrize(
    "message",
    [
        CUDNN,
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling x",
        "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "GET was unable to find an engine to execute this computation",
    ],
)
def test_an_unclear_cuda_failure_is_want_of_memory_only_with_evidence(message):
    assert classify(answered(failed("RuntimeError", message, memory=MEMORY_FULL)))[0] is Outcome.device_oom
    assert classify(answered(failed("RuntimeError", message), device_used_frac=0.99))[0] is Outcome.device_oom
    crash, why = classify(answered(failed("RuntimeError", message), device_used_frac=0.5))
    assert crash is Outcome.crash
    assert why.endswith("(memory was not short)")
    crash, why = classify(answered(failed("RuntimeError", message)))
    assert crash is Outcome.crash
    assert why.endswith("(whether memory was short is not known)")


@pytest.mark.parametrize(
    "message",
    [
        "could not create a primitive",
        "can't start new thread",
        "/x/_lsprof.so: failed to map segment from shared object",
    ],
)
def test_an_unclear_failure_near_a_limit_of_the_process_is_want_of_host_memory(message):
    memory = {"kind": "cpu", "peak_bytes": 95, "capacity_bytes": 100}
    facts = answered(failed("ImportError", message, memory=memory), memory_limit_bytes=3 << 29)
    outcome, reason = classify(facts)
    assert outcome is Outcome.host_oom
    assert reason.endswith("(with 95% of the memory in use) (under device.memory_limit, 1.50 GiB a process)")
    facts.results[0].memory["peak_bytes"] = 50
    assert classify(facts)[0] is Outcome.crash


@pytest.mark.parametrize(("phase", "is_early"), [("import", True), ("init", True), ("first_batch", False), ("steady", False)])
def test_want_of_memory_before_the_model_is_called_is_told_as_that(phase, is_early):
    facts = answered(failed("MemoryError", "no"), memory_limit_bytes=1 << 30, phase=phase)
    assert ("a process, before the model was first called)" in classify(facts)[1]) is is_early


def test_the_limit_is_named_also_behind_a_long_message():
    outcome, reason = classify(answered(failed("MemoryError", "x" * 5000), memory_limit_bytes=1 << 30))
    assert outcome is Outcome.host_oom
    assert reason.endswith("… (under device.memory_limit, 1.00 GiB a process)")
    assert len(reason) <= 400


def test_a_killed_loader_worker_is_host_memory_when_the_kernel_says_so():
    facts = answered(failed("RuntimeError", "DataLoader worker (pid 77) is killed by signal: Killed. "), oom_kills=1)
    assert classify(facts)[0] is Outcome.host_oom
    facts.oom_kills = 0
    assert classify(facts)[0] is Outcome.crash


@pytest.mark.parametrize(
    ("worker", "oom_kills", "outcome", "reason"),
    [
        ("7, SIGKILL", 0, Outcome.crash, "a loader worker died: DataLoader worker (pid 7) is killed by signal: Killed, then"),
        ("7, SIGKILL", 1, Outcome.host_oom, "the kernel killed 1 process(es) for memory: DataLoader worker (pid 7)"),
        ("7, SIGBUS", 0, Outcome.host_oom, "shared memory (/dev/shm) ran out: DataLoader worker (pid 7)"),
        ("7, SIGSEGV", 0, Outcome.crash, "a loader worker died: DataLoader worker (pid 7) is killed by signal: SIGSEGV"),
    ],
)
def test_a_connection_lost_to_a_dead_worker_is_the_worker_s_end(worker, oom_kills, outcome, reason):
    result = failed("ConnectionResetError", "[Errno 104] Connection reset by peer")
    result.error["worker"] = worker
    found, said = classify(answered(result, oom_kills=oom_kills))
    assert found is outcome
    assert said.startswith(reason)
    assert said.endswith("ConnectionResetError: [Errno 104] Connection reset by peer")


def test_the_rank_that_failed_first_is_named_not_the_one_that_lost_its_peer():
    peer = failed("RuntimeError", "[../gloo/transport/tcp/pair.cc:544] Connection closed by peer", 0, 2)
    facts = answered(peer, failed("torch.OutOfMemoryError", "CUDA out of memory.", 1, 2))
    assert classify(facts) == (Outcome.device_oom, "OutOfMemoryError: CUDA out of memory. (rank 1)")


def test_one_failed_rank_is_the_whole_trial_s_outcome():
    assert classify(answered(answer(0, 2), failed("ValueError", "x", 1, 2))) == (Outcome.error, "ValueError: x (rank 1)")


# Ends without results of all ranks


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGABRT", "SIGBUS", "SIGKILL"])
def test_a_signal_is_a_crash_that_names_signal_and_phase(name):
    outcome, reason = classify(Facts(signal=name, phase="compile"))
    assert outcome is Outcome.crash
    assert f"ended by {name} in phase compile" in reason


def test_sigkill_is_host_memory_only_when_the_kernel_counted_a_kill():
    assert classify(Facts(signal="SIGKILL", oom_kills=1))[0] is Outcome.host_oom
    assert classify(Facts(exit_code=137, oom_kills=1))[0] is Outcome.host_oom
    assert classify(Facts(exit_code=137, oom_kills=0))[0] is Outcome.crash
    assert classify(Facts(exit_code=1, oom_kills=1, log_tail=log("ValueError: x")))[0] is Outcome.error


def test_torchrun_passes_on_the_signal_its_worker_died_of():
    tail = log(TORCHRUN.format(code=-11))
    outcome, reason = classify(Facts(exit_code=1, log_tail=tail))
    assert outcome is Outcome.crash
    assert "SIGSEGV" in reason


GLOO = "[/x/gloo/transport/tcp/pair.cc:545] Read error [127.0.0.1]:2466: Connection reset by peer"
TORCHRUN = """torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
Failures:
[1]:
  exitcode  : -15 (pid: 13469)  (SIGTERM)
Root Cause (first observed failure):
[0]:
  rank      : 1 (local_rank: 1)
  exitcode  : {code} (pid: 13470)
"""


def test_a_rank_that_lost_its_peer_to_a_signal_is_not_the_cause():
    facts = answered(failed("RuntimeError", GLOO, 0, 2), exit_code=1, log_tail=log(TORCHRUN.format(code=-11)))
    outcome, reason = classify(facts)
    assert outcome is Outcome.crash
    assert reason.startswith("rank 1 was ended by SIGSEGV")


def test_a_rank_that_ended_without_a_word_is_the_cause_and_not_the_one_that_lost_it():
    facts = answered(failed("RuntimeError", GLOO, 0, 2), exit_code=1, log_tail=log(TORCHRUN.format(code=3)))
    assert classify(facts) == (Outcome.error, f"rank 1 ended with exit status 3; RuntimeError: {GLOO} (rank 0)")


def test_a_rank_that_ended_by_itself_is_the_cause_and_not_the_one_that_lost_it():
    done = answer(1, 2, status="ended", window=None, throughput_per_s=None, detected={"num_steps": 3})
    facts = answered(failed("RuntimeError", GLOO, 0, 2), done, exit_code=1)
    told = f"rank 1 ended by itself after 3 optimizer steps, the others did not; RuntimeError: {GLOO} (rank 0)"
    assert classify(facts) == (Outcome.error, told)


def test_a_rank_that_lost_its_peer_is_named_when_nothing_better_is_known():
    facts = answered(failed("RuntimeError", GLOO, 0, 2), exit_code=1)
    assert classify(facts) == (Outcome.error, f"RuntimeError: {GLOO} (rank 0)")


def test_of_several_ranks_that_failed_the_first_by_time_is_the_cause():
    late, early = failed("ValueError", "late", 0, 2, failed_s=7.5), failed("KeyError", "'early'", 1, 2, failed_s=7.0)
    assert classify(answered(late, early, exit_code=1)) == (Outcome.error, "KeyError: 'early' (rank 1)")


def test_of_ranks_that_torchrun_found_dead_at_once_the_killed_one_is_the_cause():
    both = TORCHRUN.replace("[1]:", "[1]:\n  rank      : 0 (local_rank: 0)").replace("-15", "-9").format(code=1)
    assert classify(Facts(exit_code=1, log_tail=log(both)))[1].startswith("rank 0 was ended by SIGKILL")
    after = TORCHRUN.replace("[1]:", "[1]:\n  rank      : 0 (local_rank: 0)").format(code=-9)
    assert classify(Facts(exit_code=1, log_tail=log(after)))[1].startswith("rank 1 was ended by SIGKILL")


def test_of_a_report_of_each_node_s_torchrun_the_killed_rank_is_the_cause():
    other = TORCHRUN.replace("rank      : 1 (local_rank: 1)", "rank      : 0 (local_rank: 0)").format(code=1)
    for reports in (TORCHRUN.format(code=-9) + other, other + TORCHRUN.format(code=-9)):
        assert classify(Facts(exit_code=1, log_tail=log(reports)))[1].startswith("rank 1 was ended by SIGKILL")


def test_a_report_of_torchrun_is_found_before_the_tail_of_the_log():
    report = f"{TORCHRUN.format(code=-9)}===\n"
    tail = "x" * 100
    assert failed_ranks(reports_before(f"before\n{report}{tail}", tail)) == [(1, -9, "")]
    assert reports_before(f"before\n{report}{tail}", f"{report}{tail}") == ""


SRUN = """srun: error: n2: task 1: Killed
srun: Job step aborted: Waiting up to 32 seconds for job step to finish.
srun: error: n1: task 0: Killed
"""


@pytest.mark.parametrize(
    ("ends", "outcome", "reason"),
    [
        ("Killed", Outcome.crash, "task 1 on node n2 was ended by SIGKILL in phase spawn (ended from outside, or by"),
        ("Segmentation fault (core dumped)", Outcome.crash, "task 1 on node n2 was ended by SIGSEGV in phase spawn"),
        ("Out Of Memory", Outcome.host_oom, "task 1 on node n2 was ended for memory, says Slurm"),
        ("Exited with exit code 3", Outcome.error, "task 1 on node n2 ended with exit status 3"),
    ],
)
def test_the_task_that_srun_names_first_is_the_cause(ends, outcome, reason):
    said = log(f"RuntimeError: {GLOO}") + SRUN.replace("Killed", ends, 1)
    for facts in (Facts(exit_code=137, log_tail=said), answered(failed("RuntimeError", GLOO, 0, 2), log_tail=said)):
        found = classify(facts)
        assert (found[0], found[1].startswith(reason.replace("spawn", facts.phase))) == (outcome, True), found


def test_what_a_program_says_is_quoted_rather_than_what_srun_says_of_it():
    said = "python: can't open file 'x.py'\nsrun: error: n2: task 1: Exited with exit code 2\n"
    assert classify(Facts(exit_code=2, log_tail=said))[1] == "exit status 2: python: can't open file 'x.py'"
    assert classify(Facts(exit_code=1, log_tail="srun: error: Unable to allocate\n"))[1].endswith("Unable to allocate")


def test_a_rank_is_named_with_its_node_if_there_are_several():
    results = failed("ValueError", "bad", 1, 2, host="n2"), answer(0, 2, host="n1")
    assert classify(answered(*results))[1] == "ValueError: bad (rank 1 on n2)"


def test_a_rank_that_the_kernel_killed_for_memory_is_named():
    outcome, reason = classify(Facts(exit_code=1, oom_kills=1, log_tail=log(TORCHRUN.format(code=-9))))
    assert outcome is Outcome.host_oom
    assert "rank 1 first" in reason


def test_a_rank_without_a_window_of_its_own_is_no_failure():
    steps = {"end_s": [0.1 * n for n in range(1, 60)], "samples": [10.0] * 59, "warmup": 3}
    first = answer(0, 2, steps=steps)
    second = answer(1, 2, window=None, throughput_per_s=None, steps={**steps, "warmup": 59})
    assert classify(answered(first, second)) == (Outcome.ok, "")
    second.steps["end_s"] = []
    assert classify(answered(first, second))[0] is Outcome.error


def test_sigterm_from_torchrun_is_not_its_workers_failure():
    tail = log("[rank1]: ValueError: x").replace("\n", "\n[rank1]: ").replace("[rank1]: [rank1]", "[rank1]")
    facts = Facts(exit_code=1, log_tail="[rank1]: " + tail + "\n" + log(TORCHRUN.format(code=1)))
    assert classify(facts) == (Outcome.error, "ValueError: x")


@pytest.mark.parametrize(
    "line",
    [
        "subprocess.CalledProcessError: Command '['python']' died with <Signals.SIGSEGV: 11>.",
        "torch.multiprocessing.spawn.ProcessExitedException: process 0 terminated with signal SIGSEGV",
    ],
)
def test_a_parent_passes_on_the_signal_its_child_died_of(line):
    name, message = line.split(": ", 1)
    for facts in (answered(failed(name, message), exit_code=1, log_tail=log(line)), Facts(exit_code=1, log_tail=log(line))):
        outcome, reason = classify(facts)
        assert outcome is Outcome.crash
        assert "SIGSEGV" in reason


def test_what_a_cplusplus_exception_said_decides_and_is_quoted():
    said = "terminate called after throwing an instance of 'c10::Error'\n  what():  CUDA out of memory. x\n"
    assert classify(Facts(signal="SIGABRT", log_tail=said)) == (Outcome.device_oom, "CUDA out of memory. x")
    said = said.replace("CUDA out of memory", "watchdog timeout")
    outcome, reason = classify(Facts(signal="SIGABRT", log_tail=said))
    assert outcome is Outcome.crash
    assert reason.endswith("SIGABRT in phase spawn: watchdog timeout. x")


def test_a_loader_worker_s_exception_is_the_one_it_raised():
    inner = log("ValueError: bad sample").replace("Traceback", "Original Traceback")
    facts = answered(failed("ValueError", f"Caught ValueError in DataLoader worker process 0.\n{inner}"))
    assert classify(facts) == (Outcome.error, "ValueError: bad sample")


def test_torchrun_s_own_traceback_does_not_hide_the_user_s():
    user = log("[rank1]: ValueError: bad shape".removeprefix("[rank1]: "))
    tail = log("torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ", before=user)
    assert classify(Facts(exit_code=1, log_tail=tail)) == (Outcome.error, "ValueError: bad shape")


def test_a_deadline_is_a_timeout_that_names_the_limit():
    assert classify(Facts(cause="deadline", deadline="compile: it did not finish within 300 s")) == (
        Outcome.timeout,
        "compile: it did not finish within 300 s",
    )


def test_waiting_for_a_process_that_died_for_memory_is_not_slowness():
    facts = Facts(cause="deadline", deadline="step: x", log_tail=log("torch.OutOfMemoryError: CUDA out of memory."))
    assert classify(facts)[0] is Outcome.device_oom
    tail = "DataLoader worker (pid 7) is killed by signal: Killed.\n"
    assert classify(Facts(cause="deadline", deadline="step: x", log_tail=tail, oom_kills=1))[0] is Outcome.host_oom


def test_a_traceback_without_a_result_gives_the_reason():
    assert classify(Facts(exit_code=1, log_tail=log("ModuleNotFoundError: No module named 'torch'"))) == (
        Outcome.error,
        "ModuleNotFoundError: No module named 'torch'",
    )


def test_an_exit_status_without_a_traceback_gives_the_last_line():
    facts = Facts(exit_code=2, log_tail="usage: train.py\ntrain.py: error: unrecognized arguments: --x\n")
    assert classify(facts) == (Outcome.error, "exit status 2: train.py: error: unrecognized arguments: --x")


def test_success_without_a_sign_of_the_harness_is_no_silent_baseline():
    outcome, reason = classify(Facts(exit_code=0))
    assert outcome is Outcome.error
    assert reason.startswith("harness not loaded")


def test_a_harness_that_broke_says_so():
    tail = log("KeyError: 'x'", before="autotune: the harness failed to start\n")
    outcome, reason = classify(Facts(exit_code=0, log_tail=tail, is_harness_seen=True))
    assert (outcome, reason) == (Outcome.error, "harness not loaded: the harness failed to start")


def test_success_without_torch_says_so():
    outcome, reason = classify(Facts(exit_code=0, is_harness_seen=True, phase="spawn"))
    assert outcome is Outcome.error
    assert reason.startswith("no Python process of the program imported torch")


def test_one_step_is_one_step():
    assert "after 1 optimizer step," in classify(Facts(exit_code=0, is_harness_seen=True, phase="warmup", num_steps=1))[1]


def test_a_timeout_says_where_it_hung():
    facts = Facts(cause="deadline", deadline="step: nothing moved within 3 s", hang="user code at train.py:3 in f")
    assert classify(facts) == (Outcome.timeout, "step: nothing moved within 3 s; user code at train.py:3 in f")


def test_success_with_the_harness_but_without_steps_says_that_nothing_trained():
    outcome, reason = classify(Facts(exit_code=0, is_harness_seen=True, phase="init"))
    assert outcome is Outcome.error
    assert reason.startswith("no optimizer step was seen")


def test_what_a_successful_program_logged_is_not_its_failure():
    facts = Facts(exit_code=0, is_harness_seen=True, phase="warmup", num_steps=4, log_tail=log("ValueError: survived"))
    assert "after 4 optimizer steps" in classify(facts)[1]


def test_a_program_whose_own_processes_failed_tells_why_though_it_succeeded():
    tail = log("RuntimeError: view size is not compatible", before="Process Process-2:\n")
    facts = Facts(exit_code=0, is_harness_seen=True, phase="first_batch", log_tail=tail)
    assert classify(facts) == (Outcome.error, "RuntimeError: view size is not compatible")


def test_an_unusable_result_is_named():
    outcome, reason = classify(Facts(exit_code=0, problems=["result.rank0.json cannot be used: half"], is_harness_seen=True))
    assert outcome is Outcome.error
    assert "result.rank0.json" in reason


def test_a_silent_rank_is_named():
    facts = answered(answer(0, 3), answer(2, 3), exit_code=0)
    assert classify(facts) == (Outcome.error, "no result from rank 1")


WEIGHTS_ONLY = (
    "Weights only load failed. This file can still be loaded, to do so you have two options, \x1b[1mdo those steps only if you "
    "trust the source of the checkpoint\x1b[0m. \n\t(1) Re-running `torch.load` with `weights_only` set to `False` will likely "
    "succeed.\n\t(2) Alternatively, please check the recommended steps in the following error message.\n\tWeights"
    "Unpickler error: Unsupported global: GLOBAL __main__.A was not an allowed global by default."
)


def test_a_library_s_advice_is_quoted_without_colours_up_to_the_end_of_a_sentence():
    outcome, reason = classify(answered(failed("_pickle.UnpicklingError", WEIGHTS_ONLY)))
    assert outcome is Outcome.error
    assert "two options, do those steps only if you trust the source of the checkpoint. (1) Re-running" in reason
    assert reason.endswith("in the following error message. …")


def test_frames_of_cpp_are_no_part_of_what_an_exception_says():
    message = "it failed\nhere is why\nException raised from get at x.cpp:3 (most recent call first):\nframe #0: f() + 0x1"
    assert classify(answered(failed("RuntimeError", message)))[1] == "RuntimeError: it failed here is why"


def test_a_coloured_traceback_in_a_log_is_read():
    text = log("\x1b[1;35mValueError\x1b[0m: \x1b[35mbad shape\x1b[0m").replace("Traceback", "\x1b[1mTraceback")
    assert classify(Facts(exit_code=1, is_harness_seen=True, log_tail=text)) == (Outcome.error, "ValueError: bad shape")


@pytest.mark.parametrize("size", [10, 5000])
def test_autotune_s_own_advice_is_never_cut(size):
    facts = answered(failed("OSError", f"[Errno 24] Too many open files: {'x' * size}"))
    assert classify(facts)[1].endswith(" (open files ran out; raise the hard limit, see `ulimit -Hn`)")
    facts = answered(failed(UNMEASURABLE, "advice " * size))
    assert classify(facts)[1] == ("advice " * size).strip()
    facts = Facts(cause="deadline", deadline="step: nothing moved", log_tail=log(f"ValueError: {'word ' * size}"))
    assert classify(facts)[1].startswith("step: nothing moved; the log's last exception: ValueError: word")


def test_a_reason_is_one_short_line():
    outcome, reason = classify(answered(failed("ValueError", "a\tb " + "x" * 5000)))
    assert outcome is Outcome.error
    assert "\n" not in reason
    assert "\t" not in reason
    assert len(reason) <= 400


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", ""),
        ("error: everything is fine\nError: x\n", ""),
        (log("ValueError: first", before="") + "\nDuring handling ...\n\n" + log("TypeError: second"), "TypeError: second"),
        (log("ValueError: x") + "Exception ignored in: <f>\n", "ValueError: x"),
        (log("KeyboardInterrupt"), "KeyboardInterrupt"),
        (log("my_pkg.errors.bad_name: x"), ""),
    ],
)
def test_the_raised_line_is_found_after_a_traceback_only(text, line):
    assert raised_in(text) == line
