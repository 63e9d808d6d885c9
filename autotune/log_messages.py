"""Recognises how Python and libraries report failures, and finds the user's own exception in a log."""

from __future__ import annotations

import re

# Exception classes and messages that always mean out of memory. torch.AcceleratorError and NCCL report it in the message only.
OOM_CLASSES = frozenset({"OutOfMemoryError"})
DEVICE_OOM = re.compile(
    r"(?:CUDA|HIP|XPU) out of memory|torch\.(?:cuda\.)?OutOfMemoryError"
    r"|(?:CUDA|HIP)(?: driver)? error: out of memory|cudaErrorMemoryAllocation"
    r"|CUDA_ERROR_OUT_OF_MEMORY|Triton Error \[CUDA\]: out of memory|Cuda failure \d* ?'out of memory'"
    r"|(?:NCCL|nccl)[^\n]*(?:Failed to CUDA calloc|out of memory)|Failed to CUDA calloc"
)
# torch prints this at the end of a CUDA graph's capture if an error occurred during it. The traceback shows that error.
CAPTURE_FAILED = re.compile(
    r"CUDA error: (?:operation failed due to a previous error during capture|capturing stream has unjoined work)"
)
# A call that pins host memory. CUDA reports a lack of pinned memory in the same words as a lack of device memory.
PINNING = re.compile(r"in pin memory thread|\.pin_memory\(|, in pin_memory$", re.MULTILINE)
HOST_OOM_CLASSES = frozenset({"MemoryError", "bad_alloc"})
HOST_OOM = re.compile(
    r"DefaultCPUAllocator: (?:can't allocate memory|not enough memory)|std::bad_alloc|\[Errno 12\] Cannot allocate memory"
)
SHARED_MEMORY = re.compile(
    r"unable to allocate shared memory\s?\(shm\)|out of shared memory|killed by signal: Bus error"
    r"|unable to (?:write to|open|mmap|resize) [^\n]*(?:shm|torch_)"
    r"|failed to extend /dev/shm/|posix_fallocate failed ?: No space left on device"  # NCCL's
)
# Libraries use these messages for a lack of memory and for a missing kernel. Only further evidence shows which one is meant.
SUSPECTED_OOM = re.compile(
    r"CUBLAS_STATUS_(?:ALLOC_FAILED|NOT_INITIALIZED)|CUDNN_STATUS_(?:ALLOC_FAILED|NOT_SUPPORTED|INTERNAL_ERROR)"
    r"|CU(?:FFT|SOLVER|SPARSE)_(?:STATUS_)?ALLOC_FAILED|[Uu]nable to find an engine"
    r"|INTERNAL ASSERT FAILED[^\n]*CachingAllocator|could not (?:create|execute) a primitive"
    r"|Thread creation failed|can't start new thread|failed to map segment from shared object(?!: Operation not permitted)"
)
WORKER_KILLED = re.compile(r"DataLoader worker \(pid\(?s?\)?[^)]*\) (?:is killed by signal: Killed|exited unexpectedly)")
WORKER_DIED = re.compile(r"DataLoader worker \(pid\(?s?\)?[^)]*\) (?:is killed by signal|exited unexpectedly)")
WORKER_SIGNALS = {"SIGKILL": "Killed", "SIGBUS": "Bus error"}  # signal -> torch's words for it in messages
TOO_MANY_FILES = re.compile(r"\[Errno 24\]|Too many open files")
NO_INPUT = re.compile(r"EOF when reading a line")  # input() at the end of standard input
# A program asked its terminal for something, or called `stty size` and did not expect an empty answer.
NO_TERMINAL = re.compile(r"Inappropriate ioctl for device|\bstty size\b")
# Messages that only report another process's failure: a rank that lost its peer, a parent whose child has ended.
PEER_LOST = re.compile(
    r"Connection (?:reset|closed|refused)|connectFullMesh|[Gg]loo|DistBackendError|ProcessGroup|NCCL|Broken pipe|heartbeat",
)
PARENT_CLASSES = frozenset({"ChildFailedError", "SignalException", "CalledProcessError", "ProcessExitedException"})
# How subprocess and torch.multiprocessing.spawn name the signal that ended a child. For torchrun see process_ends.py.
RELAYED_NAME = re.compile(r"(?:died with <Signals\.|terminated with signal )(SIG[A-Z0-9]+)")
CPP_SAID = re.compile(r"what\(\):\s*(\S.*)")  # line that C++ prints for an uncaught exception, before SIGABRT
CPP_FRAMES = re.compile(r"Exception raised from |frame #\d+: ")  # torch appends these lines to a message; they are not quoted
RANK_PREFIX = re.compile(r"^\[rank\d+\]:[ ]?", re.MULTILINE)  # torch puts it before every line of a traceback
TRACEBACK = re.compile(r"^[ |+-]*(?:Original )?Traceback \(most recent call last\):", re.MULTILINE)
RAISED = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:: .*)?$")  # "torch.OutOfMemoryError: CUDA out of memory ..."


# multiprocessing writes this when a process's target raises; the parent continues.
CHILD_FAILED = re.compile(r"^Process \S+:\s*\nTraceback", re.MULTILINE)


def raised_in(log: str) -> str:
    """Returns the final line of a log's last user traceback, such as "ValueError: bad shape"; "" without a traceback.

    Skips torchrun's own traceback, which follows the traceback of its worker.
    """
    log = RANK_PREFIX.sub("", log)
    for start in reversed([match.end() for match in TRACEBACK.finditer(log)]):
        lines = (line.lstrip(" |+-") if "|" in line[:8] else line for line in log[start:].splitlines())
        line = next((line.strip() for line in lines if RAISED.match(line)), "")
        if line and "ChildFailedError" not in line and "torch.distributed.elastic" not in line:
            return line
    return ""


# The harness's frames in a traceback of the user's program.
OUR_FRAMES = re.compile(r'^ +File "[^"\n]*/autotune/harness/[^"\n]*", line [^\n]*\n(?: {4,}[^\n]*\n)*', re.MULTILINE)
# Files of Python itself and of installed packages, and code that torch's compiler has generated (named by a hash in base 32).
LIBRARY_FILE = re.compile(r"/(?:site|dist)-packages/|/lib/python\d[\d.]*/|^<frozen |/[a-z2-7]{2}/c[a-z2-7]{51}\.py$")
FRAME = re.compile(r'^(?:\[rank\d+\]:)? +File "([^"]+)", line')
