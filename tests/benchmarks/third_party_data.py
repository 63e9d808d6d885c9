"""Makes small data sets for other people's training programs from data that every machine has, in the form they expect.

Text is Python's own documentation (`pydoc_data.topics`); images are scikit-learn's digits and photographs. The programs'
libraries (tokenizers, transformers) are imported only in the functions that need them.
"""

from __future__ import annotations

import random
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

NUM_DIGITS_TRAIN, NUM_DIGITS_TEST = 60_000, 10_000  # the sizes of MNIST, because programs split the data at these numbers
NUM_PHOTOS = {"train": 512, "val": 64}
PHOTO_PIXELS = 256
NUM_PAIRS = {"train": 2_000, "validation": 200}
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


def mnist(*roots: Path) -> None:
    """Writes the four files of MNIST as torchvision reads them, with scikit-learn's digits, enlarged and shifted."""
    from PIL import Image
    from sklearn.datasets import load_digits

    digits = load_digits()
    small = [Image.fromarray((image * 15).astype(np.uint8)).resize((24, 24)) for image in digits.images]
    choose = random.Random(0)
    for kind, number in (("train", NUM_DIGITS_TRAIN), ("t10k", NUM_DIGITS_TEST)):
        images, labels = np.zeros((number, 28, 28), np.uint8), np.zeros(number, np.uint8)
        for i in range(number):
            which, x, y = choose.randrange(len(small)), choose.randrange(5), choose.randrange(5)
            images[i, y : y + 24, x : x + 24], labels[i] = np.asarray(small[which]), digits.target[which]
        for root in roots:
            raw = root / "MNIST" / "raw"
            raw.mkdir(parents=True, exist_ok=True)
            (raw / f"{kind}-images-idx3-ubyte").write_bytes(struct.pack(">4i", 2051, number, 28, 28) + images.tobytes())
            (raw / f"{kind}-labels-idx1-ubyte").write_bytes(struct.pack(">2i", 2049, number) + labels.tobytes())


def photos(folder: Path) -> None:
    """Writes JPEG files, train/CLASS/*.jpg and val/CLASS/*.jpg: crops of scikit-learn's two photographs."""
    from PIL import Image
    from sklearn.datasets import load_sample_images

    whole, choose = [Image.fromarray(image) for image in load_sample_images().images], random.Random(0)
    for split, number in NUM_PHOTOS.items():
        for i in range(number):
            source = whole[i % len(whole)]
            x, y = (choose.randrange(size - PHOTO_PIXELS) for size in source.size)
            place = folder / split / f"class{i % len(whole)}" / f"{i:04d}.jpg"
            place.parent.mkdir(parents=True, exist_ok=True)
            source.crop((x, y, x + PHOTO_PIXELS, y + PHOTO_PIXELS)).save(place)


def _lines() -> Iterator[str]:
    yield from (line.strip() for line in text().split("\n") if len(line.split()) > 4)


def causal_tokenizer(folder: Path) -> None:
    """Writes train.txt and a tokenizer for GPT-2 trained on it."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    write(folder / "train.txt", text())
    inner = ByteLevelBPETokenizer()
    inner.train_from_iterator(_lines(), vocab_size=VOCABULARY, special_tokens=["<|endoftext|>"])
    whole = PreTrainedTokenizerFast(tokenizer_object=inner._tokenizer, eos_token="<|endoftext|>", bos_token="<|endoftext|>")
    whole.save_pretrained(folder / "tokenizer")


def sentence_pairs(folder: Path) -> None:
    """Writes stand-ins for what `nlp_example.py` downloads: a tiny bert-base-cased, the MRPC pairs of GLUE and its metric."""
    from tokenizers import BertWordPieceTokenizer
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

    inner = BertWordPieceTokenizer(lowercase=False)
    inner.train_from_iterator(_lines(), vocab_size=VOCABULARY)
    bert = folder / "bert-base-cased"
    BertTokenizerFast(tokenizer_object=inner._tokenizer).save_pretrained(bert)
    small = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 512}
    BertForSequenceClassification(BertConfig(vocab_size=VOCABULARY, **small)).save_pretrained(bert)
    lines, choose = [line.replace('"', "'") for line in _lines()], random.Random(0)
    write(folder / "nyu-mll" / "glue" / "README.md", GLUE_CARD)
    for split, number in NUM_PAIRS.items():
        rows = ["sentence1,sentence2,label,idx"]
        for i in range(number):
            first, label = choose.choice(lines), i % 2
            rows.append(f'"{first}","{first if label else choose.choice(lines)}",{label},{i}')
        write(folder / "nyu-mll" / "glue" / "mrpc" / f"{split}.csv", "\n".join(rows) + "\n")
    write(folder / "glue" / "glue.py", GLUE_METRIC)
