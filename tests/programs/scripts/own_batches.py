"""Uses no DataLoader: batches are slices of one long array of tokens. A step takes four batches; the model returns its loss."""

import journal
import torch
from torch import nn

BATCH, LENGTH, MICRO = 8, 16, 4


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.mix, self.head = nn.Embedding(64, 32), nn.Linear(32, 32), nn.Linear(32, 64, bias=False)
        self.head.weight = nn.Parameter(self.embedding.weight.detach().clone())

    def forward(self, tokens, targets=None):
        hidden = self.mix(self.embedding(tokens)).relu()
        journal.inside(tokens, hidden)
        logits = self.head(hidden)
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


torch.manual_seed(0)
text = torch.randint(0, 64, (10_000,))


def next_batch():
    starts = torch.randint(0, len(text) - LENGTH - 1, (BATCH,)).tolist()
    return (torch.stack([text[at + shift : at + shift + LENGTH] for at in starts]) for shift in (0, 1))


model = LanguageModel()
decayed = [p for p in model.parameters() if p.dim() > 1]
others = [p for p in model.parameters() if p.dim() == 1]
optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=1e-3)
tokens, targets = next_batch()
while True:
    for _ in range(MICRO):
        _, loss = model(tokens, targets)
        tokens, targets = next_batch()  # on a GPU, this would overlap with the step
        (loss / MICRO).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    journal.step(loss, BATCH * MICRO * LENGTH, optimizer)
