"""Trains a classifier of sentences of many lengths."""

import torch
from meter import Meter, options, revision
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

REVISION = revision("A")
WORDS, CLASSES, BATCH, WIDTH = 2_000, 8, 64, 48


class Sentences(Dataset[tuple[Tensor, int]]):
    """Word numbers of sentences, and their classes."""

    def __init__(self, length: int) -> None:
        generator = torch.Generator().manual_seed(2)
        lengths = torch.randint(30, 90, (2_000,), generator=generator).tolist()
        self.sentences = [torch.randint(1, WORDS, (num,), generator=generator) for num in lengths]
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.sentences[index % len(self.sentences)], index % CLASSES


def batch_of(pairs: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    """Returns sentences as one tensor, filled up with zeros, and their classes."""
    labels = torch.tensor([label for _, label in pairs])
    if REVISION == 2:
        return nn.utils.rnn.pad_sequence([words for words, _ in pairs], batch_first=True), labels
    longest = max(len(words) for words, _ in pairs)
    rows = torch.zeros(len(pairs), longest, dtype=torch.long)
    for row, (words, _) in enumerate(pairs):
        for column in range(len(words)):
            rows[row, column] = words[column]
    return rows, labels


class Classifier(nn.Module):
    """Mean of word vectors through two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, padding_idx=0)
        self.mix = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU())
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, rows: Tensor) -> Tensor:
        return self.head(self.mix(self.words(rows)).mean(1))


def main() -> None:
    """Trains."""
    settings = options()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the layers are too small for more
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    data = Sentences(400_000)
    loader = DataLoader(data, BATCH, shuffle=True, num_workers=2, persistent_workers=True, collate_fn=batch_of)
    meter = Meter(settings.seconds)
    for _ in range(settings.epochs):
        for rows, labels in loader:
            loss = nn.functional.cross_entropy(model(rows), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if meter.add(len(rows)):
                return


if __name__ == "__main__":
    main()
