"""Counts how much of a step's tokens is padding, from the indices with which the model looks up its embeddings.

Padding is one token, repeated at the end or at the beginning of a sample. A sample that is only one repeated token does not
count as padding.
"""

from __future__ import annotations

from typing import Any, Dict, Iterator, List, Tuple

from torch import Tensor

from .documents import IN_ALL, PADDED

MIN_LENGTH = 16  # in shorter samples, a token may be repeated by chance


class Padding:
    """The tokens of one step: the 2-D indices into the model's largest embedding table.

    Smaller tables are ignored, because they hold positions or segments.
    """

    def __init__(self) -> None:
        self._num_rows = 0  # of the largest table
        self._seen: List[Any] = []  # the indices
        self._is_packed = False  # whether the program removes the padding after the look-up

    def note(self, name: str, arguments: Tuple[Any, ...]) -> None:
        """Records a call of an operator of `torch.ops.aten`: "embedding" or "_pack_padded_sequence"."""
        if name != "embedding":
            self._is_packed = True
            return
        num_rows, indices = int(arguments[0].shape[0]), arguments[1]
        if num_rows > self._num_rows:
            self._num_rows, self._seen = num_rows, []
        if num_rows == self._num_rows and indices.dim() == 2:
            self._seen.append(indices.detach())

    def result(self) -> Dict[str, float]:
        """Returns the value of `Memory.padding`. Called after the step."""
        if self._is_packed or not self._seen:
            return {}
        counts = [max(map(_counted, _turned(Tensor.cpu(indices)))) for indices in self._seen]
        whole = sum(indices.numel() for indices in self._seen)
        return {PADDED: sum(padded for padded, _ in counts) / whole, IN_ALL: sum(in_all for _, in_all in counts) / whole}


def _turned(indices: Any) -> Iterator[Any]:
    """Yields indices as samples x positions with the padding at the end, for each way in which they may be laid out."""
    for each in (indices, indices.t()):
        if each.shape[1] >= MIN_LENGTH:
            yield from (each, each.flip(1))
    yield indices[:0]


def _counted(samples: Any) -> Tuple[int, int]:
    """Returns the number of padding tokens, and the number of those at positions where all samples are padded."""
    if not samples.numel():
        return 0, 0
    last = samples[:, -1]
    lengths = (samples == last[:, None]).flip(1).long().cumprod(1).sum(1)  # of the run of equal tokens at the end
    lengths = lengths * ((lengths > 1) & (lengths < samples.shape[1]))
    tokens, which = last.unique(return_inverse=True)
    most = lengths.new_zeros(len(tokens)).scatter_add(0, which, lengths).argmax()  # one token is used for padding
    lengths = lengths * (which == most)
    return int(lengths.sum()), int(lengths.min()) * len(lengths)
