"""Hugging Face's Trainer with a tiny, untrained BERT and random data; it evaluates from time to time."""

import sys

import journal
import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainerCallback, TrainingArguments


class Data(Dataset):
    def __init__(self, count):
        self.tokens = torch.randint(0, 64, (count, 10))

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": int(self.tokens[index][0] % 2)}


class Watched(Trainer):
    """Overrides `compute_loss` to keep the loss of each step, as programs with weighted losses do."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        self.num_samples = len(inputs["input_ids"])
        self.loss = super().compute_loss(model, inputs, *args, **kwargs)
        return self.loss


class Watch(TrainerCallback):
    def on_step_end(self, *_, **__):
        journal.step(trainer.loss, trainer.num_samples, trainer.optimizer)

    def on_evaluate(self, *_, **__):
        journal.away()

    last = 0

    def on_log(self, arguments, state, *_, logs, **__):
        if "loss" in logs:
            journal.note(reads_every=state.global_step - self.last, filters=arguments.logging_nan_inf_filter)
            self.last = state.global_step


torch.manual_seed(0)
config = BertConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
model = BertForSequenceClassification(config)
query = model.bert.encoder.layer[0].attention.self.query
query.register_forward_hook(lambda module, inputs, output: journal.inside(inputs[0], output) if module.training else None)
arguments = TrainingArguments(
    output_dir=sys.argv[1],
    use_cpu=True,
    per_device_train_batch_size=12,
    max_steps=1_000_000,
    eval_strategy="steps",
    eval_steps=50,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
    logging_steps=5,
)
trainer = Watched(model, arguments, train_dataset=Data(240), eval_dataset=Data(40), callbacks=[Watch()])
trainer.train()
