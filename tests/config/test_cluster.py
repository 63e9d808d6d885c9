"""Problems of launch.slurm and launch.ray that are reported before a job is requested."""

import pytest

from autotune.config.checks import problems_of
from autotune.config.cluster import problems_of_cluster, problems_of_copies, problems_of_export
from autotune.config.compose import compose
from autotune.config.schema import DeviceOptions, LaunchOptions, RayOptions, SlurmOptions, StudyConfig
from autotune.errors import BadInput
from autotune.knobs import malloc
from autotune.knobs.catalogue import knob
from autotune.launchers.slurm import command, has_steps


def config(**options):
    return StudyConfig(launcher="slurm", launch=LaunchOptions(slurm=SlurmOptions(**options)))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"partition": " "}, "launch.slurm.partition: empty or not printable"),
        ({"gres": "gpu:1\n"}, "launch.slurm.gres: empty or not printable"),
        ({"args": "--constraint='a"}, "launch.slurm.args: not the words of a command"),
        ({"args": "--exclude n7"}, "launch.slurm.args: not an option of srun, got 'n7'. Write --OPTION=VALUE"),
        ({"args": "--job-name mine"}, "launch.slurm.args: autotune finds the jobs of a killed autotune by their names"),
        ({"args": "--output=log"}, "launch.slurm.args: autotune needs srun's input and output itself"),
        ({"args": "--wait"}, "launch.slurm.args: autotune decides when the job ends, got '--wait'. Leave it out."),
        ({"args": "--parsable"}, "launch.slurm.args: an option of sbatch, not of srun, got '--parsable'. Leave it out."),
        ({"args": "--array=1-4"}, "launch.slurm.args: an option of sbatch"),
        ({"args": "--wrap=true"}, "launch.slurm.args: an option of sbatch"),
        ({"args": "--te"}, "launch.slurm.args: with it, srun does not start autotune on the node, got '--te'. Leave it out."),
    ],
)
def test_invalid_slurm_options_are_refused(options, told):
    (problem,) = problems_of_cluster(config(**options), {})
    assert problem.startswith(told)


@pytest.mark.parametrize(
    "word",
    ["--job-name=x", "--job-n=x", "-Jx", "-J", "-vvJx", "-HJx", "-N2", "--nta=2", "--ou=log", "--wa=3", "-i/dev/null", "-K0"],
)
def test_srun_options_reserved_for_the_launcher_are_refused_in_every_spelling(word):
    (problem,) = problems_of_cluster(config(args=f"--constraint=a100 {word}"), {})
    assert problem.startswith("launch.slurm.args: autotune ")
    assert f"got {word!r}. Leave it out" in problem


@pytest.mark.parametrize(
    "word",
    [
        "--jobid=12",
        "--nodelist=n1",
        "--mem=1G",
        "--qos=high",
        "--comment=mine",
        "-wn1",
        "-pJ",
        "-vQ",
        "-bnow+1hour",
        "--exclusive",
        "--error-x",
    ],
)
def test_other_options_of_srun_are_passed_on(word):
    assert problems_of_cluster(config(args=word), {}) == []


@pytest.mark.parametrize("options", [{"cpus": 0}, {"nodes": 0}, {"minutes": -1.0}])
def test_too_small_numbers_for_slurm_are_refused(options):
    (name,) = options
    assert any(problem.startswith(f"launch.slurm.{name}: too small") for problem in problems_of(config(**options), []))


def test_valid_slurm_options_are_accepted():
    good = config(
        partition="gpu", account="me", qos="high", gres="gpu:a100:1", cpus=8, mem="64G", minutes=90.0, args="--constraint=a100"
    )
    assert problems_of_cluster(good, {}) == []


def test_a_step_of_a_job_cannot_change_the_job():
    problems = problems_of_cluster(config(partition="gpu", nodes=2, minutes=10.0, gres="gpu:1"), {"SLURM_JOB_ID": "12"})
    named = [f"launch.slurm.{name}" for name in ("partition", "nodes", "minutes")]
    assert [problem.partition(":")[0] for problem in problems] == named
    assert all("inside job 12" in problem for problem in problems)


@pytest.mark.parametrize("options", [{"gpus": -1}, {"cpus": -1}])
def test_negative_numbers_for_ray_are_refused(options):
    (name,) = options
    problems = problems_of(StudyConfig(launcher="ray", launch=LaunchOptions(ray=RayOptions(**options))), [])
    assert any(problem.startswith(f"launch.ray.{name}: too small") for problem in problems)


@pytest.mark.parametrize("address", ["local", "", "10.0.0.5", "host:port", "http://host:8265", "ray://host:10001", "a b:1"])
def test_invalid_addresses_of_ray_clusters_are_refused(address):
    asked = StudyConfig(launcher="ray", launch=LaunchOptions(ray=RayOptions(address=address)))
    assert any(problem.startswith("launch.ray.address: not the address of a cluster") for problem in problems_of(asked, []))


@pytest.mark.parametrize("address", ["auto", "10.0.0.5:6379", "head-svc.ns:6379", "[::1]:6379"])
def test_valid_addresses_of_ray_clusters_are_accepted(address):
    assert problems_of_cluster(StudyConfig(launcher="ray", launch=LaunchOptions(ray=RayOptions(address=address))), {}) == []


def test_options_of_the_other_launcher_are_refused():
    asked = LaunchOptions(slurm=SlurmOptions(partition="gpu"), ray=RayOptions(cpus=8))
    (problem,) = problems_of_cluster(StudyConfig(launcher="ray", launch=asked), {})
    assert problem.startswith("launch.slurm.partition: has no effect with launcher=ray, got 'gpu'. Give launcher=slurm")
    (problem,) = problems_of_cluster(StudyConfig(launcher="slurm", launch=asked), {})
    assert problem.startswith("launch.ray.cpus: has no effect with launcher=slurm, got 8. Give launcher=ray")


def test_messages_about_ray_gpus_name_the_options_of_ray():
    asked = StudyConfig(launcher="ray", device=DeviceOptions(kind="cuda", index=1), launch=LaunchOptions(nproc=2))
    told = "\n".join([*problems_of(asked, []), *problems_of(asked, [{"name": "H100"}])])
    assert "device.index: Ray chooses the GPUs of a job, got 1" in told
    assert "device.kind: the job has no GPU on its node, got 'cuda'. Give launch.ray.gpus=1" in told
    assert "Allowed: 1 to 1" in told
    assert "launch.ray.gpus=2" in told


@pytest.mark.parametrize(
    ("num_gpus", "device", "nproc", "told"),
    [
        (0, DeviceOptions(kind="cuda"), 1, "device.kind: the job has no GPU"),
        (1, DeviceOptions(), 2, "launch.nproc: more processes than the job's GPUs, got 2. Allowed: 1 to 1"),
        (2, DeviceOptions(index=1), 1, "device.index: Slurm chooses the GPUs of a job, got 1"),
    ],
)
def test_devices_that_a_slurm_job_cannot_provide_are_refused(num_gpus, device, nproc, told):
    asked = StudyConfig(launcher="slurm", device=device, launch=LaunchOptions(nproc=nproc))
    assert told in "\n".join(problems_of(asked, [{"name": "H100"}] * num_gpus))


WORDS = ["launcher=slurm", "model=mlp", "tracker.uri=none"]
NODE = {"num_cores": 4, "gpus": [], "memory_bytes": 1 << 34}


def test_a_study_for_a_node_is_checked_against_the_node_not_this_machine():
    here, large = {**NODE, "num_cores": 2}, {**NODE, "num_cores": 256}
    composed = compose([*WORDS, "threads.intra=200"], command=None, facts=here)
    assert composed.on_node(large).space.pinned["threads.intra"] == 200
    with pytest.raises(BadInput, match=r"threads\.intra"):
        composed.on_node(here)


def test_allocator_must_be_installed_on_the_node_and_not_on_this_machine(monkeypatch):
    monkeypatch.setattr(malloc, "installed_here", dict)
    composed = compose([*WORDS, "memory.malloc=jemalloc"], command=None, facts=NODE)
    monkeypatch.setattr(malloc, "_on_node", [{"jemalloc": "/opt/libjemalloc.so.2"}])
    assert composed.on_node(NODE).space.pinned["memory.malloc"] == "jemalloc"
    assert knob("memory.malloc").environment("jemalloc")["LD_PRELOAD"].startswith("/opt/libjemalloc.so.2")
    monkeypatch.setattr(malloc, "_on_node", [{}])
    with pytest.raises(BadInput, match=r"memory\.malloc: not installed here, got 'jemalloc'"):
        composed.on_node(NODE)


def test_gpu_is_looked_for_on_the_node_and_not_on_this_machine():
    composed = compose([*WORDS, "device.kind=cuda"], command=None, facts=NODE)
    with pytest.raises(BadInput, match=r"launch\.slurm\.gres=gpu:1"):
        composed.on_node(NODE)


def test_arguments_of_srun_are_split_from_one_text():
    words = [*WORDS, 'launch.slurm.args="--constraint=a100 --exclude=n7"', "launch.slurm.mem=64G", "launch.slurm.gres=gpu:1"]
    slurm = compose(words, command=None, facts=NODE).config.launch.slurm
    assert command(slurm, {})[-2:] == ["--constraint=a100", "--exclude=n7"]
    assert {"--mem=64G", "--gres=gpu:1"} <= set(command(slurm, {}))


def test_job_step_requests_exactly_its_own_cores():
    assert "--exact" in command(SlurmOptions(cpus=2), {"SLURM_JOB_ID": "12"})
    assert "--exact" not in command(SlurmOptions(cpus=2), {})
    assert "--exact" not in command(SlurmOptions(), {"SLURM_JOB_ID": "12"})  # the step may use the whole job


@pytest.mark.parametrize(
    ("options", "variables", "shares_it"),
    [
        ({}, ("SLURM_JOB_ID", "SLURM_MEM_PER_NODE"), True),
        ({}, ("SLURM_MEM_PER_NODE",), False),
        ({}, ("SLURM_JOB_ID",), False),
        ({"mem": "4G"}, ("SLURM_JOB_ID", "SLURM_MEM_PER_NODE"), False),
        ({"args": "--mem-per-cpu=4G"}, ("SLURM_JOB_ID", "SLURM_MEM_PER_NODE"), False),
    ],
)
def test_step_shares_the_memory_of_its_job_unless_the_user_requests_a_part(options, variables, shares_it):
    assert ("--mem=0" in command(SlurmOptions(**options), dict.fromkeys(variables, "12"))) is shares_it


def test_trial_over_two_nodes_requests_one_overlapping_task_per_node():
    words = command(SlurmOptions(nodes=2, cpus=8), {}, is_shared=True)
    assert {"--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=8", "--overlap"} <= set(words)
    assert {"--nodes=1", "--ntasks=1"} <= set(command(SlurmOptions(), {}))
    assert "--overlap" not in command(SlurmOptions(), {})


@pytest.mark.parametrize(
    ("options", "program", "is_shared"),
    [
        ({"nodes": 2}, "./train.sh", True),
        ({}, "srun", True),
        ({}, "/usr/bin/srun", True),
        ({}, "python", False),
    ],
)
def test_the_agent_shares_its_job_with_trials_that_start_steps_in_it(options, program, is_shared):
    assert has_steps(SlurmOptions(**options), program) == is_shared


@pytest.mark.parametrize(
    ("words", "program", "told"),
    [
        (["model=mlp"], None, "launch.slurm.nodes: a recipe trains on one node, got 2. Leave it out"),
        ([], "python", "launch.slurm.nodes: python starts processes on one node only, got 2. Put srun before it"),
        ([], "torchrun", "launch.slurm.nodes: torchrun starts processes on one node only, got 2"),
        (["launch.slots=2"], "srun", "launch.slots: trials over several nodes run one after another, got 2"),
    ],
)
def test_programs_that_cannot_train_on_two_nodes_are_refused(words, program, told, tmp_path, monkeypatch):
    given = program and [program, "-c", "pass"]
    for name in ("python", "torchrun", "srun"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BadInput) as caught:
        compose(["launcher=slurm", "tracker.uri=none", "launch.slurm.nodes=2", *words], command=given, facts=NODE)
    assert told in "\n".join(caught.value.problems)


@pytest.mark.parametrize(
    ("words", "variable", "got"),
    [
        ("srun --export=NONE python train.py", None, "--export=NONE"),
        ("/usr/bin/srun -N2 --export PATH,HOME torchrun train.py", None, "--export=PATH,HOME"),
        ("srun --export=ALL --export=NONE ./train", None, "--export=NONE"),
        ("srun python train.py", "NONE", "SLURM_EXPORT_ENV=NONE"),
        ("srun python train.py --export=ALL", "PATH", "SLURM_EXPORT_ENV=PATH"),
        ("srun python train.py", None, None),
        ("srun --export=ALL,MASTER_PORT=1 python train.py", "NONE", None),
        ("srun bash train.sh --export=NONE", "ALL", None),
        ("srun --chdir=/tmp ./train --export NONE", None, None),
        ("python train.py --export=NONE", "NONE", None),
        ("srun --export ALL,DATA=/data python train.py", None, None),
        ("srun --export DATA=/data python train.py", None, "--export=DATA=/data"),
        ("srun mytrain --export=onnx", None, None),
        ("srun -n 2 mytrain --export=onnx", None, None),
        ("srun -n2 --exclusive mytrain --export onnx", None, None),
        ("srun -- mytrain --export=onnx", None, None),
        ("srun -n 2 -l --partition gpu --export=NONE mytrain", None, "--export=NONE"),
        ("srun --export=all,A=1 mytrain", None, None),
    ],
)
def test_srun_that_hides_the_settings_from_its_ranks_is_refused(words, variable, got):
    problems = problems_of_export(words.split(), {"SLURM_EXPORT_ENV": variable} if variable else {})
    assert [problem for problem in problems if f"got '{got}'. Write srun --export=ALL" in problem] == problems
    assert bool(problems) == (got is not None)


@pytest.mark.parametrize(
    ("environment", "starter"),
    [
        ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"}, "srun"),
        ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_PTY_PORT": "7"}, "srun"),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3"}, "mpirun"),
        ({"PMI_SIZE": "4", "PMI_RANK": "0"}, "mpirun"),
        ({"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, ""),
        ({"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "0", "SLURM_PTY_PORT": "7"}, ""),
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, ""),
        ({}, ""),
    ],
    ids=[
        "srun",
        "task of srun --pty",
        "Open MPI",
        "other MPI",
        "one task",
        "shell of srun --pty",
        "batch script",
        "no launcher",
    ],
)
def test_several_autotunes_started_at_once_are_refused(environment, starter):
    problems = problems_of_copies(environment)
    assert [problem.split(" has started")[0] for problem in problems] == [f"launcher: {starter}"] * bool(starter)
