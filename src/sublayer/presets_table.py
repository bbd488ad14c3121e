"""The table of presets, as `sublayer presets` prints it."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table


def wide_console() -> Console:
    """The terminal as it is; a pipe or a log file, wide enough that no row is broken."""
    console = Console()
    return console if console.is_terminal else Console(width=160)


def preset_table(rows: list[dict[str, Any]], console: Console | None = None) -> None:
    table = Table("preset", "shape", "parameters", "layers", "d_model", "d_ff", "heads", "vocabulary", box=None)
    for column in table.columns[2:]:
        column.justify = "right"
    for row in rows:
        layers = "+".join(str(n) for n in (row["num_encoder_layers"], row["num_decoder_layers"]) if n)
        kv = row["num_kv_heads"]
        heads = f"{row['num_heads']}" if kv is None else f"{row['num_heads']}/{kv}"
        vocabulary = f"{row['vocab_size']:,}" if row["vocab_size"] else "images"
        table.add_row(
            row["name"], row["shape"], f"{row['parameters']:,}", layers, f"{row['d_model']:,}", f"{row['d_ff']:,}",
            heads, vocabulary,
        )  # fmt: skip
    (console or wide_console()).print(table)
