"""Each rule finds its cause, with place and size, in documents that show it, and finds nothing in healthy documents."""

from dataclasses import replace
from pathlib import Path

import pytest

from autotune.explain import checks, explanation
from autotune.explain.breakdown import COLLECTIVES
from autotune.explain.evidence import Operations, operations_of
from autotune.explain.findings import RULES, found, ranked
from autotune.explain.findings.finding import Without
from autotune.explain.findings.pipeline import supply_s
from autotune.explain.findings.restarts import PERSISTENT
from autotune.explain.gains import Gain, gain_of_part
from autotune.explain.table import Table
from autotune.explain.tables import Tables
from autotune.explained import WITHOUT
from autotune.harness.explain.documents import (
    BACKWARD,
    FORWARD,
    INPUT,
    MAIN,
    OPTIMIZER,
    OTHER,
    TRANSFER,
    WORKER,
    Compiled,
    Restarts,
)
from autotune.knobs.base import HostContext
from tests.explain import made

FORWARD_LINE = made.line("return self.head(x)", 0.04, function="Net.forward", line=70, phase=FORWARD)
BACKWARD_LINE = made.line("loss.backward()", 0.05, line=80, phase=BACKWARD)
DOMAINS = {"loader.num_workers": [0, 1, 2], "precision.amp": ["off", "bf16"], "optimizer.implementation": ["default", "fused"]}
GPU = HostContext(num_cores=8, has_cuda=True)
SLOW_LOADER = {"num_workers": 1, "wait_s": 0.05, "phases_s": made.phases(input=0.05)}


def causes(evidence):
    return [finding.cause for finding in found(evidence)]


def top(evidence):
    return found(evidence)[0]


def test_a_healthy_program_has_no_findings():
    documents = made.lines(FORWARD_LINE, BACKWARD_LINE, made.line("running += loss.item()", 0.0003))
    assert found(made.evidence(documents)) == []


def test_there_are_no_findings_without_documents():
    assert found(made.evidence()) == []


def test_a_python_loop_in_the_step_is_found(tmp_path):
    file = tmp_path / "train.py"
    file.write_text("for x in loader:\n    loss.backward()\n    for i in range(9):\n        total += i * i\n")
    waste = made.line("total += i * i", 0.02, file=str(file), line=4)
    finding = top(made.evidence(made.lines(waste, FORWARD_LINE, BACKWARD_LINE)))
    assert (finding.cause, finding.where) == ("Python in the step", f"{file}:4")
    assert finding.gain.kind == "floor"
    assert finding.gain.low < 0.25 <= finding.gain.mid + 1e-9 < finding.gain.high


def test_the_training_loop_itself_is_not_found_as_a_loop_in_the_step(tmp_path):
    file = tmp_path / "train.py"
    file.write_text("for x in loader:\n    loss = step(x)\n    loss = loss * 2\n")
    whole = made.line("loss = step(x)", 0.0, file=str(file), line=2, total_s=0.09)
    line = made.line("loss = torch.mul(loss, 2)", 0.02, file=str(file), line=3, phase=FORWARD)
    assert causes(made.evidence(made.lines(whole, line))) == []


def test_a_loop_over_torch_layers_is_not_a_finding(tmp_path):
    file = tmp_path / "model.py"
    file.write_text("for layer in self.layers:\n    x = layer(x)\n")
    call = made.line("x = layer(x)", 0.06, file=str(file), line=2, phase=FORWARD, callee="linear.py:Linear.forward")
    inner = made.line(
        "return F.linear(x)",
        0.06,
        file="/lib/torch/nn/modules/linear.py",
        is_own=False,
        function="Linear.forward",
        phase=FORWARD,
    )
    assert causes(made.evidence(made.lines(call, inner))) == []
    by_itself = made.line("x = torch.tanh(layer(x)) * 0.9", 0.06, file=str(file), line=2, phase=FORWARD)
    assert causes(made.evidence(made.lines(by_itself))) == []


def test_a_batch_that_several_ranks_share_counts_once_as_in_a_rate():
    """With tensor parallelism over two ranks, a step seemed half as long in the trial as in the pass "lines"."""

    def samples(num, world_size=4, **more):
        return made.evidence(*(made.lines(rank=rank, world_size=world_size, **more) for rank in range(num))).samples

    assert samples(4) == samples(3) == 4 * 32
    assert samples(4, ranks_per_batch=2) == samples(1, ranks_per_batch=2) == 2 * 32
    assert samples(4, ranks_per_batch=4) == samples(2, ranks_per_batch=4) == 32
    first = made.lines(world_size=2, unit_source="loader")
    other = made.lines(rank=1, world_size=2, samples=50 * 16.0, unit_source="forward calls")  # gets its samples from rank 0
    assert made.evidence(first, other).samples == 32


def test_fetching_a_number_for_each_parameter_is_found(tmp_path):
    line = made.line("total += p.grad.norm().item()", 0.02, line=40)
    documents = made.lines(line, BACKWARD_LINE, syncs=[made.site("item", 60.0, 0.001, at=line)])
    assert top(made.evidence(documents)).cause == "item in the step"
    assert top(made.evidence(documents)).where == "train.py:40"


def test_a_line_that_calls_the_training_loop_of_a_library_is_not_a_finding():
    """Seen with rl_zoo3: `model.learn(...)` was blamed for fetching numbers, with the time of the forward and backward pass."""
    seconds = {FORWARD: 0.01, BACKWARD: 0.02, OPTIMIZER: 0.02, OTHER: 0.04}
    rows = [
        made.line("model.learn(steps)", each, line=9, phase=phase, callee="ppo.py:PPO.train") for phase, each in seconds.items()
    ]
    documents = made.lines(*rows, syncs=[made.site("item", 4.0, 1e-5, at=rows[-1])])
    assert causes(made.evidence(documents)) == []
    own = made.lines(rows[-1], BACKWARD_LINE, syncs=[made.site("item", 4.0, 1e-5, at=rows[-1])])
    assert causes(made.evidence(own)) == ["item in the step"]


def test_comparing_tensors_in_a_loop_is_python_on_a_cpu_and_a_sync_on_a_gpu(tmp_path):
    file = tmp_path / "train.py"
    file.write_text("for i in rows:\n    for j in rows:\n        if labels[i] == labels[j]:\n            pairs += 1\n")
    line = made.line("if labels[i] == labels[j]:", 0.03, file=str(file), line=3)
    documents = made.lines(line, BACKWARD_LINE, syncs=[made.site("bool", 900.0, 0.002, at=line)])
    assert causes(made.evidence(documents)) == ["Python in the step"]
    busy = [Operations(count=9, busy_s=0.05)]
    assert "item in the step" in causes(made.evidence(documents, host_context=GPU, operations=busy))


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("os.fsync(file.fileno())", "logging in the step"),
        ("logger.info('step %d', step)", "logging in the step"),
        ("gc.collect()", "garbage collection"),
        ("score = compute_accuracy(outputs, labels)", "metrics in the step"),
        ("time.sleep(0.01)", "Python in the step"),
        ("digest = hashlib.sha256(data).hexdigest()", "Python in the step"),
        ("table = preprocess(symmetric(rows))", "Python in the step"),  # contains "roc" and "metric" only inside other words
        ("score = BinaryAUROC()(outputs, labels) + roc_auc_score(labels, outputs)", "metrics in the step"),
        ("self.log('loss', loss)", "logging in the step"),
    ],
)
def test_other_work_of_the_training_thread_is_classified_by_its_line(text, cause):
    assert causes(made.evidence(made.lines(made.line(text, 0.02, function="train"), BACKWARD_LINE))) == [cause]


@pytest.mark.parametrize(
    "text",
    ["x = self.logits(x)", "return torch.log(x)", "x = F.log_softmax(x, -1)", "x = x.log()", "x = self.prior.log_prob(x)"],
)
def test_logarithms_are_not_logging(text):
    line = made.line(text, 0.02, function="Net.forward", phase=FORWARD)
    assert causes(made.evidence(made.lines(line, BACKWARD_LINE))) == []


def test_lines_of_one_function_form_one_finding():
    lines = [made.line(text, 0.01, function="log", line=number) for number, text in enumerate(["f.write(x)", "f.flush()"])]
    findings = found(made.evidence(made.lines(*lines, BACKWARD_LINE)))
    assert len(findings) == 1
    assert findings[0].gain.mid == pytest.approx(0.25)


def test_automatic_garbage_collection_is_found_by_its_seconds():
    finding = top(made.evidence(made.lines(FORWARD_LINE, gc_s=0.01, gc_count=1.0)))
    assert (finding.cause, finding.where) == ("garbage collection", "garbage collector")
    assert finding.gain.low < finding.gain.mid == pytest.approx(1 / 0.9 - 1)


@pytest.mark.parametrize(
    ("stages", "line", "cause", "where"),
    [
        (
            [made.stage("decode", 0.003)],
            made.worker_line("image = Image.open(f).convert()", 0.09),
            "slow decode",
            "train.py:30",
        ),
        (
            [made.stage("transform: Blur", 0.003, file="/home/me/train.py", line=8, function="Blur.__call__")],
            made.worker_line("total += value", 0.09, function="Blur.__call__", line=9),
            "slow augmentation",
            "train.py:9",
        ),
        (
            [made.stage("collate", 0.003, file="/home/me/train.py", line=20, function="collate")],
            made.worker_line("flat.append(v)", 0.09, function="collate", line=22),
            "slow collate",
            "train.py:22",
        ),
        (
            [made.stage("item", 0.003, blocked_s=0.0028)],
            made.worker_line("data = f.read()", 0.09),
            "slow storage",
            "train.py:30",
        ),
        ([made.stage("item", 0.003)], made.worker_line("x = decode(x)", 0.09, function="decode"), "slow decode", "train.py:30"),
        ([made.stage("item", 0.003)], made.worker_line("x = x * 1.01", 0.09), "slow augmentation", "train.py:30"),
    ],
)
def test_the_slow_stage_of_a_slow_loader_is_found(stages, line, cause, where):
    documents = made.lines(line, FORWARD_LINE, stages=(*stages, made.stage("read", 0.0001)), **SLOW_LOADER)
    finding = top(made.evidence(documents))
    assert (finding.cause, finding.where) == (cause, where)
    assert finding.gain.kind == "predicted"
    assert finding.gain.low <= finding.gain.mid <= finding.gain.high


def test_library_transforms_form_one_finding_that_names_the_slowest():
    stages = (made.stage("transform: Blur", 0.002), made.stage("transform: Jitter", 0.001), made.stage("collate", 0.0001))
    (finding, *_) = found(made.evidence(made.lines(FORWARD_LINE, stages=stages, **SLOW_LOADER)))
    assert (finding.cause, finding.where) == ("slow augmentation", "transform: Blur")
    assert finding.evidence.startswith("transforms (Blur 2.00 ms, Jitter 1.00 ms): 3.00 ms of 3.10 ms per sample")


def test_on_shared_cores_a_step_without_worker_load_takes_the_main_thread_cpu_time():
    """Two workers keep two cores busy. Without their work, a step still takes the 30 ms that the training thread computes."""
    given = {"stages": (made.stage("decode", 0.006),), "num_workers": 2, "wait_s": 0.03, "phases_s": made.phases(input=0.03)}
    record = made.record(regime="shared")
    finding = top(made.evidence(made.lines(FORWARD_LINE, busy_cpu_s=0.03, **given), record=record))
    assert finding.gain.mid == pytest.approx(100 / 30 - 1)
    assert finding.gain.high == pytest.approx(100 / (0.75 * 30) - 1)
    assert 0 < finding.gain.low < 0.6
    unknown = top(made.evidence(made.lines(FORWARD_LINE, **given), record=record))
    assert unknown.gain.mid > 3


def test_on_shared_cores_workers_also_delay_the_receipt_of_batches():
    """The workers keep up, but the step waits for its core for 10 ms, and the receipt of a batch for 9.6 ms."""
    received = made.stage("hand-over", 0.0004, where=MAIN, blocked_s=0.0003)
    given = {"num_workers": 2, "wait_s": 0.02, "phases_s": made.phases(input=0.02), "busy_cpu_s": 0.07}
    documents = made.lines(FORWARD_LINE, stages=(made.stage("collate", 0.0015), received), **given)
    finding = top(made.evidence(documents, record=made.record(regime="shared")))
    assert finding.cause == "slow collate"
    assert finding.gain.mid == pytest.approx(1 / (1 - 0.9 * (0.1 + 0.096)) - 1)


def test_a_loader_that_keeps_up_is_not_a_finding():
    documents = made.lines(
        FORWARD_LINE, stages=(made.stage("decode", 0.0008),), num_workers=1, wait_s=0.012, phases_s=made.phases(input=0.012)
    )
    record = made.record(regime="separate", loader_rate=1250.0)
    assert found(made.evidence(documents, record=record)) == []


def test_without_workers_both_a_faster_stage_and_more_workers_are_advised():
    stages = (made.stage("decode", 0.001, where=MAIN), made.stage("item", 0.0005, where=MAIN, blocked_s=0.0005))
    documents = made.lines(
        made.line("x = decode(x)", 0.03, phase=INPUT),
        FORWARD_LINE,
        stages=stages,
        wait_s=0.05,
        phases_s=made.phases(input=0.05),
    )
    workers, decode = found(made.evidence(documents, domains=DOMAINS))[:2]
    assert (workers.cause, decode.cause) == ("too few workers", "slow decode")  # workers could hide most of the decoding
    assert (decode.gain.kind, decode.gain.low) == ("bound", 0.0)
    assert "input takes 50.0 ms of a step's 100 ms (50 %)" in decode.evidence
    assert "too few workers" not in causes(made.evidence(documents))  # the number of workers cannot be set here
    alone = top(made.evidence(documents))
    assert (alone.cause, alone.gain.kind, alone.gain.mid) == ("slow decode", "floor", decode.gain.mid)
    assert alone.gain.low > 0.3
    one_thread = made.evidence(documents, domains=DOMAINS, knobs={"threads.intra": 1})  # a core is free for workers
    assert top(one_thread).cause == "too few workers"
    assert top(one_thread).gain.mid > workers.gain.mid


def test_workers_that_wait_for_storage_need_more_workers():
    stages = (made.stage("item", 0.003, blocked_s=0.0029),)
    documents = made.lines(made.worker_line("data = f.read()", 0.09), stages=stages, **SLOW_LOADER)
    finding = next(one for one in found(made.evidence(documents, domains=DOMAINS)) if one.cause == "too few workers")
    assert (finding.knob, finding.value) == ("loader.num_workers", 2)


def test_a_slow_optimizer_update_is_found_as_unfused_optimizer():
    documents = made.lines(FORWARD_LINE, phases_s=made.phases(optimizer=0.03))
    finding = top(made.evidence(documents, knobs={"optimizer.implementation": "default"}, domains=DOMAINS))
    assert (finding.cause, finding.knob, finding.value) == ("unfused optimizer", "optimizer.implementation", "fused")
    assert finding.gain.low > 0.1


def test_float32_products_are_found_if_the_cpu_has_16_bit_units():
    documents = made.lines(FORWARD_LINE, phases_s=made.phases(backward=0.05))
    given = {"knobs": {"precision.amp": "off"}, "domains": DOMAINS, "memory": [made.memory(flops=1e10)]}
    assert causes(made.evidence(documents, **given)) == ["32-bit arithmetic"]
    without = HostContext(num_cores=2, cpu_isa=frozenset({"avx2"}))
    assert causes(made.evidence(documents, **given, host_context=without)) == []
    small = {**given, "memory": [made.memory(flops=1e6)]}
    assert causes(made.evidence(documents, **small)) == []


def products(narrow: float, casts: float = 0.0) -> list:
    """Returns documents of a program: matrix products take 40 ms in 32 bits, `narrow` s in 16 bits; casts take `casts` s."""
    timed = {"float32": 0.04, "bfloat16": narrow, "casts": casts, "timed_frac": 1.0}
    return [made.memory(flops=1e10, products=timed)]


@pytest.mark.parametrize("isa", [frozenset({"avx2"}), frozenset({"amx_bf16"})])
def test_predicted_gain_of_16_bits_follows_the_timed_products_of_the_program(isa):
    documents = made.lines(FORWARD_LINE, phases_s=made.phases(backward=0.05))
    seconds = {"aten::mm": 0.08, "aten::gelu": 0.02}
    by_operator = [
        {"operator": name, "kind": "matmul", "seconds": each, "phase": "forward", "count": 1.0}
        for name, each in seconds.items()
    ]
    by_operator.append(
        {**by_operator[0], "operator": "aten::add_", "kind": "elementwise", "seconds": 0.05, "phase": "optimizer"}
    )
    traced = Operations(count=9, by_operator=by_operator)
    given = {
        "knobs": {"precision.amp": "off"}, "domains": DOMAINS, "operations": [traced],
        "host_context": HostContext(num_cores=2, cpu_isa=isa),
    }  # fmt: skip
    finding = top(made.evidence(documents, **given, memory=products(0.01, casts=0.01)))
    assert (finding.cause, finding.knob, finding.value) == ("32-bit arithmetic", "precision.amp", "bf16")
    # Products take 80 of 100 ms. Upper end: three quarters of them are saved, and half of the other 20 ms. Lower end: with the
    # casts, half of the products' time is saved, and only half of this counts.
    assert finding.gain.low == pytest.approx(100 / (100 - 20) - 1)
    assert finding.gain.high == pytest.approx(100 / (100 - 60 - 10) - 1)
    assert finding.gain.mid == pytest.approx(100 / (100 - 45) - 1)
    assert "4 times as fast" in finding.basis
    assert causes(made.evidence(documents, **given, memory=products(0.05))) == []
    slow_casts = top(made.evidence(documents, **given, memory=products(0.01, casts=0.1)))
    assert slow_casts.gain.low == 0.0
    attends = Operations(count=9, by_operator=[*by_operator, {**by_operator[0], "operator": "aten::_attention"}])
    with_attention = top(made.evidence(documents, **{**given, "operations": [attends]}, memory=products(0.01)))
    assert with_attention.evidence.startswith("89 % of the step")  # 160 of 180 ms, timed in both precisions
    untraced = top(made.evidence(documents, **{**given, "operations": []}, memory=products(0.01)))
    assert untraced.evidence.startswith("40 % of the step")


def emulated(narrow_s: float, *, domain: tuple[str, ...] = ("off",), host: HostContext = made.HOST) -> list:
    """Returns the findings on a program that computes in bf16: products take `narrow_s` s, in 32 bits 10 ms."""
    documents = made.lines(FORWARD_LINE, phases_s=made.phases(forward=0.05, backward=0.05))
    timed = {"float32": 0.01, "bfloat16": narrow_s, "casts": 0.001, "timed_frac": 1.0}
    given = {"memory": [made.memory(flops=1e10, products_in_16_bits=timed)], "knobs": {"precision.amp": "bf16"}}
    every = found(made.evidence(documents, domains={"precision.amp": domain}, host_context=host, **given))
    return [one for one in every if one.cause == "slow 16-bit arithmetic"]


def test_products_that_are_slower_in_the_programs_16_bits_are_found():
    """A CPU without bf16 instructions, or a T4, emulates the format, although torch says that it is supported."""
    (finding,) = emulated(0.08)
    assert (finding.knob, finding.value) == ("precision.amp", "off")
    assert finding.evidence == "80 % of the step in 16-bit products, which take 8 times as long as in 32 bits"
    assert finding.gain.mid == pytest.approx(100 / (100 - 70) - 1)
    assert finding.gain.low == pytest.approx(100 / (100 - 35) - 1)
    assert finding.gain.high == pytest.approx(100 / (100 - 87.5) - 1)
    assert emulated(0.011) == []
    (on_gpu,) = emulated(0.08, domain=("off", "fp16"), host=GPU)
    assert (on_gpu.knob, on_gpu.value) == ("precision.amp", "fp16")
    (in_code,) = emulated(0.08, domain=(), host=GPU)
    assert in_code.code == "train in float32, or in float16 with a GradScaler, which this GPU computes fast"


MOVES = {
    "operator": "aten::native_batch_norm", "kind": "normalisation", "bound": "memory", "roofline_frac": 0.8, "count": 1.0,
}  # fmt: skip
ADDS = {**MOVES, "operator": "aten::add_", "kind": "elementwise"}


def test_operators_bound_by_memory_bandwidth_are_found():
    domains = {"compile.mode": ["off", "default"]}

    def of(*rows, **given):
        operations = Operations(count=9, by_operator=list(rows))
        return made.evidence(made.lines(FORWARD_LINE), operations=[operations], **given)

    finding = top(of({**MOVES, "seconds": 0.03}, {**ADDS, "seconds": 0.02}, domains=domains, knobs={"compile.mode": "off"}))
    assert (finding.cause, finding.where, finding.gain.kind) == ("memory-bound operators", "aten::native_batch_norm", "bound")
    assert (finding.knob, finding.value) == ("compile.mode", "default")
    assert finding.gain.low == 0.0
    assert finding.gain.high == pytest.approx(1 / (1 - 0.8 * 0.5) - 1)
    assert finding.evidence.startswith("50.0 ms of a step's 100 ms (50 %)")
    assert finding.evidence.endswith("moving memory: aten::native_batch_norm 30.0 ms, aten::add_ 20.0 ms")
    assert top(of({**MOVES, "seconds": 0.03})).code.startswith("fuse them")
    harmless = {"bound": "compute", "roofline_frac": 0.1, "phase": "optimizer", "kind": "matmul", "seconds": 0.005}
    for key, value in harmless.items():
        assert causes(of({**MOVES, "seconds": 0.03, key: value})) == [], key


def test_memory_bound_operators_are_summed_by_name_and_by_their_tensors():
    rows = [{**ADDS, "operator": f"aten::{name}", "shapes": f"{size}, 8", "seconds": seconds} for name, size, seconds in (
        ("mul", "32x512x3072", 0.01), ("copy_", "16384x3072", 0.01), ("mul", "16384x50257", 0.008),
        ("add", "1x8", 0.004), ("pow", "1x8", 0.001), ("tanh", "2 tensors", 0.001),
    )]  # fmt: skip
    finding = top(made.evidence(made.lines(FORWARD_LINE), operations=[Operations(count=9, by_operator=rows)]))
    said = (
        "aten::mul 18.0 ms, aten::copy_ 10.0 ms, aten::add 4.00 ms and 2 more; 20.0 ms on 32x512x3072, 8.00 ms on 16384x50257"
    )
    assert finding.where == "aten::mul"
    assert finding.evidence.endswith(said)


def test_conversions_at_40_percent_of_the_documented_bandwidth_count_on_a_gpu():
    rows = [{**MOVES, "operator": "aten::copy_", "kind": "copy and layout", "roofline_frac": 0.44, "seconds": 0.03}]
    given = {"operations": [Operations(count=9, by_operator=rows, busy_s=0.098)], "host_context": GPU}
    on_gpu = made.evidence(made.lines(FORWARD_LINE, device="cuda", device_phases_s=made.phases()), **given)
    assert causes(on_gpu) == ["memory-bound operators"]
    assert causes(made.evidence(made.lines(FORWARD_LINE), operations=[Operations(count=9, by_operator=rows)])) == []


# The products of gpt2_small in a step of 108 ms on an H200: 16,384 tokens, and a vocabulary of 50,257.
SLOW = {
    "operator": "aten::mm", "kind": "matmul", "phase": "forward", "shapes": "16384x768, 768x50257", "dtype": "bfloat16",
    "bound": "compute", "count": 1.0, "seconds": 0.0133, "flops": 1.265e12, "roofline_frac": 0.096,
}  # fmt: skip
FAST = {**SLOW, "shapes": "3072, 16384x768, 768x3072", "operator": "aten::addmm", "flops": 0.93e12, "seconds": 0.00136}


def unaligned(*rows, device="cuda", **more):
    operations = Operations(count=9, by_operator=list(rows), busy_s=0.098, **more)
    documents = made.lines(FORWARD_LINE, device=device, device_phases_s=made.phases() if device == "cuda" else None)
    given = made.evidence(documents, operations=[operations], host_context=GPU if device == "cuda" else made.HOST)
    return [finding for finding in found(given) if finding.cause == "unaligned products"]


def test_products_slowed_by_a_size_that_is_no_multiple_of_16_bytes_are_found():
    (finding,) = unaligned(SLOW, FAST)
    assert finding.where == "aten::mm (16384x768, 768x50257)"
    assert "13.3 ms of a step's 100 ms (13 %), 95.1 TFLOP/s instead of 684 TFLOP/s" in finding.evidence
    assert "pad 50257 to 50304 " in finding.code
    aligned_s = SLOW["flops"] * 50264 / 50257 / (FAST["flops"] / FAST["seconds"])
    assert finding.gain.high == pytest.approx(1 / (1 - 1.05 * (SLOW["seconds"] - aligned_s) / made.STEP_S) - 1, rel=0.001)
    assert finding.gain.low < finding.gain.mid < finding.gain.high
    (alone,) = unaligned(SLOW)  # no aligned product shows how fast they can be
    assert alone.basis == "half of the peak of the GPU"
    (rounded,) = unaligned({**SLOW, "dtype": "float32"}, {**FAST, "dtype": "float32"}, is_tf32=True)
    assert rounded.gain.mid == pytest.approx(finding.gain.mid, rel=0.001)


def test_most_that_compiling_gains_includes_the_padding_of_products():
    rows = [SLOW, FAST, {**ADDS, "seconds": 0.03}]
    documents = made.lines(FORWARD_LINE, device="cuda", device_phases_s=made.phases())
    given = {
        "operations": [Operations(count=9, by_operator=rows, busy_s=0.1)],
        "host_context": GPU,
        "knobs": {"compile.mode": "off"},
    }
    without = made.evidence(documents, **given)
    both = made.evidence(documents, **given, domains={"compile.mode": ["off", "default"]})
    padding, fusing, compiling = (
        next(one for one in found(evidence) if one.cause == cause).gain.high
        for evidence, cause in (
            (both, "unaligned products"), (without, "memory-bound operators"), (both, "memory-bound operators"),
        )
    )  # fmt: skip
    assert 1 - 1 / (1 + compiling) == pytest.approx(2 - 1 / (1 + padding) - 1 / (1 + fusing))


def test_products_that_no_padding_would_speed_up_are_not_called_unaligned():
    harmless = {
        "shapes": "16384x768, 768x50264", "dtype": "float32", "bound": "memory", "seconds": 0.002, "kind": "convolution",
        "flops": None,
    }  # fmt: skip
    for key, value in harmless.items():
        assert unaligned({**SLOW, key: value}, FAST) == [], key
    assert unaligned(SLOW, FAST, device="cpu") == []
    assert unaligned(SLOW, FAST, is_distorted=True) == []


def test_operators_are_not_judged_if_the_profiler_distorts_the_step():
    distorted = Operations(count=9, by_operator=[{**MOVES, "seconds": 0.03}], is_distorted=True)
    assert causes(made.evidence(made.lines(FORWARD_LINE), operations=[distorted])) == []


def test_many_small_operators_are_launch_bound():
    operations = (Operations(count=9000, by_operator=[]),)
    given = {"domains": {"loader.batch_size": [32, 64, 128]}, "knobs": {"loader.batch_size": 32}, "operations": operations}
    finding = top(made.evidence(made.lines(FORWARD_LINE), **given))
    assert (finding.cause, finding.where, finding.knob, finding.value) == (
        "launch-bound",
        "train.py:70",
        "loader.batch_size",
        128,
    )


def test_finding_for_many_small_operators_reports_the_idle_time_of_the_gpu():
    seen = made.evidence(made.lines(FORWARD_LINE), host_context=GPU, operations=[Operations(count=9000, busy_s=0.02)])
    assert top(seen).evidence == "9000 operators per step; the GPU waits for the host for 80.0 ms of a step's 100 ms (80 %)"


def test_many_small_operators_without_a_setting_to_change_get_code_advice():
    operations = (Operations(count=9000, by_operator=[]),)
    finding = top(made.evidence(made.lines(FORWARD_LINE), operations=operations))
    assert (finding.cause, finding.knob, finding.gain.kind, finding.gain.low) == ("launch-bound", "", "bound", 0.0)
    assert finding.code.startswith("call fewer and larger operators")


@pytest.mark.parametrize(
    ("input_s", "remedy"), [(0.0, "loader.batch_size"), (0.025, "loader.batch_size"), (0.025, "compile.mode")]
)
def test_time_of_operator_calls_and_input_does_not_exceed_the_step(input_s, remedy):
    """Calling 100,000 operators at 8 us each would take 0.8 s, which is longer than the step."""
    documents = made.lines(FORWARD_LINE, wait_s=input_s, phases_s=made.phases(input=input_s))
    domains = {"loader.batch_size": [32, 64, 128]} if remedy == "loader.batch_size" else {"compile.mode": ["off", "default"]}
    given = {"domains": domains, "operations": [Operations(count=1e5)], "knobs": {"loader.batch_size": 32}}
    finding = top(made.evidence(documents, **given))
    share = 1 - input_s / made.STEP_S
    assert (finding.cause, finding.knob) == ("launch-bound", remedy)
    assert finding.evidence.endswith(f"calling them takes up to {100 * share:.3g} ms of a step's 100 ms ({100 * share:.0f} %)"
                                     .replace("75 ms", "75.0 ms"))  # fmt: skip
    assert 0 < finding.gain.low < finding.gain.mid < finding.gain.high
    assert finding.gain.high <= (1 / (1 - share) - 1 if input_s else 3.0) + 1e-9


def test_compute_time_of_operators_does_not_count_as_call_overhead():
    """Of 9,000 operators, a hundred compute for 50 ms in all: half of the step of 100 ms is not the cost of calling them."""
    products = {"operator": "aten::mm", "kind": "matmul", "phase": "forward", "count": 100.0, "seconds": 0.0508}
    small = {"operator": "aten::add", "kind": "elementwise", "phase": "forward", "count": 8900.0, "seconds": 0.03}
    given = {"domains": {"compile.mode": ["off", "default"]}}
    for rows, expected in (([small], ["launch-bound"]), ([products, small], [])):
        operations = [Operations(count=9000, by_operator=rows)]
        assert causes(made.evidence(made.lines(FORWARD_LINE), operations=operations, **given)) == expected


def test_operators_of_a_replaceable_optimizer_do_not_count_as_launch_bound():
    """Of 11,000 operators, 6,000 update the weights: compiling the model saves none of these calls."""
    rows = [
        {"operator": "aten::add", "kind": "elementwise", "phase": "forward", "count": 5000.0, "seconds": 0.02},
        {"operator": "aten::mul_", "kind": "elementwise", "phase": "optimizer", "count": 6000.0, "seconds": 0.04},
    ]
    domains = {"compile.mode": ["off", "default"], "optimizer.implementation": ["loop", "foreach"]}
    documents = made.lines(FORWARD_LINE, phases_s=made.phases(optimizer=0.05))
    given = {"domains": domains, "operations": [Operations(count=11_000, by_operator=rows)]}
    evidence = {one.cause: one.evidence for one in found(made.evidence(documents, **given))}
    assert evidence["unfused optimizer"].startswith("the update takes 50.0 ms")
    assert evidence["launch-bound"].startswith("5000 operators per step; calling them takes up to 40.0 ms")


def test_a_gpu_that_waits_for_input_is_not_launch_bound():
    documents = made.lines(FORWARD_LINE, wait_s=0.06, phases_s=made.phases(input=0.06))
    given = {"domains": {"compile.mode": ["off", "default"]}, "host_context": GPU}
    for busy_s, expected in ((0.03, []), (0.01, ["launch-bound"])):
        assert causes(made.evidence(documents, operations=[Operations(count=9, busy_s=busy_s)], **given)) == expected


def test_a_gpu_that_waits_for_the_host_for_a_third_is_launch_bound_if_the_calls_explain_it():
    """In a trace of a V100 that waited for 42 % of a step with 10,500 operators, nothing was found."""
    domains = {"compile.mode": ["off", "default"]}

    def of(count, **more):
        operations = [Operations(count=count, busy_s=0.6 * made.STEP_S, **more)]
        return causes(made.evidence(made.lines(FORWARD_LINE), operations=operations, host_context=GPU, domains=domains))

    assert of(5000) == ["launch-bound"]
    assert of(500) == []  # they take about 4 ms of the 40 ms
    assert of(5000, waited_for_s=0.02) == []  # for these 20 ms the host waits for the GPU, as to fetch a number


def test_a_gpu_that_communicates_is_not_launch_bound():
    """With gradients that take longer to add up over GPUs than to compute, GPUs wait for one another, not for their hosts."""
    row = {"operator": "aten::mm", "kind": "matmul", "phase": "forward", "count": 9.0, "seconds": 0.03}
    domains = {"precision.amp": ["off", "bf16"], "compile.mode": ["off", "default"]}
    slow = made.line("print(loss)", 0.03)

    def of(*communicating_s):
        ranks = [Operations(count=9, by_operator=[row], busy_s=0.03, communicating_s=seconds) for seconds in communicating_s]
        given = {"operations": ranks, "host_context": GPU, "domains": domains, "knobs": {"precision.amp": "off"}}
        return {one.cause: one for one in found(made.evidence(made.lines(FORWARD_LINE, BACKWARD_LINE, slow), **given))}

    both = of(0.06, 0.06)
    assert "launch-bound" not in both
    assert "32-bit arithmetic" in both
    assert both["logging in the step"].gain.high == pytest.approx(1 / 0.9 - 1)  # hidden, except for 10 ms
    other = of(0.06, 0.001)  # rank 0 waits for rank 1, which waits for its host
    seen = other["launch-bound"].evidence
    assert seen == "9 operators per step; the GPU waits for the host for 69.0 ms of a step's 100 ms (69 %)"
    assert "32-bit arithmetic" not in other


def test_exposed_collectives_of_a_trace_are_time_in_which_the_gpu_communicates():
    row = {"rank": 0, "operator": "aten::mm", "phase": "forward", "count": 9.0, "device_self_s": 0.03, "host_self_s": 0.01}
    seconds = {"compute_32bit": 0.03, COLLECTIVES: 0.06, "h2d": 0.001, "synchronise": 0.004, "other": 0.005}
    breakdown = [{"rank": 0, "category": category, "seconds": each} for category, each in seconds.items()]

    def of(device_self_s):
        operators = [{**row, "device_self_s": device_self_s}]
        rows = {"operators": operators, "breakdown": breakdown}
        tables = {name: Table(name=name, title="", columns={}, rows=rows[name]) for name in rows}
        (one,) = operations_of(Tables(tables=tables, distortion={0: 2.0}))
        return one.busy_s, one.communicating_s, one.copying_s, one.uploading_s, one.waited_for_s, one.is_distorted

    assert of(0.03) == (0.03, 0.06, 0.001, 0.001, 0.004, False)  # a profiler slows the host, not the GPU
    assert of(None) == (None, 0.0, 0.0, 0.0, 0.0, True)  # on a CPU, the training thread runs the collectives


def test_layout_conversions_lead_to_the_advice_of_channels_last():
    def of(layout_s, domains, **knobs):
        given = {"operations": [Operations(count=9, busy_s=0.1, layout_s=layout_s)], "host_context": GPU, "domains": domains}
        return found(made.evidence(made.lines(FORWARD_LINE), knobs=knobs, **given))

    domains = {"layout.channels_last": [False, True]}
    (finding,) = of(0.02, domains)
    assert (finding.cause, finding.knob, finding.value) == ("layout conversions", "layout.channels_last", True)
    assert finding.evidence == "20.0 ms of a step's 100 ms (20 %) are spent on converting images between NCHW and NHWC"
    assert (finding.gain.low, finding.gain.mid, finding.gain.high) == pytest.approx((1 / 0.9 - 1, 1 / 0.8 - 1, 1 / 0.6 - 1))
    (finding,) = of(0.02, domains, **{"layout.channels_last": True})
    assert (finding.knob, finding.code) == ("", "keep model and images in torch.channels_last throughout")
    assert of(0.0, domains) == []


def test_less_gpu_work_gains_nothing_if_the_gpu_waits_for_the_host():
    """Measured on an H100 that was idle for 84 % of a step: 11 % were predicted for 16 bits, but autocast adds launches."""
    row = {"operator": "aten::mm", "kind": "matmul", "phase": "forward", "count": 9.0, "seconds": 0.01}
    domains = {"precision.amp": ["off", "bf16"], "layout.channels_last": [False, True]}

    def of(busy_s):
        operations = [Operations(count=9, by_operator=[row], busy_s=busy_s, layout_s=0.01)]
        given = {"operations": operations, "host_context": GPU, "domains": domains, "knobs": {"precision.amp": "off"}}
        return {one.cause: one.gain for one in found(made.evidence(made.lines(FORWARD_LINE, BACKWARD_LINE), **given))}

    assert list(of(0.02)) == ["launch-bound"]
    full, partly = of(0.1), of(0.06)
    for cause in ("32-bit arithmetic", "layout conversions"):
        assert full[cause].low > 0 == partly[cause].low
        assert partly[cause].mid < full[cause].mid


def test_many_gpu_launches_lead_to_the_advice_of_cuda_graphs():
    def of(*modes):
        given = {"operations": [Operations(count=2000, busy_s=0.01)], "host_context": GPU, "domains": {"compile.mode": modes}}
        return top(made.evidence(made.lines(FORWARD_LINE), **given)).value

    assert of("off", "default", "reduce-overhead") == "reduce-overhead"
    assert of("off", "default") == "default"


def test_recompilation_of_a_whole_model_is_located_at_the_line_that_calls_it():
    again = [{"file": "", "line": 0, "function": "", "reason": "0/1: size mismatch", "seconds": 2.0, "count": 3}]
    documents = made.lines(FORWARD_LINE, compiled=Compiled(again, [], 1.0))
    assert top(made.evidence(documents)).where == "train.py:70"


def test_a_rank_without_a_document_does_not_make_the_pass_seem_slow():
    one_of_two = made.evidence(made.lines(world_size=2), record=made.record(value=640.0))
    assert one_of_two.slowdown == pytest.approx(1.0)
    both = made.evidence(made.lines(world_size=2), made.lines(rank=1, world_size=2), record=made.record(value=640.0))
    assert both.slowdown == pytest.approx(1.0)


def test_supply_of_all_ranks_is_compared_with_the_samples_of_all_ranks():
    one_of_two = made.evidence(made.lines(world_size=2), record=made.record(loader_rate=640.0))
    both = made.evidence(made.lines(world_size=2), made.lines(rank=1, world_size=2), record=made.record(loader_rate=640.0))
    assert supply_s(one_of_two) == pytest.approx(supply_s(both))


def test_recompilation_within_the_observed_steps_is_found():
    again = {
        "file": "/home/me/model.py",
        "line": 5,
        "function": "forward",
        "reason": "size mismatch",
        "seconds": 1.0,
        "count": 4,
    }
    finding = top(made.evidence(made.lines(FORWARD_LINE, compiled=Compiled(recompilations=[again], seconds=1.0))))
    assert (finding.cause, finding.where) == ("recompilation", "model.py:5")
    phases = made.phases(forward=0.05, backward=0.05)  # forward: 20 ms of compiling, 25 ms of work, 5 ms of guards
    documents = made.lines(FORWARD_LINE, compiled=Compiled(recompilations=[again], seconds=1.0), phases_s=phases)
    gain = top(made.evidence(documents)).gain
    assert (gain.low, gain.mid, gain.high) == pytest.approx((100 / 90 - 1, 100 / 77.5 - 1, 100 / 72 - 1))
    assert finding.evidence == "4 recompilations so far; compiling takes 20.0 ms per step in 50 observed steps: size mismatch"


def test_recompilations_before_the_observed_steps_count_only_at_the_limit_of_torch():
    """Most programs recompile once, at the smaller last batch of the first epoch."""
    again = [{"file": "model.py", "line": 5, "function": "forward", "reason": "size mismatch", "seconds": 9.0, "count": 1}]
    phases = made.phases(forward=0.05, backward=0.05)  # forward takes longer than half of backward, as in many programs

    def of(compiled):
        return causes(made.evidence(made.lines(FORWARD_LINE, compiled=compiled, phases_s=phases)))

    assert of(Compiled(recompilations=again)) == []
    assert of(Compiled(recompilations=again, is_limit_hit=True)) == ["recompilation"]


def test_graph_breaks_cost_at_least_the_lines_that_break():
    entry = {"file": "/home/me/model.py", "line": 9, "reason": "Unsupported: print\n  Hint: none", "count": 1}
    other = {**entry, "line": 20, "count": 3}
    prints = made.line("print(x.mean())", 0.01, file="/home/me/model.py", line=9, function="Net.forward", phase=FORWARD)
    documents = made.lines(FORWARD_LINE, prints, compiled=Compiled(graph_breaks=[other, entry]))
    finding = next(one for one in found(made.evidence(documents)) if one.cause == "graph breaks")
    assert (finding.where, finding.gain.kind) == ("model.py:9", "floor")
    assert finding.evidence.startswith("4 graph breaks; their lines take 10.0 ms of a step's 100 ms (10 %): Unsupported: print")
    assert finding.gain.low == pytest.approx(1 / 0.9 - 1)
    assert finding.gain.low < finding.gain.mid < finding.gain.high
    cheap = made.lines(FORWARD_LINE, compiled=Compiled(graph_breaks=[entry]))
    assert causes(made.evidence(cheap)) == []


def test_allocator_retries_name_the_rank_and_lead_to_expandable_segments():
    given = {"host_context": GPU, "domains": {"memory.allocator": ["default", "expandable_segments"]}}
    memory = [made.memory(), made.memory(rank=1, device="cuda", alloc_retries=4, fragmentation_frac=0.3)]
    finding = top(made.evidence(made.lines(FORWARD_LINE), memory=memory, **given))
    assert (finding.cause, finding.where, finding.value) == ("allocator retries", "rank 1", "expandable_segments")
    assert finding.evidence.startswith("2 retries per step")
    assert finding.evidence.endswith("30 % of the reserved memory is unused")
    assert finding.gain.mid == pytest.approx(1 / (1 - 2 * 0.005 / 0.1) - 1)
    assert "expandable_segments" in top(made.evidence(made.lines(FORWARD_LINE), memory=memory, host_context=GPU)).code


def test_page_faults_lead_to_the_malloc_setting():
    domains = {"memory.malloc": ["glibc", "glibc_keep"]}
    document = made.lines(FORWARD_LINE, page_faults=10_000.0)
    finding = top(made.evidence(document, domains=domains))
    assert (finding.cause, finding.knob, finding.value) == ("page faults", "memory.malloc", "glibc_keep")
    assert finding.evidence.startswith("10,000 pages per step")
    assert finding.gain.mid == pytest.approx(1 / (1 - 10_000 * 1.3e-6 / 0.1) - 1)
    assert "MALLOC_MMAP_MAX_=0" in top(made.evidence(document)).code
    assert causes(made.evidence(document, host_context=GPU)) == []
    assert causes(made.evidence(made.lines(FORWARD_LINE, page_faults=1_000.0))) == []


def test_on_a_gpu_host_work_counts_only_while_the_device_is_idle():
    work = made.line("history.append(sum(window))", 0.03, line=55)

    def gain(busy_s):
        on_device = {"forward": 0.07, "other": 0.03}  # the phases of the device always cover the whole step
        lines = made.lines(FORWARD_LINE, work, device_phases_s=on_device)
        evidence = made.evidence(lines, operations=[Operations(count=9, busy_s=busy_s)], host_context=GPU)
        return next((one.gain.mid for one in found(evidence) if one.where == "train.py:55"), 0.0)

    assert gain(0.02) == pytest.approx(1 / 0.7 - 1)
    assert gain(0.09) == pytest.approx(1 / 0.9 - 1)
    assert gain(0.1) == 0.0


def test_on_a_gpu_the_phases_are_those_of_the_device():
    # The training thread runs ahead of the GPU and waits for it in the optimizer phase.
    on_device = {"input": 0.0, "forward": 0.03, "backward": 0.06, "optimizer": 0.004, "other": 0.006}
    host = made.phases(input=0.01, optimizer=0.08)
    given = {"host_context": GPU, "domains": DOMAINS, "knobs": {"precision.amp": "off"}}

    def of(**more):
        return made.evidence(made.lines(FORWARD_LINE, BACKWARD_LINE, phases_s=host, wait_s=0.01, **more), **given)

    seen = of(device_phases_s=on_device)
    assert causes(seen) == ["32-bit arithmetic"]
    assert top(seen).evidence.startswith("63 % of the step in float32 products")
    rounded = replace(seen, operations=[Operations(count=9, busy_s=0.09, is_tf32=True)])
    assert top(rounded).evidence.startswith("63 % of the step in float32 products, as TF32")
    assert (seen.input_s, seen.wait_s) == (0.0, 0.0)
    assert explanation.entry(seen, "best", [], passes={}, notes=[])["phases_s"] == on_device
    assert "unfused optimizer" in causes(of())


def test_on_gpus_ranks_are_compared_by_the_phases_of_their_devices():
    ranks = [
        made.lines(FORWARD_LINE, rank=rank, world_size=2, phases_s=made.phases(optimizer=0.09), device_phases_s=seconds)
        for rank, seconds in enumerate(({"forward": 0.02, "backward": 0.08}, {"forward": 0.05, "backward": 0.05}))
    ]
    finding = next(one for one in found(made.evidence(*ranks, host_context=GPU)) if one.cause == "rank skew")
    assert finding.where == "rank 1"
    assert finding.evidence.startswith("rank 1 takes longer than the others by 30.0 ms")


def test_gain_of_a_blocking_copy_is_limited_by_the_idle_time_of_the_gpu():
    copy = made.line("images = images.to(device)", 0.08)

    def gain(busy_s):
        documents = made.lines(FORWARD_LINE, syncs=[made.site("copy", 1, 0.08, at=copy)])
        evidence = made.evidence(documents, operations=[Operations(count=9, busy_s=busy_s)], host_context=GPU)
        return next(one.gain for one in found(evidence) if one.cause == "synchronous copies")

    assert gain(0.5 * made.STEP_S).high == pytest.approx(1.0)
    assert gain(None).high == pytest.approx(4.0)


def test_a_gpu_that_copies_is_not_launch_bound_and_copies_it_waits_for_are_found():
    """ResNet-18 in 16 bits on an H100 takes about as long to copy a batch of float32 images as to compute with it."""
    line = made.line("images = images.to(device, non_blocking=True)", 0.001, phase=TRANSFER)
    domains = {"compile.mode": ["off", "default"], "loader.device_prefetch": [False, True]}

    def of(copying_s, *, knobs=None, syncs=()):
        busy = Operations(count=9, busy_s=0.03, copying_s=copying_s, uploading_s=copying_s)
        given = {"host_context": GPU, "domains": domains, "knobs": knobs or {"loader.pin_memory": True}}
        return found(made.evidence(made.lines(line, FORWARD_LINE, syncs=list(syncs)), operations=[busy], **given))

    assert [one.cause for one in of(0.0)] == ["launch-bound"]
    (finding,) = of(0.06)
    assert (finding.cause, finding.where, finding.knob) == ("exposed copies", "train.py:10", "loader.device_prefetch")
    assert finding.evidence == "the GPU only copies from the host for 60.0 ms of a step's 100 ms (60 %)"
    assert finding.gain.high == pytest.approx(1 / 0.7 - 1)  # they can be hidden only while the GPU computes
    (finding,) = of(0.06, knobs={"loader.pin_memory": True, "loader.device_prefetch": True})
    assert finding.knob == ""
    assert "fewer bytes" in finding.code
    waited = of(0.06, syncs=[made.site("copy", 1, 0.06, at=line)])
    assert [one.cause for one in waited] == ["synchronous copies"]
    assert waited[0].gain.high == pytest.approx(1 / 0.4 - 1)


def test_fragmentation_is_found_if_memory_is_full_and_a_larger_batch_would_help():
    def of(busy_s=0.05, **more):
        document = {"device": "cuda", "peak_bytes": 7 * 10**9, "capacity_bytes": 10**10, "fragmentation_frac": 0.3, **more}
        busy = Operations(count=9, busy_s=busy_s)
        return made.evidence(made.lines(FORWARD_LINE), memory=[made.memory(**document)], operations=[busy], host_context=GPU)

    finding = top(of())
    assert (finding.cause, finding.where) == ("memory fragmentation", "rank 0")
    assert "30 % of 10 GB" in finding.evidence
    assert 0.1 < finding.gain.mid < 0.2  # a batch 1.43 times as large; half of the step does not grow with it
    for change in ({"capacity_bytes": 10**11}, {"fragmentation_frac": 0.05}, {"busy_s": 0.1}, {"busy_s": None}):
        assert causes(of(**change)) == []


def test_the_slow_rank_and_its_line_are_named():
    slow = made.line("time.sleep(0.03)", 0.03, line=55)
    ranks = [
        made.lines(FORWARD_LINE, rank=0, world_size=2, phases_s=made.phases(backward=0.06)),
        made.lines(FORWARD_LINE, slow, rank=1, world_size=2, phases_s=made.phases(backward=0.03, other=0.03)),
    ]
    finding = next(one for one in found(made.evidence(*ranks)) if one.cause == "rank skew")
    assert finding.where == "rank 1 at train.py:55"
    assert finding.gain.high == pytest.approx(0.1 / 0.07 - 1)  # the extra work is gone
    assert finding.gain.mid == pytest.approx(0.1 / (0.1 - 0.7 * 0.015) - 1)  # the ranks share the extra work


@pytest.mark.parametrize(("host_context", "usual"), [(made.HOST, 0.7), (GPU, 1.0)])
def test_gain_of_balance_is_within_its_interval_if_several_ranks_are_slow(host_context, usual):
    ranks = [
        made.lines(FORWARD_LINE, rank=rank, world_size=4, phases_s=seconds, device_phases_s=seconds)
        for rank, seconds in enumerate(made.phases(backward=waiting_s) for waiting_s in (0.0, 0.02, 0.05, 0.05))
    ]
    finding = next(one for one in found(made.evidence(*ranks, host_context=host_context)) if one.cause == "rank skew")
    gain = finding.gain
    assert gain.low < gain.mid < gain.high
    assert gain.mid == pytest.approx(0.1 / (0.1 - usual * 0.03) - 1)  # all ranks take their mean, 70 ms
    assert gain.high == pytest.approx(0.1 / 0.06 - 1)  # the mean of the other ranks


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_line_that_slows_the_input_of_one_rank_is_named(num_workers):
    where = WORKER if num_workers else MAIN
    load = made.line("return load(index)", 0.03, line=30, phase=INPUT, where=where)
    loop = made.line("for batch in loader:", 0.0301 if num_workers else 0.001, line=50, phase=INPUT)
    given = {"world_size": 2, "num_workers": num_workers}
    ranks = [
        made.lines(FORWARD_LINE, rank=0, phases_s=made.phases(backward=0.06), **given),
        made.lines(FORWARD_LINE, load, loop, rank=1, phases_s=made.phases(backward=0.03, input=0.03), **given),
    ]
    finding = next(one for one in found(made.evidence(*ranks)) if one.cause == "rank skew")
    assert finding.where == "rank 1 at train.py:30"
    assert "in input: `return load(index)`" in finding.evidence


def test_exposed_communication_is_found():
    told = {"exposed_s": 0.02, "gradient_bytes": 40e6}
    ranks = [made.lines(FORWARD_LINE, rank=rank, world_size=2, communication=told) for rank in (0, 1)]
    finding = top(made.evidence(*ranks))
    assert (finding.cause, finding.gain.kind) == ("communication", "bound")


def test_gains_below_three_percent_are_not_claimed():
    assert causes(made.evidence(made.lines(made.line("gc.collect()", 0.0025), BACKWARD_LINE))) == []


def test_findings_are_sorted_by_the_mean_of_gain_and_lower_end():
    documents = made.lines(made.line("gc.collect()", 0.01), made.line("f.flush()", 0.03, function="log"))
    assert causes(made.evidence(documents)) == ["logging in the step", "garbage collection"]
    gains = [(0.05, 0.09), (0.01, 0.4), (0.2, 0.25), (-0.9, 0.3), (0.0, 0.02)]
    made_of = [
        replace(top(made.evidence(documents)), gain=Gain(low=low, mid=mid, high=2.0, kind="bound")) for low, mid in gains
    ]
    assert [(one.gain.low, one.gain.mid) for one in ranked(made_of)] == [(0.2, 0.25), (0.01, 0.4), (-0.9, 0.3), (0.05, 0.09)]


def test_generated_compiler_code_is_not_a_finding():
    line = made.line("buf = extern(x)", 0.05, file="/tmp/torchinductor_me/p4/c.py", function="call")
    assert causes(made.evidence(made.lines(line))) == []


def test_a_finding_survives_a_round_trip_through_json():
    finding = top(made.evidence(made.lines(made.line("gc.collect()", 0.02))))
    assert type(finding).from_json(finding.as_json()) == finding


def test_a_new_rule_requires_a_new_test_in_this_file():
    own = Path(__file__).read_text(encoding="utf-8")
    assert [cause for cause in RULES if f'"{cause}"' not in own] == []


@pytest.mark.parametrize(("measured", "is_held"), [(0.41, True), (0.29, False), (0.5, False)])
def test_a_prediction_holds_if_the_measurement_is_inside_its_interval(measured, is_held):
    assert Gain(low=0.3, mid=0.38, high=0.47, kind="predicted").holds(measured) is is_held


@pytest.mark.parametrize(
    ("stages", "cause", "skipped"),
    [
        ([made.stage("decode", 0.003)], "slow decode", ("decode",)),
        ([made.stage("transform: Blur", 0.002), made.stage("transform: Jitter", 0.001)], "slow augmentation", 2),
        ([made.stage("collate", 0.003)], "slow collate", ("collate",)),
        ([made.stage("item", 0.003, blocked_s=0.0028)], "slow storage", ("item",)),  # all of a sample is skipped
        ([made.stage("item", 0.003, blocked_s=0.0028), made.stage("decode", 0.004)], "slow storage", None),
        ([made.stage("decode", 0.004, blocked_s=0.0024)], "slow decode", None),  # waiting for storage is another cause
    ],
)
def test_a_slow_stage_names_the_stages_to_skip_for_a_measurement(stages, cause, skipped):
    names = tuple(stage.name for stage in stages)
    every = found(made.evidence(made.lines(FORWARD_LINE, stages=(*stages, made.stage("read", 0.0001)), **SLOW_LOADER)))
    finding = next(one for one in every if one.cause == cause)
    if skipped is None:
        assert finding.without is None
        return
    assert finding.without.stages == (names if skipped == 2 else skipped)
    assert finding.without.gain.mid >= finding.gain.mid  # a remedy removes only a part of the cost
    assert finding.without.gain.kind == "predicted"
    assert finding.from_json(finding.as_json()) == finding


def test_a_remedy_gains_less_than_the_stage_costs():
    without = Without(stages=("decode",), gain=Gain(low=0.5, mid=0.8, high=1.1, kind="predicted"), remaining=(0.5, 0.2, 0.0))
    gain = without.remedied(Gain(low=0.9, mid=1.0, high=1.1, kind="measured"))  # about half of the step
    assert gain.low == pytest.approx(1 / (1 - 0.5 * (1 - 1 / 1.9)) - 1)
    assert gain.mid == pytest.approx(1 / (1 - 0.8 * 0.5) - 1)
    assert gain.high == pytest.approx(1.1)
    assert gain.kind == "predicted"
    assert without.remedied(Gain(low=-0.2, mid=-0.1, high=0.1, kind="measured")).mid == 0.0


def test_code_of_the_data_set_may_give_two_findings():
    lines = (made.worker_line("x = decode(x)", 0.06), made.worker_line("x = x * 1.01", 0.03, line=31))
    stages = (made.stage("item", 0.003), made.stage("read", 0.0001))
    every = {one.cause: one for one in found(made.evidence(made.lines(*lines, FORWARD_LINE, stages=stages, **SLOW_LOADER)))}
    decode, augment = every["slow decode"], every["slow augmentation"]
    assert (decode.where, augment.where) == ("train.py:30", "train.py:31")
    assert "item: 2.00 ms of 3.10 ms" in decode.evidence
    assert "item: 1.00 ms of 3.10 ms" in augment.evidence
    assert augment.without is None, "most of a sample is decoding"
    share = 2.0 / 3.1
    assert decode.without.stages == ("item",)
    assert decode.without.remaining == pytest.approx((1 - 0.5 * share, 1 - 0.8 * share, 1 - share))
    assert decode.without.gain.mid > decode.gain.mid, "skipping the item skips more than its decoding"


def test_gain_of_the_limiting_part_ends_where_another_part_limits_the_rate():
    """The workers take 1 s for a step, the training thread a third of this. Removing all work of the workers gains 200 %."""
    whole = Gain(low=2.0, mid=2.0, high=2.0, kind="measured")
    gain = gain_of_part(whole, (0.9, 0.5, 0.1), "predicted", limiting=1.0)
    assert gain.low == pytest.approx(1 / 0.9 - 1)
    assert gain.mid == pytest.approx(1.0), "a loader twice as fast"
    assert gain.high == pytest.approx(2.0), "the training thread limits the rate"
    assert gain_of_part(whole, (0.9, 0.5, 0.1), "predicted").mid == pytest.approx(0.5)


@pytest.mark.parametrize(("regime", "limiting"), [("separate", 3.0 / 3.1), ("shared", None)])
def test_workers_on_separate_cores_are_the_limiting_part(regime, limiting):
    stages = (made.stage("decode", 0.003), made.stage("collate", 0.0001))
    documents = made.lines(FORWARD_LINE, stages=stages, **SLOW_LOADER)
    finding = top(made.evidence(documents, record=made.record(regime=regime)))
    assert finding.without.limiting == (limiting and pytest.approx(limiting))
    assert finding.from_json(finding.as_json()) == finding


def test_measured_pairs_that_vary_too_much_do_not_change_the_prediction():
    line = made.line("file.flush(); os.fsync(file)", 0.02, function="Journal.write", line=12)
    finding = top(made.evidence(made.lines(line, FORWARD_LINE, BACKWARD_LINE)))
    for low, high, is_known in ((-0.5, 1.2, False), (0.2, 0.3, True)):
        measured = Gain(low=low, mid=0.25, high=high, kind="measured")
        checked = checks.with_check(finding, checks.check_of(finding, measured, trial=0, how=WITHOUT, num_pairs=2))
        assert (checked.gain != finding.gain) is is_known
        assert checked.basis.endswith("vary too much for a better estimate") is not is_known


def test_a_finding_about_lines_names_the_function_to_skip_for_a_measurement():
    line = made.line("file.flush(); os.fsync(file)", 0.02, function="Journal.write", line=12)
    documents = made.lines(line, FORWARD_LINE, BACKWARD_LINE)
    finding = top(made.evidence(documents))
    assert finding.cause == "logging in the step"
    assert finding.without.stages == ("function: /home/me/train.py: Journal.write",)
    assert finding.without.name == "train.py: Journal.write"
    assert finding.without.gain == replace(finding.gain, kind="predicted")


def test_lines_of_a_function_with_one_purpose_form_one_finding():
    flush = made.line("os.fsync(file)", 0.01, function="Journal.write", line=12)
    norms = made.line("total += sum(x * x for x in norms)", 0.01, function="Journal.write.<locals>.<genexpr>", line=10)
    (finding,) = found(made.evidence(made.lines(flush, norms, FORWARD_LINE, BACKWARD_LINE)))
    assert (finding.cause, finding.where) == ("logging in the step", "train.py:12")
    assert finding.evidence == "20.0 ms of a step's 100 ms (20 %) `os.fsync(file)`, 2 lines of Journal.write"
    assert finding.without.stages == ("function: /home/me/train.py: Journal.write",)


def test_a_few_logging_lines_do_not_make_a_function_a_logging_function():
    flush = made.line("os.fsync(file)", 0.004, function="Journal.write", line=12)
    flush, waste = (replace(line, function="Journal.step") for line in (flush, made.line("total += x * x", 0.02, line=10)))
    assert causes(made.evidence(made.lines(flush, waste, FORWARD_LINE, BACKWARD_LINE))) == ["Python in the step"]


@pytest.mark.parametrize("function", ["Logger.log", "Journal.write", "log_losses", "_report"])
def test_waiting_in_a_function_named_after_logging_is_logging(function):
    line = made.line("time.sleep(0.03)", 0.02, function=function)
    assert causes(made.evidence(made.lines(line, FORWARD_LINE, BACKWARD_LINE))) == ["logging in the step"]


@pytest.mark.parametrize("function", ["Flow.log_prob", "_log_softmax", "log_sum_exp"])
def test_a_function_named_after_a_logarithm_is_not_logging(function):
    line = made.line("time.sleep(0.03)", 0.02, function=function)
    assert causes(made.evidence(made.lines(line, FORWARD_LINE, BACKWARD_LINE))) == ["Python in the step"]


@pytest.mark.parametrize("function", ["main.<locals>.log", "<locals>.log", "<lambda>"])
def test_reason_for_not_skipping_a_nested_function_is_given(function):
    line = made.line("file.flush(); os.fsync(file)", 0.02, function=function)
    finding = top(made.evidence(made.lines(line, FORWARD_LINE, BACKWARD_LINE)))
    assert finding.without is None
    assert finding.unskippable == f"{function} is {'a lambda' if function == '<lambda>' else 'defined inside another function'}"
    assert finding.from_json(finding.as_json()) == finding


def test_samples_of_an_iterable_data_set_are_not_skipped():
    stages = (made.stage("item", 0.002, file="/home/me/train.py", function="Data.__getitem__"),)
    finding = top(made.evidence(made.lines(FORWARD_LINE, stages=stages, is_stream=True, **SLOW_LOADER)))
    assert finding.without is None
    assert finding.unskippable == "samples of an iterable data set cannot be used again"


def test_files_with_the_same_name_are_distinguished_by_their_folders():
    others = [made.line("file.flush()", 0.02, function="load", file=f"/home/me/src/{name}/data.py") for name in "ab"]
    names = [one.without.name for one in found(made.evidence(made.lines(*others, FORWARD_LINE)))]
    assert names == ["src/a/data.py: load", "src/b/data.py: load"]


@pytest.mark.parametrize(
    "other",
    [
        made.line("loss = self.model(x)", 0.03, function="Journal.write", phase=FORWARD),  # the function does more than log
        made.line("for x in loader:", 0.0, function="Journal.write", total_s=0.095),  # the function contains the training loop
        made.line("optimizer.step()", 0.001, function="Journal.write", phase=OPTIMIZER),  # without this, nothing trains
    ],
)
def test_a_function_that_also_trains_or_computes_is_not_skipped(other):
    line = made.line("file.flush(); os.fsync(file)", 0.02, function="Journal.write", line=12)
    found_ = found(made.evidence(made.lines(line, other, FORWARD_LINE, BACKWARD_LINE)))
    assert next(one for one in found_ if one.cause == "logging in the step").without is None


def test_a_single_sample_in_the_wrong_phase_does_not_keep_a_function_from_being_skipped():
    text = "file.flush(); os.fsync(file)"
    line = made.line(text, 0.02, function="Journal.write", line=12)
    stray = made.line(text, 0.0001, function="Journal.write", line=12, phase=BACKWARD)
    found_ = found(made.evidence(made.lines(line, stray, FORWARD_LINE, BACKWARD_LINE)))
    assert next(one for one in found_ if one.cause == "logging in the step").without is not None


@pytest.mark.parametrize(
    ("regime", "stage", "wait_s", "saved_s"),
    [
        ("separate", made.stage("item", 0.003), 0.05, 0.0),  # the worker takes 96 ms, all of a step
        ("shared", made.stage("item", 0.003), 0.05, 0.01),  # the worker gets half of the core's time that becomes free
        ("shared", made.stage("item", 0.003, blocked_s=0.003), 0.05, 0.0),  # it needs no core
        ("separate", made.stage("item", 0.0028), 0.0, 0.0104),  # the step can become as short as the worker's 89.6 ms
        ("separate", made.stage("item", 0.0001), 0.05, 0.02),
        ("shared", made.stage("item", 0.0028), 0.0, 0.02),
    ],
)
def test_less_work_in_the_step_gains_no_more_than_the_loader_allows(regime, stage, wait_s, saved_s):
    update = {"phases_s": made.phases(input=wait_s, optimizer=0.03), "num_workers": 1, "wait_s": wait_s}
    work = made.line("history.append(sum(window))", 0.02, function="Meter.note", line=55)
    evidence = made.evidence(
        made.lines(work, FORWARD_LINE, stages=(stage,), **update), record=made.record(regime=regime), domains=DOMAINS
    )
    every = {one.cause: one for one in found(evidence)}
    for cause in ("Python in the step", "unfused optimizer"):
        gain = every[cause].gain.mid if cause in every else 0.0
        assert gain == pytest.approx(0.1 / (0.1 - saved_s) - 1, abs=1e-6), cause
    if "Python in the step" in every:
        assert every["Python in the step"].without.gain == replace(every["Python in the step"].gain, kind="predicted")


def test_on_a_gpu_host_work_gains_nothing_while_the_loader_limits_the_rate():
    work = made.line("history.append(sum(window))", 0.03, line=55)
    given = {"operations": [Operations(count=9, busy_s=0.02)], "host_context": GPU, "record": made.record(regime="separate")}
    slow = made.evidence(made.lines(FORWARD_LINE, work, stages=(made.stage("item", 0.003),), **SLOW_LOADER), **given)
    assert [one.where for one in found(slow) if one.where == "train.py:55"] == []


@pytest.mark.parametrize("text", ["running += loss.item()", "logger.info('loss %.3f', loss.item())", "acc = auroc(out.cpu())"])
def test_on_a_gpu_a_line_that_waits_for_the_device_once_a_step_is_no_work_of_the_host(text):
    """Without a trace, nothing is known of the GPU's idle time: the wait of 60 ms was predicted to gain 150 %."""
    line = made.line(text, 0.06, line=55)
    given = {"host_context": GPU, "operations": ()}
    waits = [made.site("item", 1.0, 0.059, at=line)]
    assert causes(made.evidence(made.lines(FORWARD_LINE, line, syncs=waits), **given)) == []
    slow = made.lines(FORWARD_LINE, line, syncs=[made.site("item", 1.0, 0.02, at=line)])
    assert top(made.evidence(slow, **given)).gain.mid == pytest.approx(1 / 0.6 - 1)


def test_blocking_copies_lead_to_a_setting_that_is_not_set_yet():
    copy = made.line("images = images.to(device)", 0.08)
    documents = made.lines(FORWARD_LINE, syncs=[made.site("copy", 1, 0.08, at=copy)])
    domains = {"loader.pin_memory": [False, True], "loader.non_blocking": [False, True]}

    def of(**knobs):
        given = {f"loader.{name}": value for name, value in knobs.items()}
        every = found(made.evidence(documents, host_context=GPU, domains=domains, knobs=given))
        return next(one for one in every if one.cause == "synchronous copies")

    assert (of().knob, of().value) == ("loader.pin_memory", True)
    assert (of(pin_memory=True).knob, of(pin_memory=True).value) == ("loader.non_blocking", True)
    both = of(pin_memory=True, non_blocking=True)
    assert (both.knob, both.value) == ("", None)
    assert "non_blocking=True" in both.code


def test_a_step_that_accumulates_gradients_takes_several_batches():
    """The worker needs 96 ms for a step's four batches of eight samples, so it limits the rate of a step of 100 ms."""
    documents = made.lines(FORWARD_LINE, stages=(made.stage("decode", 0.003),), **SLOW_LOADER, batch_size=8)
    evidence = made.evidence(documents, record=made.record(regime="separate"), domains={"loader.num_workers": [0, 1, 2, 4, 8]})
    every = {one.cause: one for one in found(evidence)}
    assert every["slow decode"].gain.mid > 0.5
    assert every["too few workers"].value == 4  # 96 ms of work for each 50 ms of the training thread, and a tenth more
    tokens = made.lines(FORWARD_LINE, stages=(made.stage("decode", 0.012),), **SLOW_LOADER, batch_size=8, unit="tokens")
    assert made.evidence(tokens).made == 8


def test_the_time_that_a_sampler_takes_is_not_a_cost_of_the_samples():
    """Of 50 ms of input, samples take 16 ms: the rest is a slow sampler, or `next(iter(loader))` in every step."""
    stages = (made.stage("item", 0.0004, where=MAIN), made.stage("collate", 0.0001, where=MAIN))
    given = {"stages": stages, "wait_s": 0.05, "phases_s": made.phases(input=0.05)}
    every = {one.cause: one.gain for one in found(made.evidence(made.lines(FORWARD_LINE, **given), domains=DOMAINS))}
    assert every["slow augmentation"].mid == pytest.approx(1 / (1 - 32 * 0.0004 / 0.1) - 1)
    assert every["too few workers"].high == pytest.approx(1 / (1 - 0.016 / 0.1) - 1)


SCORES = [  # operators of GPT-2 with attention written out, batch 4: (operator, kind, shapes, seconds)
    ("aten::_softmax", "elementwise", "4x12x1024x1024", 0.01), ("aten::mul", "elementwise", "4x12x1024x1024", 0.005),
    ("aten::_softmax_backward_data", "elementwise", "4x12x1024x1024, 4x12x1024x1024", 0.015),
    ("aten::bmm", "matmul", "48x1024x64, 48x64x1024", 0.02), ("aten::bmm", "matmul", "48x1024x1024, 48x1024x64", 0.02),
    ("aten::gelu", "elementwise", "4x1024x3072", 0.01), ("aten::add", "elementwise", "4x1024x768", 0.01),
]  # fmt: skip


def attending(*, without=(), **more):
    names = ("operator", "kind", "shapes", "seconds")
    rows = [{**dict(zip(names, row, strict=True)), "phase": FORWARD, "count": 12.0} for row in SCORES if row[0] not in without]
    return found(made.evidence(made.lines(FORWARD_LINE), operations=[Operations(count=90, by_operator=rows, **more)]))


def test_attention_that_stores_its_scores_is_found_and_other_softmax_is_not():
    (finding,) = attending()
    assert finding.cause == "unfused attention"
    assert finding.evidence.startswith(
        "30.0 ms of a step's 100 ms (30 %) are spent on scores of all pairs of positions (4x12x1"
    )
    assert "scaled_dot_product_attention" in finding.code
    assert (finding.gain.low, finding.gain.mid) == pytest.approx((1 / 0.91 - 1, 1 / 0.76 - 1))
    assert attending(without=("aten::bmm",)) == []  # such as a softmax over the classes of each pixel
    assert attending(without=("aten::_softmax", "aten::_softmax_backward_data")) == []
    assert attending(is_distorted=True) == []


def test_gpus_without_fast_bfloat16_get_the_advice_of_fp16():
    row = {"operator": "aten::mm", "kind": "matmul", "phase": "forward", "count": 9.0, "seconds": 0.08, "dtype": "float32"}

    def of(domain, host):
        given = {"operations": [Operations(count=9, by_operator=[row], busy_s=0.1)], "domains": {"precision.amp": domain}}
        documents = made.lines(FORWARD_LINE, BACKWARD_LINE)
        every = found(made.evidence(documents, knobs={"precision.amp": "off"}, host_context=host, **given))
        return [one.value for one in every if one.cause == "32-bit arithmetic"]

    assert of(["off", "fp16"], GPU) == ["fp16"]  # a V100, or a T4
    assert of(["off", "bf16", "fp16"], GPU) == ["bf16"]
    assert of(["off", "fp16"], made.HOST) == []


def restarted(**more):
    seen = {"count": 4, "start_s": 0.4, "first_s": 1.2, "end_s": 0.4, "num_remade": 0, "steps_per_epoch": 10, **more}
    documents = made.lines(FORWARD_LINE, num_workers=1, stages=(made.stage("item", 0.003),), restarts=Restarts(**seen))
    every = found(made.evidence(documents, domains={"loader.persistent_workers": [False, True]}))
    return [one for one in every if one.cause == "restarted workers"]


def test_workers_started_anew_for_each_short_epoch_are_found():
    """50 steps of 100 ms with four starts of 0.5 s, of which the first batch of 32 samples takes a worker 0.096 s anyway."""
    (finding,) = restarted()
    assert (finding.cause, finding.where, finding.knob) == ("restarted workers", "DataLoader, num_workers=1", PERSISTENT)
    assert finding.evidence == (
        "new workers for each epoch of 10 steps: 100 ms to start them, 300 ms until the first batch, 100 ms to end them"
    )
    step_s = 0.1 - 4 * 0.5 / 50 + 0.5 / 10
    saved_s = (0.5 - 0.096) / 10
    assert finding.gain.mid == pytest.approx(step_s / (step_s - saved_s) - 1)
    assert finding.gain.low < finding.gain.mid < finding.gain.high == pytest.approx(step_s / (step_s - 0.05) - 1)


def test_rare_starts_of_workers_and_those_of_new_loaders_are_told_apart():
    assert restarted(steps_per_epoch=1000) == []  # the observed steps contain more starts than most steps do
    (finding,) = restarted(num_remade=4)
    assert (finding.knob, finding.code.partition(",")[0]) == ("", "make the DataLoader once")
    assert found(made.evidence(made.lines(FORWARD_LINE, num_workers=1))) == []


@pytest.mark.parametrize(("dtype", "expected"), [("float32", ["32-bit arithmetic"]), ("float64", []), ("bfloat16", [])])
def test_products_of_other_dtypes_are_not_taken_for_32_bit_arithmetic(dtype, expected):
    """Autocast does not change float64, and a model in bfloat16 has nothing to gain."""
    row = {"operator": "aten::mm", "kind": "matmul", "phase": "forward", "count": 9.0, "seconds": 0.08, "dtype": dtype}
    given = {"knobs": {"precision.amp": "off"}, "domains": DOMAINS, "operations": [Operations(count=9, by_operator=[row])]}
    documents = made.lines(FORWARD_LINE, phases_s=made.phases(backward=0.05))
    assert causes(made.evidence(documents, memory=[made.memory(flops=1e10)], **given)) == expected


def test_a_rank_that_waits_in_a_collective_of_the_program_is_not_busy():
    """Rank 0 waits for rank 1 where it averages the loss, before the backward pass."""
    reduce = made.line("dist.all_reduce(loss)", 0.03, line=60, callee="distributed_c10d.py:all_reduce")
    slow = made.line("return load(index)", 0.03, line=30, phase=INPUT)
    given = {"world_size": 2}
    ranks = [
        made.lines(FORWARD_LINE, reduce, rank=0, phases_s=made.phases(backward=0.03, other=0.03), **given),
        made.lines(FORWARD_LINE, slow, rank=1, phases_s=made.phases(backward=0.03, input=0.03), **given),
    ]
    finding = next(one for one in found(made.evidence(*ranks)) if one.cause == "rank skew")
    assert finding.where == "rank 1 at train.py:30"


def test_anomaly_detection_is_found_with_the_stacks_and_searches_that_it_costs(tmp_path):
    file = tmp_path / "train.py"
    file.write_text("import torch\n\ntorch.autograd.set_detect_anomaly(True)\n")
    step = made.line("x = self.layer(x)", 0.05, file=str(file), line=9, phase=FORWARD)
    library = {"is_own": False, "phase": FORWARD}
    stacks = made.line("", 0.015, file="/usr/lib/python3.11/traceback.py", **library)
    others = made.line("", 0.015, file="/lib/torch/nn/functional.py", **library)
    rows = [
        {"operator": "aten::isnan", "kind": "elementwise", "phase": "backward", "count": 90.0, "seconds": 0.01},
        {"operator": "aten::mm", "kind": "matmul", "phase": "backward", "count": 9.0, "seconds": 0.02},
    ]
    given = {"operations": [Operations(count=99, by_operator=rows)]}
    finding = top(made.evidence(made.lines(step, stacks, others, is_anomaly_mode=True), **given))
    assert (finding.cause, finding.where) == ("anomaly detection", f"{file}:3")
    assert finding.evidence.startswith("25.0 ms of a step's 100 ms (25 %)")
    assert finding.gain.low < finding.gain.mid == pytest.approx(1 / 0.75 - 1)
    assert "anomaly detection" not in causes(made.evidence(made.lines(step, stacks, others), **given))


def test_padding_is_found_by_its_share_of_the_tokens():
    def of(padded, in_all, *documents, **given):
        memory = [made.memory(padding={"padded_frac": padded, "in_all_frac": in_all})]
        return found(made.evidence(*(documents or [made.lines(FORWARD_LINE)]), memory=memory, **given))

    (finding,) = of(0.5, 0.2)
    assert (finding.cause, finding.where) == ("padding", "tokens of a batch")
    assert finding.evidence.startswith("50 % of the tokens are padding; 100 ms of a step's 100 ms")
    saved = 0.5 * 0.2, 0.8 * 0.5, 0.75  # one that only cuts batches, one that sorts them, attention with half the length
    assert (finding.gain.low, finding.gain.mid, finding.gain.high) == pytest.approx(tuple(1 / (1 - each) - 1 for each in saved))
    assert of(0.05, 0.0) == []
    collate = made.stage("collate", 0.0001, where=MAIN, file="/home/me/data.py", line=7, function="pad")
    assert of(0.5, 0.2, made.lines(FORWARD_LINE, stages=(collate,)))[0].where == "data.py:7"
    idle = {"host_context": GPU, "operations": [Operations(count=9, busy_s=0.02)]}
    assert "padding" not in [one.cause for one in of(0.5, 0.2, **idle)]


@pytest.mark.parametrize(
    ("text", "more", "expected"),
    [
        ("correct = (torch.argmax(logits, -1) == y).sum()", {}, ["metrics in the step"]),
        ("best = logits.argmax(-1)", {}, ["metrics in the step"]),
        ("values, experts = torch.topk(gates, 2)", {"phase": FORWARD}, []),
        ("loss = torch.mean(errors)", {}, []),
    ],
)
def test_metrics_in_tensor_operations_outside_of_the_model_are_found(text, more, expected):
    """For a language model, argmax reads the scores of all tokens of the vocabulary."""
    assert causes(made.evidence(made.lines(made.line(text, 0.02, function="train", **more), BACKWARD_LINE))) == expected


def test_on_a_gpu_that_is_still_busy_with_an_earlier_phase_host_work_costs_nothing():
    """Without a trace, it is not known how long the GPU is idle: all 30 ms of the host were predicted to be saved."""
    work = made.line("history.append(sum(window))", 0.03, line=55)

    def gains(**on_device):
        documents = made.lines(FORWARD_LINE, work, device_phases_s=on_device)
        return [one.gain.mid for one in found(made.evidence(documents, host_context=GPU))]

    assert gains(forward=0.099, other=0.001) == []
    assert gains(forward=0.09, other=0.01) == pytest.approx([1 / 0.9 - 1])
