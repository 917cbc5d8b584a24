"""Sealed segments of the ledger: JSON lines turned into Parquet, and read back as the same records.

One row is one rollout, in the order of the lines. Columns are the record's fields, the `class`, and `versions` (who
sampled it, oldest first) for those who query with pandas or DuckDB; contexts of segments are whole, so that a row can
be read by itself. A field that this version doesn't know is kept as JSON in `extra`, so that nothing is lost in turning
over.
"""

from __future__ import annotations

import bisect
import itertools
import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pa_json
import pyarrow.parquet as pq

from slime_backend.provenance.errors import ConversionError, RecordError
from slime_backend.provenance.kv_contexts import KEEP, restore
from slime_backend.provenance.records import RolloutRecord
from slime_backend.run_files import replace_file
from slime_backend.run_files.jsonl import scan_lines

GROUP_BYTES = 512 * 1024  # of JSON in a row group: what one look-up has to decode
BLOCK_BYTES = 64 * 1024 * 1024  # no record may be longer than a block of the JSON reader
# What reading a damaged file raises, a bad block or contents that its own checks refuse.
UNREADABLE = (pa.ArrowException, OSError, ValueError, KeyError, TypeError)
OPEN_FILES = 64  # opening one costs as much as reading a row group

_SPAN = pa.struct([("version", pa.string()), ("start", pa.int64()), ("end", pa.int64())])
_SEGMENT = pa.struct(
    [
        ("start", pa.int64()),
        ("end", pa.int64()),
        ("version", pa.string()),
        ("context", pa.list_(_SPAN)),
        ("measured", pa.bool_()),
        ("measured_context", pa.list_(_SPAN)),
    ]
)
_MEASURED = ("measured", "measured_context")
_SHORT_SEGMENT = pa.struct([*_SEGMENT, (KEEP, pa.int64())])  # as it lies in a line
_PREFILL = pa.struct(
    [
        ("epoch", pa.int64()),
        ("order", pa.int64()),
        ("version", pa.string()),
        ("cached", pa.int64()),
        ("total", pa.int64()),
    ]
)
SCHEMA = pa.schema(
    [
        ("receipt", pa.string()),
        ("group", pa.string()),
        ("session", pa.string()),
        ("engine", pa.string()),
        ("class", pa.string()),
        ("versions", pa.list_(pa.string())),
        ("question", pa.string()),
        ("reward", pa.float64()),
        ("temperature", pa.float64()),
        ("finish_reason", pa.string()),
        ("submitted_at", pa.float64()),
        ("finished_at", pa.float64()),
        ("attempts", pa.int64()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("output_ids", pa.list_(pa.int32())),
        ("logprobs", pa.list_(pa.float64())),  # as the JSON has them: a log-prob must not change by being filed
        ("spans", pa.list_(_SPAN)),
        ("segments", pa.list_(_SEGMENT)),
        ("prefills", pa.list_(_PREFILL)),
        ("extra", pa.string()),
    ]
)
_TOKENS = ("prompt_ids", "output_ids", "logprobs")
_DERIVED = ("versions", "extra")
_REQUIRED = [name for name in SCHEMA.names if name not in ("session", "class", "attempts", *_DERIVED)]
_STORED = pa.schema(
    [
        pa.field("segments", pa.list_(_SHORT_SEGMENT)) if field.name == "segments" else field
        for field in SCHEMA
        if field.name not in _DERIVED
    ]
)
_STATISTICS = ["receipt", "group", "session", "engine", "class", "reward", "submitted_at"]  # the others only cost


def convert(lines: Path, parquet: Path) -> int:
    """Write `lines` as `parquet`, whole or not at all, and on the disk; returns its rows. The lines stay.

    Raises ConversionError (a full disk, a value that its column can't hold, a damaged line: it stays as it is, and so
    do the lines around it).
    """
    try:
        table = _read_table(lines)
        if table.num_rows != _count_lines(lines):
            raise ValueError(f"{table.num_rows} rows of {_count_lines(lines)} lines; one is blank or cut off")
        bytes_per_row = max(1, lines.stat().st_size // max(1, table.num_rows))

        def write(file: BinaryIO) -> None:
            pq.write_table(
                table,
                file,
                row_group_size=max(1, GROUP_BYTES // bytes_per_row),
                compression="zstd",
                write_statistics=_STATISTICS,
            )

        replace_file(parquet, write, durable=True)
    except (OSError, pa.ArrowException, ValueError, KeyError, TypeError) as error:
        raise ConversionError(f"{lines.name}: {type(error).__name__}: {error}") from error
    return int(table.num_rows)


def _read_table(lines: Path) -> pa.Table:
    try:
        return _parse(lines)
    except (pa.ArrowInvalid, TypeError):  # a field that isn't in the schema, NaN, which strict JSON lacks, or damage
        return _parse_leniently(lines)


def _count_lines(lines: Path) -> int:
    with lines.open("rb") as file:
        return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(1 << 20), b""))


def _parse(lines: Path) -> pa.Table:
    """pyarrow's own reader: ten times as fast as the lenient way, and strict."""
    table = pa_json.read_json(
        lines,
        read_options=pa_json.ReadOptions(block_size=BLOCK_BYTES, use_threads=False),
        parse_options=pa_json.ParseOptions(explicit_schema=_STORED, unexpected_field_behavior="error"),
    )
    lacking = [name for name in _REQUIRED if table[name].null_count]
    if lacking:  # the reader takes a missing field for null
        raise pa.ArrowInvalid(f"a line lacks {', '.join(lacking)}")
    versions = [list(dict.fromkeys(span["version"] for span in spans)) for spans in table["spans"].to_pylist()]
    table = table.set_column(table.schema.get_field_index("segments"), "segments", _whole(table["segments"]))
    table = table.append_column("versions", pa.array(versions, pa.list_(pa.string())))
    table = table.append_column("extra", pa.nulls(table.num_rows, pa.string()))
    return table.select(SCHEMA.names)


def _whole(stored: pa.ChunkedArray) -> pa.ChunkedArray:
    """Segments with whole contexts. Row by row only where one is shortened: each Python object costs a microsecond."""
    kept = pc.struct_field(pc.list_flatten(stored), KEEP)
    if kept.null_count == len(kept):
        return stored.cast(pa.list_(_SEGMENT))
    return pa.chunked_array([[restore(segments) for segments in stored.to_pylist()]], pa.list_(_SEGMENT))


def _parse_leniently(lines: Path) -> pa.Table:
    records = _checked(lines)
    chunks = []
    while chunk := [_to_row(record) for record in itertools.islice(records, 256)]:
        chunks.append(pa.Table.from_pylist(chunk, SCHEMA))
    return pa.concat_tables(chunks) if chunks else SCHEMA.empty_table()


def _checked(lines: Path) -> Iterator[dict[str, Any]]:
    """Every record. Raises ValueError for the first damaged line."""
    with lines.open("rb") as file:
        for line in scan_lines(file, lines):
            if line.record is None:
                raise ValueError(f"line {line.number} is damaged: {line.damaged or 'it is blank'}")
            try:
                RolloutRecord.from_json(line.record)
            except RecordError as error:
                raise ValueError(f"line {line.number} is damaged: {error}") from error
            yield line.record


def read_rows(path: Path, *, without_tokens: bool = False) -> Iterator[dict[str, Any]]:
    """Every record, in order; without prompt, output and log-probs where these aren't needed."""
    columns = [name for name in SCHEMA.names if name not in _TOKENS] if without_tokens else None
    with pq.ParquetFile(path) as file:
        for group in range(file.num_row_groups):
            yield from map(_to_record, file.read_row_group(group, columns=columns).to_pylist())


@dataclass(frozen=True, slots=True)
class _OpenFile:
    file: pq.ParquetFile
    ends: list[int]  # of each row group, in rows


class RowReader:
    """Reads single rows; keeps a few files open and the last row group decoded."""

    def __init__(self) -> None:
        self._files: OrderedDict[Path, _OpenFile] = OrderedDict()
        self._group: tuple[Path, int] | None = None
        self._table: Any = None

    def read(self, path: Path, row: int) -> dict[str, Any]:
        """Raises FileNotFoundError, IndexError for a row that isn't there."""
        opened = self._open(path)
        number = bisect.bisect_right(opened.ends, row)
        if number == len(opened.ends):
            raise IndexError(f"{path} has no row {row}")
        if self._group != (path, number):
            self._table = opened.file.read_row_group(number, use_threads=False)
            self._group = (path, number)
        within = row - (opened.ends[number - 1] if number else 0)
        return _to_record(self._table.slice(within, 1).to_pylist()[0])

    def _open(self, path: Path) -> _OpenFile:
        if path not in self._files:
            file = pq.ParquetFile(path, memory_map=True)
            meta = file.metadata
            ends = itertools.accumulate(meta.row_group(i).num_rows for i in range(meta.num_row_groups))
            self._files[path] = _OpenFile(file, list(ends))
            if len(self._files) > OPEN_FILES:
                self._files.popitem(last=False)[1].file.close()
        self._files.move_to_end(path)
        return self._files[path]

    def close(self) -> None:
        for opened in self._files.values():
            opened.file.close()
        self._files.clear()
        self._group = self._table = None


def _to_row(record: Mapping[str, Any]) -> dict[str, Any]:
    extra = {key: value for key, value in record.items() if key not in SCHEMA.names or key in _DERIVED}
    row = {key: value for key, value in record.items() if key not in extra}
    row["segments"] = restore(record["segments"])
    row["versions"] = list(dict.fromkeys(span["version"] for span in record["spans"]))
    row["extra"] = json.dumps(extra) if extra else None
    return row


def _to_record(row: dict[str, Any]) -> dict[str, Any]:
    extra = row.pop("extra")
    del row["versions"]
    record = {key: value for key, value in row.items() if value is not None}
    # A line has these only where there is something in them, and a file of an earlier version lacks the columns.
    record["segments"] = [{k: v for k, v in item.items() if v or k not in _MEASURED} for item in record["segments"]]
    return {**record, **(json.loads(extra) if extra else {})}
