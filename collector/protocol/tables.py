"""Name tables as a decoder needs them: what a process has defined, equal ones of all processes shared, all bounded."""

from __future__ import annotations

from collections.abc import Sequence

from .checks import shown
from .errors import LimitError, ProtocolError, UnknownTableError
from .records import NameTable

__all__ = ["MAX_ALL_TABLES_BYTES", "MAX_TABLES", "MAX_TABLE_BYTES", "Interned", "Tables"]

# Name tables of one process: norms, device norms, tpe, max logits, and room for models that change.
MAX_TABLES = 1_024
# Text of their names, of one process and of all together: equal tables of all processes count once.
MAX_TABLE_BYTES = 64 * 2**20
MAX_ALL_TABLES_BYTES = 512 * 2**20


class Interned:
    """Equal name tables as one object, and what their text takes in all."""

    __slots__ = ("_bytes", "_tables")

    def __init__(self) -> None:
        self._tables: dict[NameTable, NameTable] = {}
        self._bytes = 0

    def take(self, table: NameTable, size: int) -> NameTable:
        """The one object for tables that equal this.

        Raises:
            LimitError: all of them together would be too large.
        """
        known = self._tables.get(table)
        if known is not None:
            return known
        if self._bytes + size > MAX_ALL_TABLES_BYTES:
            raise LimitError(f"more than {MAX_ALL_TABLES_BYTES} bytes of names from all processes")
        self._bytes += size
        self._tables[table] = table
        return table


def _text_bytes(table: NameTable) -> int:
    # An object each beside its text.
    return sum(len(name) + 64 for name in table.names)


class Tables:
    """The name tables that one process has defined so far, by id; what a decoder needs to resolve a block's frames.

    Equal tables of all processes are one object (`intern`), so that 1,024 ranks of one model cost one table.
    """

    __slots__ = ("_by_id", "_bytes", "_interned")

    def __init__(self, interned: Interned | None = None) -> None:
        self._by_id: dict[int, NameTable] = {}
        self._bytes = 0
        self._interned = Interned() if interned is None else interned

    def define(self, table_id: int, table: NameTable) -> None:
        """Take a definition; a resent equal one changes nothing.

        Raises:
            ProtocolError: the id is taken by another table.
            LimitError: more than MAX_TABLES tables, or more text than the limits allow.
        """
        known = self._by_id.get(table_id)
        if known is None and len(self._by_id) >= MAX_TABLES:
            raise LimitError(f"more than {MAX_TABLES} name tables from one process")
        if known is not None and known != table:
            raise ProtocolError(f"name table {table_id} is defined twice, differently")
        if known is None:
            size = _text_bytes(table)
            if self._bytes + size > MAX_TABLE_BYTES:
                raise LimitError(f"more than {MAX_TABLE_BYTES} bytes of names from one process")
            self._by_id[table_id] = self._interned.take(table, size)
            self._bytes += size

    def get(self, table_id: object) -> NameTable:
        """The table of this id.

        Raises:
            UnknownTableError: there is none.
        """
        table = self._by_id.get(table_id) if type(table_id) is int else None
        if table is None:
            raise UnknownTableError(f"name table {shown(table_id)} was never defined")
        return table

    def items(self) -> Sequence[tuple[int, NameTable]]:
        return list(self._by_id.items())
