"""`classify` returns the outcome and the reason for every way a trial can end."""

import pytest

from autotune.failures import LOSS, SCALING, classify, not_finite
from autotune.harness.protocol import NOT_APPLICABLE, UNMEASURABLE, KnobReport, RankResult, Window
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


def test_a_complete_result_is_ok_without_a_reason():
    assert classify(answered(answer())) == (Outcome.ok, "")


def test_loader_knobs_of_ranks_that_fetch_no_batches_need_not_apply():
    """Rank 0 alone has a loader, as with dispatch_batches of Accelerate. The other ranks report that they have none."""
    bad = {"loader.num_workers": KnobReport(status=NOT_APPLICABLE, reason="no loader")}
    ranks = answer(0, 2, unit_source="loader"), answer(1, 2, unit_source="forward calls", knobs=bad)
    assert classify(answered(*ranks)) == (Outcome.ok, "")
    ranks[1].unit_source = "loader"
    assert classify(answered(*ranks))[0] is Outcome.invalid


def test_the_exit_status_of_a_measured_program_does_not_matter():
    assert classify(answered(answer(), exit_code=1))[0] is Outcome.ok


def test_a_stopped_trial_is_interrupted_even_with_a_result():
    assert classify(Facts(cause="stopped", stop_reason="budget over", results=[answer()])) == (
        Outcome.interrupted,
        "budget over",
    )


# Results that disqualify a trial


def test_a_non_finite_loss_on_any_rank_is_nonfinite():
    facts = answered(answer(0, 2), answer(1, 2, loss={"is_finite": False}, steps={"end_s": [1, 2]}))
    assert classify(facts) == (Outcome.nonfinite, "the loss is not finite after 2 steps (rank 1)")


def test_an_unsteady_window_is_unsteady_with_the_reason_of_the_window():
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
def test_steps_skipped_by_the_scaler_decide_the_outcome(found, outcome):
    assert classify(answered(answer(scaling=found)))[0] is outcome


def test_reason_counts_the_steps_skipped_by_the_scaler():
    reason = classify(answered(answer(scaling=scaling(2048.0, 40, 10), detected={"num_steps": 50})))[1]
    assert reason == "the gradient scaler skipped 40 of 50 optimizer steps, 10 of them in the window"


LOST = {"is_finite": False, "curve": [2.0, None, 3.0, None, None]}


def test_a_non_finite_loss_that_is_excused_is_ok():
    facts = answered(answer(loss=LOST), excused=frozenset({LOSS}))
    assert classify(facts) == (Outcome.ok, "")
    facts.results = [answer(loss=LOST, scaling=scaling(0.5, 17, 0))]
    assert classify(facts)[0] is Outcome.nonfinite, "only the loss is excused, not a scaler that skips all steps"


@pytest.mark.parametrize("found", [scaling(0.5, 17, 0), scaling(2048.0, 40, 10)])
def test_skipped_steps_that_are_excused_are_ok(found):
    facts = answered(answer(scaling=found), excused=frozenset({SCALING}))
    assert classify(facts) == (Outcome.ok, "")
    assert list(not_finite(facts)) == [SCALING]


def test_a_scaler_still_searching_its_scale_is_unsteady_even_if_excused():
    facts = answered(answer(scaling=scaling(2048.0, 5, 5)), excused=frozenset({SCALING}))
    assert classify(facts)[0] is Outcome.unsteady
    assert not_finite(facts) == {}


@pytest.mark.parametrize(
    ("losses", "since"),
    [
        ([LOST], "from step 4 on"),
        ([{"is_finite": True, "curve": [1.0] * 5}, LOST], "from step 4 on"),
        ([{"is_finite": False, "curve": [1.0] * 5}], "by step 90"),  # later than the losses recorded step by step
        ([{"is_finite": False, "curve": []}], "by step 90"),
        ([{"is_finite": False, "curve": [None] * 5}], "from step 1 on"),
    ],
)
def test_not_finite_names_the_first_step_with_a_non_finite_loss_if_known(losses, since):
    ranks = [answer(n, len(losses), loss=loss, detected={"num_steps": 90}) for n, loss in enumerate(losses)]
    assert not_finite(answered(*ranks)) == {LOSS: since}


def test_a_finite_loss_gives_no_warning():
    assert not_finite(answered(answer(loss={"is_finite": True, "curve": [1.0]}, scaling=scaling(1.0, 0, 0)))) == {}


def test_allocator_retries_in_the_window_are_unsteady():
    outcome, reason = classify(answered(answer(memory={"alloc_retries": 3})))
    assert outcome is Outcome.unsteady
    assert reason.startswith("memory is thrashing")
    assert "3 times" in reason
    assert classify(answered(answer(memory={"alloc_retries": 0})))[0] is Outcome.ok


@pytest.mark.parametrize("status", ["not applicable", "overridden by the program"])
def test_a_knob_that_did_not_take_effect_is_named_with_its_reason(status):
    facts = answered(answer(knobs={"loader.num_workers": KnobReport(status, "no DataLoader")}), asked={"loader.num_workers": 4})
    assert classify(facts) == (Outcome.invalid, f"loader.num_workers=4: {status}: no DataLoader")


def test_a_knob_without_a_report_is_invalid():
    outcome, reason = classify(answered(answer(), asked={"precision.amp": "bf16"}))
    assert outcome is Outcome.invalid
    assert reason.startswith("precision.amp=bf16:")


def test_reaching_the_recompile_limit_makes_a_compiled_trial_invalid():
    knobs = {"compile.mode": KnobReport("applied")}
    facts = answered(answer(knobs=knobs, compiled={"recompile_limit_hit": True}), asked={"compile.mode": "default"})
    assert classify(facts)[0] is Outcome.invalid


def test_reason_of_an_early_end_counts_the_steps_seen():
    facts = answered(answer(status="ended", window=None, throughput_per_s=None, steps={"end_s": [1.0, 2.0]}))
    outcome, reason = classify(facts)
    assert outcome is Outcome.error
    assert "2 optimizer steps" in reason
    assert "more epochs" in reason


def test_reason_of_an_early_end_names_the_exit_status():
    facts = answered(answer(status="ended", window=None, throughput_per_s=None), exit_code=3, log_tail="no data in x\n")
    assert classify(facts) == (Outcome.error, "exit status 3: no data in x")


def test_a_program_that_ends_itself_within_the_window_with_a_status_has_failed():
    said = log("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8.00 GiB")
    assert classify(answered(answer(status="ended"), exit_code=1, log_tail=said))[0] is Outcome.device_oom
    assert classify(answered(answer(status="ended"), exit_code=1, log_tail="no more data\n")) == (
        Outcome.error,
        "exit status 1: no more data",
    )
    assert classify(answered(answer(status="ended"), exit_code=0))[0] is Outcome.ok


def test_reason_of_a_result_without_steps_says_that_no_step_was_seen():
    outcome, reason = classify(answered(answer(status="ended", window=None, throughput_per_s=None)))
    assert outcome is Outcome.error
    assert reason.startswith("no optimizer step was seen: the program imported torch")


def test_reason_of_no_step_after_a_loaded_checkpoint_names_that_checkpoint():
    _, reason = classify(answered(answer(status="ended", window=None, throughput_per_s=None), loaded="out/last.pt"))
    assert reason.startswith("no optimizer step was seen: the program loaded the checkpoint out/last.pt, perhaps saved by an")
    assert "Give the command that trains" not in reason


@pytest.mark.parametrize("rate", [0.0, float("nan"), -1.0])
def test_a_rate_that_is_not_a_positive_number_is_an_error(rate):
    assert classify(answered(answer(throughput_per_s=rate)))[0] is Outcome.error


def test_inspect_mode_needs_no_throughput():
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
def test_exceptions_are_classified_by_class_and_known_messages(kind, message, outcome):
    assert classify(answered(failed(kind, message)))[0] is outcome


PINNED = """Caught AcceleratorError in pin memory thread for device 0.
Original Traceback (most recent call last):
  File "/x/torch/utils/data/_utils/pin_memory.py", line 72, in pin_memory
    return data.pin_memory()
torch.AcceleratorError: CUDA error: out of memory
"""


def test_out_of_memory_while_pinning_is_host_memory():
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
def test_out_of_memory_during_graph_capture_is_device_memory(said):
    first = log("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")
    result = failed("torch.AcceleratorError", f"CUDA error: {said}")
    assert classify(answered(result))[0] is Outcome.error
    result.error["traceback"] = f"{first}\nDuring handling of the above exception, another exception occurred:\n"
    outcome, reason = classify(answered(result))
    assert outcome is Outcome.device_oom
    assert reason == f"memory ran out in the capture of a CUDA graph: AcceleratorError: CUDA error: {said}"


def test_device_out_of_memory_in_a_log_is_recognised_by_its_class():
    # The message of cudaMallocAsync is worded differently.
    said = "torch.OutOfMemoryError: Allocation on device 0 would exceed allowed memory. (out of memory)"
    assert classify(Facts(exit_code=1, log_tail=log(said)))[0] is Outcome.device_oom


def test_reason_is_the_exception_of_the_result_rather_than_of_the_log():
    facts = answered(failed("my.pkg.ShapeError", "mat1 and mat2\nmore"), exit_code=1, log_tail=log("ZeroDivisionError: no"))
    assert classify(facts) == (Outcome.error, "ShapeError: mat1 and mat2 more")


TERMINAL_LOG = """Traceback (most recent call last):
  File "train.py", line 5, in <module>
    from utils import progress_bar
  File "/x/utils.py", line 44, in <module>
    SOURCE
    ^^^^^^
RAISED
"""


@pytest.mark.parametrize(
    ("source", "kind", "message"),
    [
        ("rows, columns = os.popen('stty size', 'r').read().split()", "ValueError", "not enough values to unpack"),
        ("WIDTH = os.get_terminal_size().columns", "OSError", "[Errno 25] Inappropriate ioctl for device"),
    ],
)
def test_program_that_needs_a_terminal_gets_advice(source, kind, message):
    trace = TERMINAL_LOG.replace("SOURCE", source).replace("RAISED", f"{kind}: {message}")
    result = failed(kind, message)
    result.error["traceback"] = trace
    for facts in (answered(result), Facts(exit_code=1, log_tail=f"stty: 'standard input': no\n{trace}")):
        outcome, reason = classify(facts)
        assert outcome is Outcome.error
        assert reason.startswith(f"{kind}: {message} (a trial has no terminal. ")


def test_another_failure_after_a_look_for_the_terminal_gets_no_advice():
    trace = TERMINAL_LOG.replace("SOURCE", "width = 1 / 0").replace("RAISED", "ZeroDivisionError: division by zero")
    facts = Facts(exit_code=1, log_tail=f"stty: 'standard input': Inappropriate ioctl for device\n{trace}")
    assert classify(facts) == (Outcome.error, "ZeroDivisionError: division by zero")


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
def test_an_unclear_cuda_failure_is_out_of_memory_only_with_evidence(message):
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
def test_an_unclear_failure_near_the_memory_limit_is_host_out_of_memory(message):
    memory = {"kind": "cpu", "peak_bytes": 95, "capacity_bytes": 100}
    facts = answered(failed("ImportError", message, memory=memory), memory_limit_bytes=3 << 29)
    outcome, reason = classify(facts)
    assert outcome is Outcome.host_oom
    assert reason.endswith("(with 95% of the memory in use) (under device.memory_limit, 1.50 GiB a process)")
    facts.results[0].memory["peak_bytes"] = 50
    assert classify(facts)[0] is Outcome.crash


@pytest.mark.parametrize(("phase", "is_early"), [("import", True), ("init", True), ("first_batch", False), ("steady", False)])
def test_reason_says_if_memory_ran_out_before_the_first_model_call(phase, is_early):
    facts = answered(failed("MemoryError", "no"), memory_limit_bytes=1 << 30, phase=phase)
    assert ("a process, before the model was first called)" in classify(facts)[1]) is is_early


def test_memory_limit_is_named_even_after_a_long_message():
    outcome, reason = classify(answered(failed("MemoryError", "x" * 5000), memory_limit_bytes=1 << 30))
    assert outcome is Outcome.host_oom
    assert reason.endswith("… (under device.memory_limit, 1.00 GiB a process)")
    assert len(reason) <= 400


def test_a_killed_loader_worker_is_host_memory_if_the_kernel_counted_a_kill():
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
def test_a_lost_connection_is_classified_by_how_the_worker_died(worker, oom_kills, outcome, reason):
    result = failed("ConnectionResetError", "[Errno 104] Connection reset by peer")
    result.error["worker"] = worker
    found, said = classify(answered(result, oom_kills=oom_kills))
    assert found is outcome
    assert said.startswith(reason)
    assert said.endswith("ConnectionResetError: [Errno 104] Connection reset by peer")


def test_reason_names_the_failed_rank_not_the_one_that_lost_its_peer():
    peer = failed("RuntimeError", "[../gloo/transport/tcp/pair.cc:544] Connection closed by peer", 0, 2)
    facts = answered(peer, failed("torch.OutOfMemoryError", "CUDA out of memory.", 1, 2))
    assert classify(facts) == (Outcome.device_oom, "OutOfMemoryError: CUDA out of memory. (rank 1)")


def test_one_failed_rank_decides_the_outcome_of_the_trial():
    assert classify(answered(answer(0, 2), failed("ValueError", "x", 1, 2))) == (Outcome.error, "ValueError: x (rank 1)")


# Ends without results of all ranks


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGABRT", "SIGBUS", "SIGKILL"])
def test_a_signal_is_a_crash_that_names_signal_and_phase(name):
    outcome, reason = classify(Facts(signal=name, phase="compile"))
    assert outcome is Outcome.crash
    assert f"ended by {name} in phase compile" in reason


def test_sigkill_is_host_memory_only_if_the_kernel_counted_a_kill():
    assert classify(Facts(signal="SIGKILL", oom_kills=1))[0] is Outcome.host_oom
    assert classify(Facts(exit_code=137, oom_kills=1))[0] is Outcome.host_oom
    assert classify(Facts(exit_code=137, oom_kills=0))[0] is Outcome.crash
    assert classify(Facts(exit_code=1, oom_kills=1, log_tail=log("ValueError: x")))[0] is Outcome.error


def test_signal_of_a_worker_is_read_from_the_report_of_torchrun():
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


def test_the_rank_ended_by_a_signal_is_the_cause_not_its_peer():
    facts = answered(failed("RuntimeError", GLOO, 0, 2), exit_code=1, log_tail=log(TORCHRUN.format(code=-11)))
    outcome, reason = classify(facts)
    assert outcome is Outcome.crash
    assert reason.startswith("rank 1 was ended by SIGSEGV")


def test_the_rank_that_exited_without_a_message_is_the_cause_not_its_peer():
    facts = answered(failed("RuntimeError", GLOO, 0, 2), exit_code=1, log_tail=log(TORCHRUN.format(code=3)))
    assert classify(facts) == (Outcome.error, f"rank 1 ended with exit status 3; RuntimeError: {GLOO} (rank 0)")


def test_the_rank_that_finished_early_is_the_cause_not_its_peer():
    done = answer(1, 2, status="ended", window=None, throughput_per_s=None, detected={"num_steps": 3})
    facts = answered(failed("RuntimeError", GLOO, 0, 2), done, exit_code=1)
    told = f"rank 1 ended by itself after 3 optimizer steps, the others did not; RuntimeError: {GLOO} (rank 0)"
    assert classify(facts) == (Outcome.error, told)


def test_the_rank_that_lost_its_peer_is_named_if_no_other_cause_is_known():
    facts = answered(failed("RuntimeError", GLOO, 0, 2), exit_code=1)
    assert classify(facts) == (Outcome.error, f"RuntimeError: {GLOO} (rank 0)")


def test_the_rank_that_failed_earliest_is_the_cause():
    late, early = failed("ValueError", "late", 0, 2, failed_s=7.5), failed("KeyError", "'early'", 1, 2, failed_s=7.0)
    assert classify(answered(late, early, exit_code=1)) == (Outcome.error, "KeyError: 'early' (rank 1)")


def test_the_killed_rank_is_the_cause_if_torchrun_reports_several():
    both = TORCHRUN.replace("[1]:", "[1]:\n  rank      : 0 (local_rank: 0)").replace("-15", "-9").format(code=1)
    assert classify(Facts(exit_code=1, log_tail=log(both)))[1].startswith("rank 0 was ended by SIGKILL")
    after = TORCHRUN.replace("[1]:", "[1]:\n  rank      : 0 (local_rank: 0)").format(code=-9)
    assert classify(Facts(exit_code=1, log_tail=log(after)))[1].startswith("rank 1 was ended by SIGKILL")


def test_the_killed_rank_is_the_cause_if_each_node_has_a_torchrun_report():
    other = TORCHRUN.replace("rank      : 1 (local_rank: 1)", "rank      : 0 (local_rank: 0)").format(code=1)
    for reports in (TORCHRUN.format(code=-9) + other, other + TORCHRUN.format(code=-9)):
        assert classify(Facts(exit_code=1, log_tail=log(reports)))[1].startswith("rank 1 was ended by SIGKILL")


def test_torchrun_report_before_the_tail_of_the_log_is_found():
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


def test_output_of_the_program_is_quoted_rather_than_that_of_srun():
    said = "python: can't open file 'x.py'\nsrun: error: n2: task 1: Exited with exit code 2\n"
    assert classify(Facts(exit_code=2, log_tail=said))[1] == "exit status 2: python: can't open file 'x.py'"
    assert classify(Facts(exit_code=1, log_tail="srun: error: Unable to allocate\n"))[1].endswith("Unable to allocate")


def test_reason_names_the_node_of_a_rank_if_there_are_several_nodes():
    results = failed("ValueError", "bad", 1, 2, host="n2"), answer(0, 2, host="n1")
    assert classify(answered(*results))[1] == "ValueError: bad (rank 1 on n2)"


def test_reason_names_the_rank_that_the_kernel_killed_for_memory():
    outcome, reason = classify(Facts(exit_code=1, oom_kills=1, log_tail=log(TORCHRUN.format(code=-9))))
    assert outcome is Outcome.host_oom
    assert "rank 1 first" in reason


def test_a_rank_without_a_window_is_ok_if_another_rank_has_one():
    steps = {"end_s": [0.1 * n for n in range(1, 60)], "samples": [10.0] * 59, "warmup": 3}
    first = answer(0, 2, steps=steps)
    second = answer(1, 2, window=None, throughput_per_s=None, steps={**steps, "warmup": 59})
    assert classify(answered(first, second)) == (Outcome.ok, "")
    second.steps["end_s"] = []
    assert classify(answered(first, second))[0] is Outcome.error


def test_sigterm_sent_by_torchrun_is_not_the_cause():
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
def test_signal_of_a_child_is_read_from_the_error_of_its_parent(line):
    name, message = line.split(": ", 1)
    for facts in (answered(failed(name, message), exit_code=1, log_tail=log(line)), Facts(exit_code=1, log_tail=log(line))):
        outcome, reason = classify(facts)
        assert outcome is Outcome.crash
        assert "SIGSEGV" in reason


def test_message_of_a_cpp_exception_decides_the_outcome_and_is_quoted():
    said = "terminate called after throwing an instance of 'c10::Error'\n  what():  CUDA out of memory. x\n"
    assert classify(Facts(signal="SIGABRT", log_tail=said)) == (Outcome.device_oom, "CUDA out of memory. x")
    said = said.replace("CUDA out of memory", "watchdog timeout")
    outcome, reason = classify(Facts(signal="SIGABRT", log_tail=said))
    assert outcome is Outcome.crash
    assert reason.endswith("SIGABRT in phase spawn: watchdog timeout. x")


def test_reason_is_the_original_exception_of_a_loader_worker():
    inner = log("ValueError: bad sample").replace("Traceback", "Original Traceback")
    facts = answered(failed("ValueError", f"Caught ValueError in DataLoader worker process 0.\n{inner}"))
    assert classify(facts) == (Outcome.error, "ValueError: bad sample")


def test_reason_is_the_traceback_of_the_user_not_of_torchrun():
    user = log("[rank1]: ValueError: bad shape".removeprefix("[rank1]: "))
    tail = log("torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ", before=user)
    assert classify(Facts(exit_code=1, log_tail=tail)) == (Outcome.error, "ValueError: bad shape")


def test_a_missed_deadline_is_a_timeout_that_names_the_limit():
    assert classify(Facts(cause="deadline", deadline="compile: it did not finish within 300 s")) == (
        Outcome.timeout,
        "compile: it did not finish within 300 s",
    )


def test_timeout_after_a_process_ran_out_of_memory_is_out_of_memory():
    facts = Facts(cause="deadline", deadline="step: x", log_tail=log("torch.OutOfMemoryError: CUDA out of memory."))
    assert classify(facts)[0] is Outcome.device_oom
    tail = "DataLoader worker (pid 7) is killed by signal: Killed.\n"
    assert classify(Facts(cause="deadline", deadline="step: x", log_tail=tail, oom_kills=1))[0] is Outcome.host_oom


def test_reason_without_a_result_is_the_exception_in_the_log():
    assert classify(Facts(exit_code=1, log_tail=log("ModuleNotFoundError: No module named 'torch'"))) == (
        Outcome.error,
        "ModuleNotFoundError: No module named 'torch'",
    )


def test_reason_without_a_traceback_is_the_last_line_of_the_log():
    facts = Facts(exit_code=2, log_tail="usage: train.py\ntrain.py: error: unrecognized arguments: --x\n")
    assert classify(facts) == (Outcome.error, "exit status 2: train.py: error: unrecognized arguments: --x")


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({}, "harness not loaded"),
        ({"is_harness_seen": True, "phase": "spawn"}, "no Python process of the program imported torch"),
        ({"is_harness_seen": True, "phase": "init"}, "no optimizer step was seen"),
    ],
)
def test_success_without_harness_torch_or_steps_is_an_error(facts, reason):
    found = classify(Facts(exit_code=0, **facts))
    assert found[0] is Outcome.error
    assert found[1].startswith(reason)


def test_reason_says_if_the_harness_failed_to_start():
    tail = log("KeyError: 'x'", before="autotune: the harness failed to start\n")
    outcome, reason = classify(Facts(exit_code=0, log_tail=tail, is_harness_seen=True))
    assert (outcome, reason) == (Outcome.error, "harness not loaded: the harness failed to start")


def test_reason_uses_the_singular_for_one_step():
    assert "after 1 optimizer step," in classify(Facts(exit_code=0, is_harness_seen=True, phase="warmup", num_steps=1))[1]


def test_reason_of_a_timeout_names_where_the_program_hung():
    facts = Facts(cause="deadline", deadline="step: nothing moved within 3 s", hang="user code at train.py:3 in f")
    assert classify(facts) == (Outcome.timeout, "step: nothing moved within 3 s; user code at train.py:3 in f")


def test_a_logged_exception_of_a_successful_program_is_not_the_reason():
    facts = Facts(exit_code=0, is_harness_seen=True, phase="warmup", num_steps=4, log_tail=log("ValueError: survived"))
    assert "after 4 optimizer steps" in classify(facts)[1]


def test_failure_of_a_child_process_is_the_reason_even_if_the_program_succeeded():
    tail = log("RuntimeError: view size is not compatible", before="Process Process-2:\n")
    facts = Facts(exit_code=0, is_harness_seen=True, phase="first_batch", log_tail=tail)
    assert classify(facts) == (Outcome.error, "RuntimeError: view size is not compatible")


def test_reason_names_an_unusable_result_file():
    outcome, reason = classify(Facts(exit_code=0, problems=["result.rank0.json cannot be used: half"], is_harness_seen=True))
    assert outcome is Outcome.error
    assert "result.rank0.json" in reason


def test_reason_names_a_rank_without_a_result():
    facts = answered(answer(0, 3), answer(2, 3), exit_code=0)
    assert classify(facts) == (Outcome.error, "no result from rank 1")


WEIGHTS_ONLY = (
    "Weights only load failed. This file can still be loaded, to do so you have two options, \x1b[1mdo those steps only if you "
    "trust the source of the checkpoint\x1b[0m. \n\t(1) Re-running `torch.load` with `weights_only` set to `False` will likely "
    "succeed.\n\t(2) Alternatively, please check the recommended steps in the following error message.\n\tWeights"
    "Unpickler error: Unsupported global: GLOBAL __main__.A was not an allowed global by default."
)


def test_a_long_library_message_is_quoted_without_colours_and_cut_at_a_sentence():
    outcome, reason = classify(answered(failed("_pickle.UnpicklingError", WEIGHTS_ONLY)))
    assert outcome is Outcome.error
    assert "two options, do those steps only if you trust the source of the checkpoint. (1) Re-running" in reason
    assert reason.endswith("in the following error message. …")


def test_cpp_frames_are_removed_from_the_message_of_an_exception():
    message = "it failed\nhere is why\nException raised from get at x.cpp:3 (most recent call first):\nframe #0: f() + 0x1"
    assert classify(answered(failed("RuntimeError", message)))[1] == "RuntimeError: it failed here is why"


def test_a_coloured_traceback_in_a_log_is_understood():
    text = log("\x1b[1;35mValueError\x1b[0m: \x1b[35mbad shape\x1b[0m").replace("Traceback", "\x1b[1mTraceback")
    assert classify(Facts(exit_code=1, is_harness_seen=True, log_tail=text)) == (Outcome.error, "ValueError: bad shape")


@pytest.mark.parametrize("size", [10, 5000])
def test_advice_of_autotune_is_never_cut(size):
    facts = answered(failed("OSError", f"[Errno 24] Too many open files: {'x' * size}"))
    assert classify(facts)[1].endswith(" (open files ran out; raise the hard limit, see `ulimit -Hn`)")
    facts = answered(failed(UNMEASURABLE, "advice " * size))
    assert classify(facts)[1] == ("advice " * size).strip()
    facts = Facts(cause="deadline", deadline="step: nothing moved", log_tail=log(f"ValueError: {'word ' * size}"))
    assert classify(facts)[1].startswith("step: nothing moved; the log's last exception: ValueError: word")


def test_a_reason_is_a_single_short_line():
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
def test_raised_in_finds_exceptions_only_after_a_traceback(text, line):
    assert raised_in(text) == line
