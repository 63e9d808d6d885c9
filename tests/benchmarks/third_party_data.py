"""Makes small data sets for other people's training programs from data that every machine has, in the form they expect.

Text is Python's own documentation (`pydoc_data.topics`); images are scikit-learn's digits and photographs; graphs and tables
are random. The programs' libraries (tokenizers, transformers) are imported only in the functions that need them.
"""

from __future__ import annotations

import functools
import json
import pickle
import random
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

NUM_DIGITS_TRAIN, NUM_DIGITS_TEST = 60_000, 10_000  # the sizes of MNIST, because programs split the data at these numbers
NUM_PHOTOS = {"train": 512, "val": 64}
PHOTO_PIXELS = 256
NUM_PAIRS = {"train": 600, "validation": 200}
VOCABULARY = 4_000

GLUE_CARD = """---
configs:
- config_name: mrpc
  data_files:
  - {split: train, path: mrpc/train.csv}
  - {split: validation, path: mrpc/validation.csv}
---
"""
GLUE_METRIC = '''"""Accuracy, where the real metric would have to be downloaded."""

import datasets
import evaluate


class Glue(evaluate.Metric):
    def _info(self):
        features = datasets.Features({"predictions": datasets.Value("int64"), "references": datasets.Value("int64")})
        return evaluate.MetricInfo(description=__doc__, citation="", features=features)

    def _compute(self, predictions, references):
        return {"accuracy": sum(p == r for p, r in zip(predictions, references)) / len(references)}
'''


def text() -> str:
    """Returns about 700,000 characters of English: the documentation that Python's `help()` prints."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


def write(path: Path, content: str) -> None:
    """Writes a text file and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)


def word_files(folder: Path) -> None:
    """Writes train.txt, valid.txt and test.txt."""
    words = text().split("\n")
    cut = len(words) * 9 // 10
    for name, lines in (("train", words[:cut]), ("valid", words[cut:]), ("test", words[cut:])):
        write(folder / f"{name}.txt", "\n".join(lines) + "\n")


def characters(folder: Path) -> None:
    """Writes nanoGPT's train.bin, val.bin and meta.pkl, with the program's own prepare.py."""
    write(folder / "input.txt", text())
    subprocess.run([sys.executable, str(folder / "prepare.py")], check=True, stdout=subprocess.DEVNULL)


def random_tokens(folder: Path) -> None:
    """Writes tokens as llama2.c keeps those of TinyStories: one file to evaluate on, three to train on."""
    place = folder / "data" / "TinyStories_all_data"
    place.mkdir(parents=True, exist_ok=True)
    for i in range(4):
        np.random.default_rng(i).integers(0, 32_000, 400_000).astype(np.uint16).tofile(place / f"data{i:02d}.bin")


@functools.cache
def _digits(number: int) -> tuple[Any, Any]:
    """Returns images, uint8 of shape [number, 28, 28], and labels: scikit-learn's digits, enlarged and shifted."""
    from PIL import Image
    from sklearn.datasets import load_digits

    digits = load_digits()
    small = [np.asarray(Image.fromarray((image * 15).astype(np.uint8)).resize((24, 24))) for image in digits.images]
    choose = random.Random(0)
    images, labels = np.zeros((number, 28, 28), np.uint8), np.zeros(number, np.uint8)
    for i in range(number):
        which, x, y = choose.randrange(len(small)), choose.randrange(5), choose.randrange(5)
        images[i, y : y + 24, x : x + 24], labels[i] = small[which], digits.target[which]
    return images, labels


def mnist(*roots: Path) -> None:
    """Writes the four files of MNIST as torchvision reads them."""
    for kind, number in (("train", NUM_DIGITS_TRAIN), ("t10k", NUM_DIGITS_TEST)):
        images, labels = _digits(number)
        for root in roots:
            raw = root / "MNIST" / "raw"
            raw.mkdir(parents=True, exist_ok=True)
            (raw / f"{kind}-images-idx3-ubyte").write_bytes(struct.pack(">4i", 2051, number, 28, 28) + images.tobytes())
            (raw / f"{kind}-labels-idx1-ubyte").write_bytes(struct.pack(">2i", 2049, number) + labels.tobytes())


def _crops(number: int) -> Iterator[Any]:
    """Yields square crops of scikit-learn's two photographs, in turn."""
    from PIL import Image
    from sklearn.datasets import load_sample_images

    whole, choose = [Image.fromarray(image) for image in load_sample_images().images], random.Random(0)
    for i in range(number):
        source = whole[i % len(whole)]
        x, y = (choose.randrange(size - PHOTO_PIXELS) for size in source.size)
        yield source.crop((x, y, x + PHOTO_PIXELS, y + PHOTO_PIXELS))


def photos(folder: Path) -> None:
    """Writes JPEG files, train/CLASS/*.jpg and val/CLASS/*.jpg; the class is the photograph that a crop is from."""
    for split, number in NUM_PHOTOS.items():
        for i, crop in enumerate(_crops(number)):
            place = folder / split / f"class{i % 2}" / f"{i:04d}.jpg"
            place.parent.mkdir(parents=True, exist_ok=True)
            crop.save(place)


def crops(folder: Path, number: int = 128) -> None:
    """Writes JPEG files."""
    folder.mkdir(parents=True, exist_ok=True)
    for i, crop in enumerate(_crops(number)):
        crop.save(folder / f"{i:04d}.jpg")


def masked_photos(folder: Path) -> None:
    """Writes imgs/*.jpg and masks/*_mask.png, in which bright pixels are 1 and others 0."""
    crops(folder / "imgs")
    (folder / "masks").mkdir(exist_ok=True)
    for i, crop in enumerate(_crops(128)):
        crop.convert("L").point(lambda value: int(value > 128)).save(folder / "masks" / f"{i:04d}_mask.png")


def waves(path: Path) -> None:
    """Writes 23 sine waves of 41 points, float64, as `torch.save` writes an array."""
    import torch

    begin = np.random.default_rng(2).integers(-80, 80, (23, 1))
    torch.save(np.sin((np.arange(41) + begin) / 20.0), path)


def vgg16(folder: Path) -> None:
    """Writes random weights under the name by which torchvision finds its downloaded VGG16; the classifier's are zero."""
    import torch
    from torchvision.models import VGG16_Weights, vgg16

    folder.mkdir(parents=True, exist_ok=True)
    weights = vgg16(weights=None).state_dict()
    small = {key: torch.zeros(1).expand(tensor.shape) if "classifier" in key else tensor for key, tensor in weights.items()}
    torch.save(small, folder / Path(VGG16_Weights.IMAGENET1K_V1.url).name)


def adults(path: Path) -> None:
    """Writes a table of 20,000 random people with the columns that `train_tabular.py` reads."""
    choose, kinds = random.Random(0), ("workclass", "education", "marital-status", "occupation", "relationship", "race")
    rows = [",".join(("age", "fnlwgt", "education-num", *kinds, "salary"))]
    for _ in range(20_000):
        age, years = choose.randrange(17, 90), choose.randrange(1, 17)
        named, income = [f"{kind}{choose.randrange(8)}" for kind in kinds], ">=50k" if years > 9 else "<50k"
        rows.append(",".join(map(str, (age, choose.randrange(10_000, 500_000), years, *named, income))))
    write(path, "\n".join(rows) + "\n")


def graphs(folder: Path) -> None:
    """Writes random graphs in ../data: one of 2,700 nodes as Planetoid's Cora, and 188 small ones as TUDataset's MUTAG."""
    _cora(folder.parent / "data" / "Planetoid" / "Cora" / "raw")
    _mutag(folder.parent / "data" / "TU" / "MUTAG" / "raw")


def _cora(folder: Path) -> None:
    """Writes a graph of which 1,700 nodes are known (`allx`), 140 of them with labels (`x`); `tx` is the rest."""
    folder.mkdir(parents=True, exist_ok=True)
    rng, num, num_known = np.random.default_rng(0), 2_700, 1_700
    kinds = rng.integers(0, 7, num)
    is_typical = np.arange(256) % 7 == kinds[:, None]
    features = (rng.random((num, 256)) < np.where(is_typical, 0.1, 0.02)).astype(np.float32)
    labels, neighbours = np.eye(7, dtype=np.int64)[kinds], rng.integers(0, num, (num, 2))
    parts: dict[str, Any] = {"graph": {node: [int(other) for other in neighbours[node]] for node in range(num)}}
    for name, rows in (("x", slice(0, 140)), ("allx", slice(0, num_known)), ("tx", slice(num_known, num))):
        parts[name], parts[name.replace("x", "y")] = features[rows], labels[rows]
    for name, part in parts.items():
        (folder / f"ind.cora.{name}").write_bytes(pickle.dumps(part))
    write(folder / "ind.cora.test.index", "\n".join(map(str, range(num_known, num))) + "\n")


def _mutag(folder: Path) -> None:
    choose, edges, of, kinds, labels, begin = random.Random(0), [], [], [], [], 1
    for graph in range(1, 189):
        size = choose.randrange(10, 29)
        for node in range(begin + 1, begin + size):
            other = choose.randrange(begin, node)
            edges += [f"{node}, {other}", f"{other}, {node}"]
        of += [str(graph)] * size
        kinds += [str(choose.randrange(7)) for _ in range(size)]
        labels.append("1" if size > 18 else "-1")
        begin += size
    for name, lines in (("A", edges), ("graph_indicator", of), ("node_labels", kinds), ("graph_labels", labels)):
        write(folder / f"MUTAG_{name}.txt", "\n".join(lines) + "\n")


def _lines() -> Iterator[str]:
    yield from (line.strip() for line in text().split("\n") if len(line.split()) > 4)


def causal_tokenizer(folder: Path) -> None:
    """Writes train.txt and a tokenizer for GPT-2 trained on it."""
    write(folder / "train.txt", text())
    _byte_tokenizer(folder / "tokenizer")


def _byte_tokenizer(folder: Path) -> None:
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    inner, end = ByteLevelBPETokenizer(), "<|endoftext|>"
    inner.train_from_iterator(_lines(), vocab_size=VOCABULARY, special_tokens=[end])
    whole = PreTrainedTokenizerFast(tokenizer_object=inner._tokenizer, eos_token=end, bos_token=end, pad_token=end)
    whole.save_pretrained(folder)


def for_language_models(folder: Path) -> None:
    """Writes a small random Llama and its tokenizer in tiny, and data to fine-tune it: texts and preferences."""
    from transformers import LlamaConfig, LlamaForCausalLM

    _byte_tokenizer(folder / "tiny")
    small = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=256, **small)).save_pretrained(folder / "tiny")
    lines, choose = list(_lines()), random.Random(0)
    for split in ("train", "test"):
        texts = [{"text": line} for line in lines[:: 1 if split == "train" else 20]]
        pairs = [{"prompt": line, "chosen": choose.choice(lines), "rejected": line[::-1]} for line in lines[::4]]
        for name, rows in (("texts", texts), ("preferences", pairs)):
            write(folder / name / f"{split}.jsonl", "\n".join(map(json.dumps, rows)) + "\n")


def small_unet(folder: Path) -> None:
    """Writes the config.json of a small UNet of diffusers."""
    config = {"_class_name": "UNet2DModel", "sample_size": 32, "in_channels": 3, "out_channels": 3, "layers_per_block": 1}
    config |= {"block_out_channels": [32, 64], "norm_num_groups": 8}
    config |= {"down_block_types": ["DownBlock2D", "AttnDownBlock2D"], "up_block_types": ["AttnUpBlock2D", "UpBlock2D"]}
    write(folder / "config.json", json.dumps(config))


def bert(folder: Path, kind: str = "BertForMaskedLM") -> None:
    """Writes a small random BERT and its tokenizer."""
    import transformers
    from tokenizers import BertWordPieceTokenizer

    inner = BertWordPieceTokenizer(lowercase=False)
    inner.train_from_iterator(_lines(), vocab_size=VOCABULARY)
    transformers.BertTokenizerFast(tokenizer_object=inner._tokenizer).save_pretrained(folder)
    small = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    getattr(transformers, kind)(transformers.BertConfig(vocab_size=VOCABULARY, **small)).save_pretrained(folder)


def sentence_pairs(folder: Path) -> None:
    """Writes stand-ins for what `nlp_example.py` downloads: a small bert-base-cased, the MRPC pairs of GLUE and its metric."""
    bert(folder / "bert-base-cased", "BertForSequenceClassification")
    lines, choose = [line.replace('"', "'") for line in _lines()], random.Random(0)
    write(folder / "nyu-mll" / "glue" / "README.md", GLUE_CARD)
    for split, number in NUM_PAIRS.items():
        rows = ["sentence1,sentence2,label,idx"]
        for i in range(number):
            first, label = choose.choice(lines), i % 2
            rows.append(f'"{first}","{first if label else choose.choice(lines)}",{label},{i}')
        write(folder / "nyu-mll" / "glue" / "mrpc" / f"{split}.csv", "\n".join(rows) + "\n")
    write(folder / "glue" / "glue.py", GLUE_METRIC)
