"""Generated data, so that tasks run without files.

They resemble the real data in form only: shapes, clients that differ, something to learn.
"""

import numpy as np

from fedgrad.tasks.data.source import RawClient

ROWS = 40  # the approximate number of examples of a client


def characters(clients: int | None, rng: np.random.Generator) -> list[RawClient]:
    """Generate ten characters of four strokes; writers differ in slant, offset and pen width."""
    strokes = rng.uniform(6, 22, (10, 4, 2, 2))  # class, stroke, end, coordinate
    made = []
    for i in range(clients or 50):
        slant, shift, pen = rng.normal(0, 0.15), rng.normal(0, 1.0, 2), rng.uniform(1.0, 1.8)
        labels = rng.integers(0, 10, rng.integers(ROWS // 2, 2 * ROWS))
        ends = strokes[labels] + rng.normal(0, 0.5, (len(labels), 4, 2, 2))
        ends = ends + shift
        ends[..., 1] += slant * (14 - ends[..., 0])
        made.append(RawClient(f"writer-{i}", "", {"x": _drawn(ends, pen), "y": labels}))
    return made


def _drawn(ends: np.ndarray, pen: float) -> np.ndarray:
    """Draw strokes (image, stroke, end, coordinate), dark on white."""
    grid = np.stack(np.meshgrid(np.arange(28), np.arange(28), indexing="ij"), -1).reshape(-1, 2)
    start = ends[:, :, None, 0]
    along = ends[:, :, None, 1] - start
    to_pixel = grid - start
    place = np.sum(to_pixel * along, -1) / np.maximum(np.sum(along**2, -1), 1e-6)
    nearest = to_pixel - np.clip(place, 0, 1)[..., None] * along
    distance = np.sqrt(np.sum(nearest**2, -1)).min(1)
    ink = np.clip(1.5 - distance / pen, 0, 1)
    return np.round(255 * (1 - ink)).astype(np.uint8).reshape(-1, 28, 28)


def textures(clients: int | None, rng: np.random.Generator) -> list[RawClient]:
    """Generate 20 classes of waves in two colors, in four groups; each client has two groups."""
    colors = rng.uniform(40, 215, (20, 2, 3))
    waves = rng.normal(0, 0.5, (100, 2))
    grid = np.stack(np.meshgrid(np.arange(32), np.arange(32), indexing="ij"), -1)
    made = []
    many = clients or 50
    for part, number in (("train", many), ("test", max(1, many // 5))):
        for i in range(number):
            kinds = rng.choice(4, 2, replace=False)
            labels = 5 * rng.choice(kinds, ROWS) + rng.integers(0, 5, ROWS)
            phase = np.einsum("ijc,nc->nij", grid, waves[labels]) + rng.uniform(
                0, 6.3, (ROWS, 1, 1)
            )
            share = (0.5 + 0.5 * np.sin(phase))[..., None]
            first, second = (colors[labels // 5, k][:, None, None] for k in (0, 1))
            image = share * first + (1 - share) * second + rng.normal(0, 12, (ROWS, 32, 32, 3))
            pixels = np.clip(image, 0, 255).astype(np.uint8)
            made.append(RawClient(f"{part}-{i}", part, {"x": pixels, "y": labels}))
    return made


class _Language:
    """A random language: each word has a few likely successors."""

    def __init__(self, words: int, rng: np.random.Generator) -> None:
        syllables = [c + v for c in "bdfgklmnprstvz" for v in "aeiou"]
        longest = 3 if words > 500 else 2
        found: dict[str, None] = {}
        while len(found) < words:
            parts = rng.choice(syllables, rng.integers(1, longest + 1))
            found["".join(parts)] = None
        self.words = np.array(list(found))
        self.follow = rng.integers(0, words, (words, 4))

    def sentence(self, rng: np.random.Generator, favorites: np.ndarray) -> list[str]:
        """Return 5 to 15 words, occasionally one of the `favorites`."""
        word = int(rng.choice(favorites))
        said = [word]
        for _ in range(rng.integers(4, 15)):
            if rng.random() < 0.2:
                word = int(rng.choice(favorites))
            else:
                word = int(self.follow[word, min(int(rng.exponential(1.0)), 3)])
            said.append(word)
        return [str(self.words[number]) for number in said]


def speeches(clients: int | None, rng: np.random.Generator) -> list[RawClient]:
    """Generate roles with favorite words of their own."""
    language = _Language(120, rng)
    made = []
    for i in range(clients or 30):
        favorites = rng.integers(0, 120, 6)
        speech = [
            " ".join(language.sentence(rng, favorites)).capitalize() + "."
            for _ in range(rng.integers(10, 30))
        ]
        made.append(RawClient(f"role-{i}", "", {"snippets": speech}))
    return made


def posts(clients: int | None, rng: np.random.Generator) -> list[RawClient]:
    """Generate users who write about a few of 40 tags, each of which has favorite words."""
    language = _Language(800, rng)
    of_tag = rng.integers(0, 800, (40, 5))
    many = clients or 60
    few = max(1, many // 6)
    made = []
    for part, number in (("train", many), ("validation", few), ("test", few)):
        for i in range(number):
            interests = rng.choice(40, 3, replace=False)
            columns: dict[str, list[str]] = {"tokens": [], "tags": [], "title": []}
            for _ in range(rng.integers(ROWS // 2, 2 * ROWS)):
                tags = rng.choice(interests, rng.integers(1, 3), replace=False)
                favorites = of_tag[tags].ravel()
                columns["tokens"].append(" ".join(language.sentence(rng, favorites)))
                columns["title"].append(" ".join(language.sentence(rng, favorites)[:4]))
                columns["tags"].append("|".join(f"tag-{t}" for t in tags))
            made.append(RawClient(f"{part}-{i}", part, columns))
    return made
