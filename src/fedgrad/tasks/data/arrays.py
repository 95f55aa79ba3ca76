"""npz files: arrays with one row per example, where `client` names the client of each row.

Names may begin with `train_`, `test_` or `validation_`. Without `client`, the task divides them.
"""

import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fedgrad.tasks.data.source import PARTS, Columns, DataError, RawClient, Source

ZIP = b"PK"
CLIENT = ("client", "client_id")
# A zip with a password or an unknown compression raises RuntimeError.
UNREADABLE = (zipfile.BadZipFile, zlib.error, ValueError, OSError, EOFError, RuntimeError,
              MemoryError)  # fmt: skip
Divide = Callable[[Columns, str], list[np.ndarray]]


class Arrays(Source):
    """Examples of all clients, by part; `divide` assigns them to clients if the data do not."""

    def __init__(self, parts: dict[str, dict[str, Any]], name: str, divide: Divide | None) -> None:
        self.name = name
        self.parts: list[tuple[str, dict[str, Any], list[tuple[str, np.ndarray]]]] = []
        for part, columns in parts.items():
            whose = next((columns.pop(k) for k in CLIENT if k in columns), None)
            if whose is not None:
                if np.ndim(whose) != 1:
                    raise DataError.here(
                        f"{name}: 'client' says whose each example is, so it is a vector; got "
                        f"shape {np.shape(whose)}."
                    )
                names, index = np.unique(whose, return_inverse=True)
                rows = np.split(np.argsort(index, kind="stable"), np.cumsum(np.bincount(index)))
                clients = [(str(n), r) for n, r in zip(names, rows, strict=False)]
                columns = {k: v for k, v in columns.items() if len(v) == len(index)}
            elif divide is not None:
                try:
                    divided = divide(columns, part)
                except ValueError as error:
                    raise DataError.here(f"{name}: {part or 'it'}: {error}.") from error
                clients = [(f"{part}-{i}", rows) for i, rows in enumerate(divided)]
            else:
                raise DataError.here(
                    f"{name} does not say whose examples are whose: give it an array 'client'."
                )
            self.parts.append((part, columns, clients))
        self.total = sum(len(clients) for _, _, clients in self.parts)

    @classmethod
    def file(cls, path: Path, divide: Divide | None) -> "Arrays":
        """Read an npz file."""
        parts: dict[str, dict[str, Any]] = {}
        try:
            with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
                for name in file.files:
                    part, _, rest = name.partition("_")
                    if rest and part in PARTS:
                        parts.setdefault(PARTS[part], {})[rest] = file[name]
                    else:
                        parts.setdefault("", {})[name] = file[name]
        except UNREADABLE as error:
            raise DataError.here(f"{path} cannot be read as npz: {error}.") from error
        parts = {part: {k: v for k, v in c.items() if np.ndim(v)} for part, c in parts.items()}
        return cls(parts, str(path), divide)

    def clients(self) -> Iterator[RawClient]:
        """Yield the clients, one part after another, by name."""
        for part, columns, clients in self.parts:
            for name, rows in clients:
                picked = {k: [v[i] for i in rows] if isinstance(v, list) else v[rows]
                          for k, v in columns.items()}  # fmt: skip
                yield RawClient(name, part, picked)
