"""Other people's training programs that `third_party` tunes: where they are, how they are started, and what they need.

All run without a GPU and without network. docs/benchmarks.md lists the repositories and packages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.benchmarks import third_party_data as data
from tests.benchmarks.third_party_clock import Clock


@dataclass(frozen=True, kw_only=True)
class Program:
    """One of these programs.

    Attributes:
        name: its name for `--only`.
        folder: working directory, below the checkouts; programs in the same folder share its data.
        command: the command as typed after `--`.
        prepare: makes the data in the folder.
        packages: what it imports besides torch and torchvision, as `pip install` takes it.
        clock: how it prints its progress; None if it prints none.
        options: KEY=VALUE for autotune; longer windows for programs that print rarely.
    """

    name: str
    folder: str
    command: str
    prepare: Callable[[Path], None] = lambda folder: None
    packages: str = ""
    clock: Clock | None = None
    options: tuple[str, ...] = ()


CLM = (
    "run_clm.py --model_type gpt2 --tokenizer_name tokenizer --config_overrides n_layer=2,n_head=4,n_embd=128,vocab_size=4000 "
    "--train_file train.txt --block_size 128 --do_train --use_cpu --output_dir out"
)
NANOGPT = (
    "python train.py config/train_shakespeare_char.py --device=cpu --compile={} --eval_iters=20 --block_size=64 "
    "--batch_size={{loader.batch_size=12}} --n_layer=4 --n_head=4 --n_embd=128 --dropout=0.0"
)
WORDS = "python main.py --use-optimizer --lr 0.001 --log-interval 1 --data text --batch_size {loader.batch_size=20}"
TRL = (
    "--model_name_or_path tiny --max_length 128 --per_device_train_batch_size 4 --num_train_epochs 100 --eval_strategy steps "
    "--eval_steps 200 --bf16 False --use_cpu --report_to none --output_dir out"
)
ZOO = "python train.py --env CartPole-v1 --n-timesteps 10000000 --eval-freq -1 --device cpu --algo"
LONG = ("measure.screening.min_s=40", "measure.screening.max_s=120", "measure.screening.slow_max_s=120")
DONE = r"(?P<done>\d+)/(?P<total>\d+)"
MNIST_LINES = Clock(r"Train Epoch: \d+ \[" + DONE)
STEP_BAR = r"^\s*\d+%\|.*\| " + DONE + r" \["  # without a title: other bars load and write models
EPOCH_BAR = r"Epoch \d+(?:/\d+)?:.*?" + DONE + r" \["
PAIRS = Clock(r"^epoch (?P<done>\d+): ", data.NUM_PAIRS["train"])
HUGGING_FACE = "transformers datasets evaluate accelerate"


def _photos(folder: Path) -> None:
    data.photos(folder / "photos")


def _words(folder: Path) -> None:
    data.word_files(folder / "text")


def _words_of_tutorial(folder: Path) -> None:
    if not (folder / "data" / "train.txt").exists():  # the repository has its own
        data.write(folder / "data" / "train.txt", " ".join(data.text()[:300_000]))  # few words, so that steps are fast


def _characters(folder: Path) -> None:
    data.characters(folder / "data" / "shakespeare_char")


def _digits_above(folder: Path) -> None:
    data.mnist(folder.parent / "data")


def _digits_of_fabric(folder: Path) -> None:
    data.mnist(folder.parents[2] / "Datasets")


def _dcgan(folder: Path) -> None:
    _digits_above(folder)
    (folder / "out").mkdir(exist_ok=True)


def _super_resolution(folder: Path) -> None:
    for split in ("train", "test"):
        data.crops(folder / "dataset" / "BSDS300" / "images" / split)


def _style(folder: Path) -> None:
    _photos(folder)
    data.crops(folder / "style", number=1)
    data.vgg16(folder / "home" / "hub" / "checkpoints")


def _sentences(folder: Path) -> None:
    data.write(folder / "train.txt", 4 * data.text())
    data.bert(folder / "distilbert" / "distilroberta-base")


def _diffusers(folder: Path) -> None:
    _photos(folder)
    data.small_unet(folder / "tiny")


PYTORCH = (
    Program(
        name="imagenet",
        folder="examples/imagenet",
        command="python main.py -a shufflenet_v2_x0_5 -b 16 -j 2 --no-accel photos",
        prepare=_photos,
        clock=Clock(r"Epoch: \[\d+\]\[\s*" + DONE, 16, is_steps=True),
    ),
    Program(
        name="word_language_model",
        folder="examples/word_language_model",
        command=WORDS,
        prepare=_words,
        clock=Clock(r"\|\s+(?P<done>\d+)/\s*(?P<total>\d+) batches", 20, is_steps=True),
    ),
    Program(
        name="word_transformer",
        folder="examples/word_language_model",
        command=f"{WORDS} --model Transformer --emsize 32 --nhid 32 --bptt 10",
        prepare=_words,
        clock=Clock(r"\|\s+(?P<done>\d+)/\s*(?P<total>\d+) batches", 20, is_steps=True),
    ),
    Program(
        name="mnist",
        folder="examples/mnist",
        command="python main.py --no-accel --log-interval 1",
        prepare=_digits_above,
        clock=MNIST_LINES,
    ),
    Program(
        name="mnist_rnn",
        folder="examples/mnist_rnn",
        command="python main.py --log-interval 1",
        prepare=_digits_above,
        clock=MNIST_LINES,
    ),
    Program(
        name="hogwild",
        folder="examples/mnist_hogwild",
        command="python main.py --log-interval 1",
        prepare=_digits_above,
        clock=Clock(r"(?P<who>\d+)\tTrain Epoch: \d+ \[" + DONE),
    ),
    Program(
        name="forward_forward",
        folder="examples/mnist_forward_forward",
        command="python main.py --no_accel --train_size 500 --test_size 1000 --epochs 20000 --log-interval 1",
        prepare=lambda folder: data.mnist(folder / "data"),
        clock=Clock(r"^Loss: "),
    ),
    Program(
        name="vae",
        folder="examples/vae",
        command="python main.py --no-accel --log-interval 1",
        prepare=_digits_above,
        clock=MNIST_LINES,
    ),
    Program(
        name="siamese",
        folder="examples/siamese_network",
        command="python main.py --no-accel --log-interval 1",
        prepare=_digits_above,
        clock=MNIST_LINES,
    ),
    Program(
        name="dcgan",
        folder="examples/dcgan",
        command="python main.py --dataset mnist --dataroot ../data --ngf 16 --ndf 16 --outf out",
        prepare=_dcgan,
        clock=Clock(r"\[\d+/\d+\]\[" + DONE + r"\] Loss_D", 64, is_steps=True),
    ),
    Program(name="regression", folder="examples/regression", command="python main.py"),
    Program(
        name="time_sequence",
        folder="examples/time_sequence_prediction",
        command="env TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1 python train.py --steps 1000",
        prepare=lambda folder: data.waves(folder / "traindata.pt"),
        packages="matplotlib",
        clock=Clock(r"^loss: ", 20),
    ),
    Program(
        name="super_resolution",
        folder="examples/super_resolution",
        command="python main.py --upscale_factor 4 --batchSize 16 --nEpochs 100 --threads 1",
        prepare=_super_resolution,
        packages="six",
        clock=Clock(r"Epoch\[\d+\]\(" + DONE, 16, is_steps=True),
    ),
    Program(
        name="style",
        folder="examples/fast_neural_style",
        command="env TORCH_HOME=home python neural_style/neural_style.py train --dataset photos/train "
        "--style-image style/0000.jpg --image-size 32 --batch-size 2 --epochs 100 --log-interval 1 --save-model-dir out",
        prepare=_style,
        clock=Clock(r"Epoch \d+:\t\[" + DONE),
    ),
    Program(
        name="actor_critic",
        folder="examples/reinforcement_learning",
        command="python actor_critic.py --log-interval 1",
        packages="gymnasium[classic-control]",
        clock=Clock(r"Last reward: (?P<more>[\d.]+)"),
    ),
)
HUBS = (
    Program(
        name="trainer",
        folder="transformers/examples/pytorch/language-modeling",
        command=f"python {CLM}",
        prepare=data.causal_tokenizer,
        packages=HUGGING_FACE,
        clock=Clock(STEP_BAR, 8, is_steps=True),
    ),
    Program(
        name="trainer-torchrun",
        folder="transformers/examples/pytorch/language-modeling",
        command=f"torchrun --nproc_per_node=2 {CLM} --ddp_backend gloo",
        prepare=data.causal_tokenizer,
        packages=HUGGING_FACE,
        clock=Clock(STEP_BAR, 16, is_steps=True),
    ),
    Program(
        name="accelerate",
        folder="accelerate/examples",
        command="accelerate launch --cpu nlp_example.py --cpu",
        prepare=data.sentence_pairs,
        packages=HUGGING_FACE,
        clock=PAIRS,
        options=("measure.screening.min_s=15",),
    ),
    Program(
        name="accumulation",
        folder="accelerate/examples",
        command="python by_feature/gradient_accumulation.py --cpu --gradient_accumulation_steps 4",
        prepare=data.sentence_pairs,
        packages=HUGGING_FACE,
        clock=PAIRS,
        options=("measure.screening.min_s=15",),
    ),
    Program(
        name="sentence_transformer",
        folder="sentence-transformers/examples/sentence_transformer/unsupervised_learning/SimCSE",
        command="python train_simcse_from_file.py train.txt",
        prepare=_sentences,
        packages="sentence-transformers datasets accelerate",
        clock=Clock(STEP_BAR, 128, is_steps=True),
    ),
    Program(
        name="sft_lora",
        folder="trl",
        command=f"python trl/scripts/sft.py --dataset_name texts --use_peft --lora_target_modules q_proj v_proj {TRL}",
        prepare=data.for_language_models,
        packages="trl peft",
        clock=Clock(STEP_BAR, 4, is_steps=True),
    ),
    Program(
        name="dpo",
        folder="trl",
        command=f"python trl/scripts/dpo.py --dataset_name preferences --gradient_accumulation_steps 2 {TRL}",
        prepare=data.for_language_models,
        packages="trl peft",
        clock=Clock(STEP_BAR, 8, is_steps=True),
    ),
    Program(
        name="diffusers",
        folder="diffusers/examples/unconditional_image_generation",
        command="accelerate launch --cpu train_unconditional.py --train_data_dir photos/train --resolution 32 --use_ema "
        "--train_batch_size 8 --num_epochs 100 --model_config_name_or_path tiny --output_dir out",
        prepare=_diffusers,
        packages="diffusers datasets accelerate tensorboard",
        clock=Clock(EPOCH_BAR, 8, is_steps=True),
    ),
    Program(
        name="timm",
        folder="pytorch-image-models",
        command="python train.py --data-dir photos --val-split val --model mobilenetv3_small_100 --num-classes 2 "
        "--img-size 128 -b 16 -j 2 --device cpu --log-interval 4",
        prepare=_photos,
        packages="huggingface_hub safetensors pyyaml",
        clock=Clock(r"Train: \d+ \[\s*" + DONE, 16, is_steps=True),
    ),
)
FRAMEWORKS = (
    Program(
        name="lightning",
        folder="pytorch-lightning/examples/pytorch/basics",
        command="python autoencoder.py --trainer.accelerator cpu",
        prepare=lambda folder: data.mnist(folder / "data", folder.parents[1] / "Datasets"),
        packages="lightning 'jsonargparse[signatures]'",
        clock=Clock(EPOCH_BAR, 32, is_steps=True),
    ),
    Program(
        name="fabric",
        folder="pytorch-lightning/examples/fabric/image_classifier",
        command="fabric run --accelerator=cpu --strategy=ddp --devices=2 train_fabric.py --log-interval 1",
        prepare=_digits_of_fabric,
        packages="lightning torchmetrics",
        clock=Clock(MNIST_LINES.pattern, 2),
    ),
    Program(
        name="kfold",
        folder="pytorch-lightning/examples/fabric/kfold_cv",
        command="python train_fabric.py --log-interval 1",
        prepare=_digits_of_fabric,
        packages="lightning torchmetrics",
        clock=Clock(r"Train Epoch: \d+ \[(?P<done>\d+)/"),  # the total is that of the whole data set, not of the fold
    ),
    Program(
        name="ignite",
        folder="ignite/examples/mnist",
        command="python mnist.py --log_interval 1",
        prepare=lambda folder: data.mnist(folder),
        packages="pytorch-ignite tqdm",
        clock=Clock(r"ITERATION.*?" + DONE, 64, is_steps=True),
    ),
    Program(
        name="skorch",
        folder="skorch/examples/cli",
        command="python train.py net --n_samples=5000 --max_epochs=1000",
        packages="skorch fire numpydoc",
        clock=Clock(r"^\s+(?P<done>\d+)\s+\S*\d\.\d+", 4_000),
    ),
    Program(
        name="keras",
        folder="keras/examples",
        command="env KERAS_BACKEND=torch python demo_functional.py",
        packages="keras",
        clock=Clock(r"(?:^|m)\s*" + DONE + r"\b", 32, is_steps=True),
    ),
    Program(
        name="fastai",
        folder="fastai/nbs/examples",
        command="env FASTAI_HOME=home python train_tabular.py",
        prepare=lambda folder: data.adults(folder / "home/data/adult_sample/adult.csv"),
        packages="fastai",
        clock=Clock(r"^(?P<done>\d+)\s+[\d.]+\s+[\d.]+\s+[\d.]+\s+\d+:\d+", 16_000),
        options=("measure.screening.min_s=20",),
    ),
    Program(
        name="monai",
        folder="monai-tutorials/2d_segmentation/torch",
        command="python unet_training_dict.py",
        packages="monai tensorboard matplotlib",
        clock=Clock(r"^" + DONE + ", train_loss", 2, is_steps=True),
    ),
    Program(
        name="graph_nodes",
        folder="pytorch_geometric/examples",
        command="python gcn.py --epochs 100000",
        prepare=data.graphs,
        packages="torch-geometric",
        clock=Clock(r"Epoch: (?P<done>\d+)", 2_700),
    ),
    Program(
        name="graph_batches",
        folder="pytorch_geometric/examples",
        command="python mutag_gin.py --epochs 100000",
        prepare=data.graphs,
        packages="torch-geometric",
        clock=Clock(r"Epoch: (?P<done>\d+)", 169),
    ),
    Program(
        name="opacus",
        folder="opacus/examples",
        command="python mnist.py --device cpu --data-root ../mnist",
        prepare=lambda folder: data.mnist(folder.parent / "mnist"),
        packages="opacus",
        clock=Clock(STEP_BAR, 64, is_steps=True),
    ),
    Program(
        name="pyro",
        folder="pyro/examples",
        command="python svi_torch.py --num-epochs 1000000",
        packages="pyro-ppl==1.9.1",
        clock=Clock(r"^epoch (?P<done>\d+) loss", 10_000),
    ),
    Program(
        name="zoo_ppo",
        folder="rl-baselines3-zoo",
        command=f"{ZOO} ppo -params n_epochs:4",
        packages="rl_zoo3",
        clock=Clock(r"n_updates\s+\|\s+(?P<done>\d+)", 256),
    ),
    Program(
        name="zoo_dqn",
        folder="rl-baselines3-zoo",
        command=f"{ZOO} dqn --log-interval 1 -params train_freq:16 gradient_steps:8",
        packages="rl_zoo3",
        clock=Clock(r"n_updates\s+\|\s+(?P<done>\d+)", 64),
    ),
)
PEOPLE = (
    Program(
        name="nanogpt",
        folder="nanoGPT",
        command=NANOGPT.format("False"),
        prepare=_characters,
        clock=Clock(r"^iter (?P<done>\d+):", 12, is_steps=True),
    ),
    Program(
        name="nanogpt_compiled",
        folder="nanoGPT",
        command=NANOGPT.format("True"),
        prepare=_characters,
        clock=Clock(r"^iter (?P<done>\d+):", 12, is_steps=True),
    ),
    Program(
        name="llama2c",
        folder="llama2.c",
        command="python train.py --compile=False --device=cpu --dtype=float32 --eval_iters=2 --batch_size=2 --max_seq_len=32 "
        "--dim=48 --n_layers=2 --gradient_accumulation_steps=4",
        prepare=data.random_tokens,
        packages="sentencepiece requests",
        clock=Clock(r"^(?P<done>\d+) \| loss", 8, is_steps=True),
    ),
    Program(
        name="mingpt",
        folder="minGPT/projects/adder",
        command="env PYTHONPATH=../.. python adder.py",
        clock=Clock(r"iter (?P<done>\d+): train loss", 64, is_steps=True),
    ),
    Program(
        name="chargpt",
        folder="minGPT/projects/chargpt",
        command="env PYTHONPATH=../.. python chargpt.py --model.model_type=gpt-nano --data.block_size=16",
        prepare=lambda folder: data.write(folder / "input.txt", data.text()),
        clock=Clock(r"iter (?P<done>\d+): train loss", 64, is_steps=True),
    ),
    Program(
        name="makemore",
        folder="makemore",
        command="python makemore.py --n-layer 2 --n-embd 32 --batch-size 16",
        packages="tensorboard",
        clock=Clock(r"^step (?P<done>\d+) \|", 16, is_steps=True),
    ),
    Program(
        name="wgan_gp",
        folder="PyTorch-GAN/implementations/wgan_gp",
        command="python wgan_gp.py",
        prepare=lambda folder: data.mnist(folder.parents[1] / "data" / "mnist"),
        clock=Clock(r"\[Batch " + DONE, 64, is_steps=True),
    ),
    Program(
        name="unet",
        folder="Pytorch-UNet",
        command="env WANDB_MODE=disabled python train.py --scale 0.125 --batch-size 2 --epochs 100",
        prepare=lambda folder: data.masked_photos(folder / "data"),
        packages="wandb tqdm",
        clock=Clock(EPOCH_BAR),
    ),
    Program(
        name="tutorial_words",
        folder="pytorch-tutorial/tutorials/02-intermediate/language_model",
        command="python main.py",
        prepare=_words_of_tutorial,
        clock=Clock(r"Step\[" + DONE, 600),
        options=LONG,
    ),
    Program(
        name="cleanrl_ppo",
        folder="cleanrl",
        command="python cleanrl/ppo.py --total-timesteps 10000000",
        packages="gymnasium[classic-control] tyro tensorboard",
        clock=Clock("^SPS: ", 2_048),
    ),
    Program(
        name="cleanrl_dqn",
        folder="cleanrl",
        command="env PYTHONPATH=. python cleanrl/dqn.py --learning-starts 1000 --total-timesteps 10000000",
        packages="gymnasium[classic-control] tyro tensorboard",
        clock=Clock("^SPS: ", 1_280),
    ),
)
PROGRAMS = (*PYTORCH, *HUBS, *FRAMEWORKS, *PEOPLE)
