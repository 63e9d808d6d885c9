"""Trains a language model from transformers, starting with random weights: a plain PyTorch script.

    python text.py --model gpt2_small --sequence-length 512 --batch-size 32 --num-workers 4
    torchrun --nproc_per_node=2 text.py --model bert_base

It needs torch and transformers. Nothing is downloaded: models are built from their configuration, and the text is the source of
Python's standard library, or a folder of yours. Words are hashed to tokens, so token frequencies are as uneven as in real text.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import sysconfig
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

sys.path.append(str(Path(__file__).parent))
from recipe_parts import ENDLESS_SAMPLES, SyntheticBatches, add_options, build_loader, positive, run, train

Batch = dict[str, Tensor]

ENDINGS = (".txt", ".md", ".rst", ".py")
# Folders that are not read: inside the standard library's folder, they are far larger than the library.
SKIPPED_FOLDERS = ("site-packages", "dist-packages", "__pycache__")
MAX_TEXT_BYTES = 16 * 2**20  # every loader process holds the text, and more of it would not change the speed
MAX_WORD = 12  # characters of a token; a longer word becomes several tokens
WORD = re.compile(rf"\w{{1,{MAX_WORD}}}|[^\w\s]|\s{{1,{MAX_WORD}}}")
SCATTER = 2_654_435_761  # a large prime by which a sample's index is multiplied, so neighbours lie far apart in the text
PAD, MASK = 0, 1
NUM_SPECIAL = 2  # ids that are not words
# As in BERT's training, MASKED_FRAC of the tokens are to be predicted. Of these, REPLACED_FRAC are replaced by random tokens,
# KEPT_FRAC stay as they are, and all others are masked.
MASKED_FRAC, REPLACED_FRAC, KEPT_FRAC = 0.15, 0.1, 0.1
IGNORED = -100  # label of a token that the loss ignores
HEAD_SIZE = 64  # width of an attention head, if the number of heads is not given


@dataclass(frozen=True)
class Size:
    """A model from the literature: layers, width and vocabulary."""

    family: str
    num_layers: int
    hidden_size: int
    vocab_size: int


MODELS = {
    "gpt2_small": Size("gpt2", 12, 768, 50_257),
    "bert_base": Size("bert", 12, 768, 30_522),
    "llama_small": Size("llama", 12, 768, 32_000),
}


def read_text(folder: Path, at_most: int = MAX_TEXT_BYTES) -> str:
    """Returns the text of a folder's files, always in the same order, without non-ASCII characters.

    Raises:
        FileNotFoundError: there is no text.
    """
    text = ""
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in SKIPPED_FOLDERS)
        for path in (Path(place, name) for name in sorted(names) if name.endswith(ENDINGS)):
            if path.is_file() and len(text) < at_most:
                with path.open("rb") as file:  # it may be larger than the memory
                    text += file.read(at_most - len(text)).decode("ascii", "ignore")
        if len(text) >= at_most:
            break
    if not text:
        raise FileNotFoundError(f"no text in {folder}: files ending in {', '.join(ENDINGS)}")
    return text


class TextWindows(Dataset[Batch]):
    """Windows of `length` tokens in a text, tokenised on loading.

    Args:
        text: the text.
        length: tokens per sample.
        vocab_size: number of different tokens.
        num_samples: samples per epoch.
        is_masked: whether to predict masked tokens, as in BERT, rather than each next token.
    """

    def __init__(self, text: str, *, length: int, vocab_size: int, num_samples: int, is_masked: bool) -> None:
        span = (length + 1) * MAX_WORD  # this many characters always hold enough tokens
        self.text = text if len(text) > span else text * (span // len(text) + 2)
        self.span, self.length, self.vocab_size = span, length, vocab_size
        self.num_samples, self.is_masked = num_samples, is_masked

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Batch:
        start = index * SCATTER % (len(self.text) - self.span)
        words = islice(WORD.finditer(self.text, start), self.length)
        num_words = self.vocab_size - NUM_SPECIAL
        tokens = torch.tensor([NUM_SPECIAL + zlib.crc32(word[0].encode()) % num_words for word in words])
        return masked(tokens, self.vocab_size) if self.is_masked else {"input_ids": tokens, "labels": tokens.clone()}


def masked(tokens: Tensor, vocab_size: int) -> Batch:
    """Returns "input_ids", with some chosen tokens masked or replaced, and "labels": the chosen tokens, IGNORED elsewhere."""
    is_chosen = torch.rand(tokens.shape) < MASKED_FRAC
    is_chosen[int(torch.randint(len(tokens), ()))] = True  # a batch without a chosen token has no loss
    labels = torch.where(is_chosen, tokens, IGNORED)
    fate = torch.rand(tokens.shape)
    others = torch.randint(NUM_SPECIAL, vocab_size, tokens.shape)
    shown = torch.where(fate < KEPT_FRAC, tokens, torch.where(fate < KEPT_FRAC + REPLACED_FRAC, others, MASK))
    return {"input_ids": torch.where(is_chosen, shown, tokens), "labels": labels}


def vocab_size(options: argparse.Namespace) -> int:
    """Returns the number of different tokens."""
    return int(options.vocab_size or MODELS[options.model].vocab_size)


def build_batches(options: argparse.Namespace, device: torch.device) -> Iterable[Batch]:
    """Returns an iterable of batches {"input_ids", "labels"} of [batch, length], to be iterated once per epoch.

    Raises:
        FileNotFoundError: the folder holds no text.
    """
    if options.data == "synthetic":
        shape, words = (options.batch_size, options.sequence_length), vocab_size(options)

        def make() -> Batch:
            tokens = torch.randint(NUM_SPECIAL, words, shape, device=device)
            return {"input_ids": tokens, "labels": tokens.clone()}

        return SyntheticBatches(options, make)
    data = TextWindows(
        read_text(options.data_root or Path(sysconfig.get_path("stdlib"))),
        length=options.sequence_length,
        vocab_size=vocab_size(options),
        num_samples=options.samples_per_epoch or ENDLESS_SAMPLES,
        is_masked=MODELS[options.model].family == "bert",
    )
    return build_loader(data, options)


def build_model(options: argparse.Namespace) -> nn.Module:
    """Returns the model with random weights, in its standard size unless the options give another."""
    import transformers

    usual = MODELS[options.model]
    layers, hidden = options.num_layers or usual.num_layers, options.hidden_size or usual.hidden_size
    heads = options.num_heads or max(1, hidden // HEAD_SIZE)
    words, length = vocab_size(options), options.sequence_length
    model: nn.Module
    if usual.family == "gpt2":
        model = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=words, n_positions=length, n_embd=hidden, n_layer=layers, n_head=heads,
                bos_token_id=None, eos_token_id=None, use_cache=False, loss_type="ForCausalLM",  # type: ignore[call-arg]
            )
        )  # fmt: skip
    elif usual.family == "bert":
        model = transformers.BertForMaskedLM(
            transformers.BertConfig(
                vocab_size=words, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
                intermediate_size=4 * hidden, max_position_embeddings=max(512, length), pad_token_id=PAD,
            )
        )  # fmt: skip
    else:
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=words, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
                num_key_value_heads=heads, intermediate_size=-(-8 * hidden // 3 // HEAD_SIZE) * HEAD_SIZE,
                max_position_embeddings=length, bos_token_id=None, eos_token_id=None, use_cache=False,
            )
        )  # fmt: skip
    return model


def own_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Returns the loss that the model computes itself."""
    return model(**batch).loss


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(description="Trains a language model of transformers from random weights.")
    parser.add_argument("--model", choices=tuple(MODELS), default="gpt2_small")
    parser.add_argument("--num-layers", type=positive, help="default: the model's own")
    parser.add_argument("--hidden-size", type=positive, help="default: the model's own")
    parser.add_argument("--num-heads", type=positive, help=f"attention heads; default: hidden size / {HEAD_SIZE}, at least 1")
    parser.add_argument("--vocab-size", type=positive, help="number of different tokens; default: the model's own")
    parser.add_argument("--data", choices=("text", "synthetic"), default="text")
    parser.add_argument("--data-root", type=Path, help="folder of text files; default: Python's standard library")
    parser.add_argument("--sequence-length", type=positive, default=512, help="tokens per sample")
    add_options(parser, lr=3e-4, optimizer="adamw")
    return parser


def main() -> None:
    """Reads the command line and trains."""
    parser = build_parser()
    options = parser.parse_args()
    hidden = options.hidden_size or MODELS[options.model].hidden_size
    heads = options.num_heads or max(1, hidden // HEAD_SIZE)
    if hidden % (2 * heads):
        parser.error(f"--hidden-size: must be a multiple of {2 * heads}, twice the number of attention heads, got {hidden}")
    if vocab_size(options) <= NUM_SPECIAL:
        parser.error(f"--vocab-size: must be more than {NUM_SPECIAL}, got {options.vocab_size}")

    def start(device: torch.device) -> None:
        try:
            batches = build_batches(options, device)
        except FileNotFoundError as error:
            parser.error(f"--data-root: {error}")
        model = build_model(options)
        train(options, device, batches, model, own_loss, unit="tokens", count=lambda batch: batch["input_ids"].numel())

    run(parser, options, start)


if __name__ == "__main__":
    main()
