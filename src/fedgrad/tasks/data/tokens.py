"""Numbering of words: special tokens first, then words, the most frequent one first."""

from collections import Counter
from collections.abc import Iterable

PAD, OOV, BOS, EOS = range(4)  # padding, unknown word, beginning, end
FIRST = 4


def frequent(words: Iterable[str] | Counter[str], most: int, first: int = 0) -> dict[str, int]:
    """Number the most frequent words, from `first` on; ties are in alphabetical order."""
    counts = words if isinstance(words, Counter) else Counter(words)
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:most]
    return {word: first + i for i, (word, _) in enumerate(ranked)}
