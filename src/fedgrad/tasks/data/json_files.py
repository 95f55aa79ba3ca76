"""JSON: LEAF's files, one object per line, or the examples of each client by its name."""

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedgrad.tasks.data.source import DataError, RawClient, Source, part_of

GZIP = b"\x1f\x8b"
CLIENT = ("client_id", "client", "user_id", "user")


class Json(Source):
    """Clients of JSON files, which are all read at once. Each file comes with its part."""

    def __init__(self, files: list[tuple[str, Path]], name: str) -> None:
        self.name = name
        self.found: list[RawClient] = []
        for part, path in files:
            self.found += _clients(_read(path), part, str(path))
        self.total = len(self.found)

    @classmethod
    def folder(cls, path: Path) -> "Json | None":
        """Read a LEAF folder: JSON files, also in train/ and test/; None if there are none."""
        files = [("", file) for file in sorted(path.glob("*.json"))]
        for part in ("train", "test"):
            files += [(part, file) for file in sorted((path / part).glob("*.json"))]
        return cls(files, str(path)) if files else None

    def clients(self) -> Iterator[RawClient]:
        """Return the clients in the order of the files."""
        return iter(self.found)


def _read(path: Path) -> Any:
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if raw.startswith(GZIP) else raw).decode()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise DataError.here(f"{path} cannot be read: {error}.") from error
    try:
        return json.loads(text)
    except RecursionError as error:
        raise DataError.here(f"{path} is no JSON of clients: it is nested too deep.") from error
    except ValueError as error:
        lines = text.split("\n")  # splitlines would also split inside texts
        if len(lines) < 2 or not lines[0].rstrip().endswith("}"):
            raise DataError.here(f"{path} is no JSON: {error}.") from error
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            raise DataError.here(f"{path}:{number} is no JSON: {error}.") from error
    return rows


def _clients(content: Any, part: str, where: str) -> list[RawClient]:
    if isinstance(content, list):
        return _of_lines(content, part, where)
    if not isinstance(content, dict):
        raise DataError.here(f"{where} holds {type(content).__name__}, not clients by name.")
    if any(isinstance(content.get(key), str | int) for key in CLIENT):  # a single line
        return _of_lines([content], part, where)
    if "user_data" not in content:
        return [_of_values(name, values, part, where) for name, values in content.items()]
    data, users, sizes = (content.get(k) for k in ("user_data", "users", "num_samples"))
    if not isinstance(data, dict) or not isinstance(users, list) or not isinstance(sizes, list):
        raise DataError.here(f"{where}: `users`, `num_samples` or `user_data` is not LEAF's.")
    if sorted(map(str, users)) != sorted(data) or len(sizes) != len(users):
        raise DataError.here(
            f"{where}: `users`, `num_samples` and `user_data` do not name the same clients: the "
            "file is not whole."
        )
    for user, size in zip(users, sizes, strict=True):
        if not isinstance(user, str) or not isinstance(data[user], dict):
            raise DataError.here(f"{where}: client {user!r} has no columns by name.")
        rows = {len(column) for column in data[user].values() if isinstance(column, list)}
        if rows != {size}:
            raise DataError.here(f"{where}: client {user!r} has {rows} examples, not {size}.")
    return [RawClient(user, part, data[user]) for user in users]


def _of_values(name: str, values: Any, part: str, where: str) -> RawClient:
    if isinstance(values, dict):
        return RawClient(name, part, values)
    if not isinstance(values, list):
        raise DataError.here(f"{where}: {name!r} has {type(values).__name__}, not examples.")
    return RawClient(name, part, {"x": values})


def _of_lines(rows: list[Any], part: str, where: str) -> list[RawClient]:
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for number, row in enumerate(rows, 1):
        key = next((k for k in CLIENT if isinstance(row, dict) and k in row), None)
        if key is None:
            raise DataError.here(f"{where}:{number} does not name its client as {CLIENT[0]!r}.")
        its_part = part or part_of(row.get("split", ""), where)
        groups.setdefault((its_part, str(row[key])), []).append(row)
    return [
        RawClient(client, its_part, {name: [row.get(name) for row in its] for name in _names(its)})
        for (its_part, client), its in groups.items()
    ]


def _names(rows: list[dict[str, Any]]) -> list[str]:
    """Return the names of all columns; a row without one has None, which is refused if used."""
    return list(dict.fromkeys(name for row in rows for name in row))
