"""What comes of objects of a program's own types: plain data that says which type it was."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class Opaque(str):
    """The `repr` of an object that has no other form; `type` is the name of its type."""

    type: str = ""

    @classmethod
    def of(cls, kind: str, text: str) -> Opaque:
        made = cls(text)
        made.type = kind
        return made


class Fields(dict):  # type: ignore[type-arg]
    """The fields of an object by name. `kind` is "dataclass" or "model" (of pydantic)."""

    type: str = ""
    kind: str = ""

    @classmethod
    def of(cls, kind: str, name: str, fields: dict[str, Any]) -> Fields:
        made = cls(fields)
        made.kind, made.type = kind, name
        return made


class Member:
    """A member of an enumeration: the name of the type, and the member's own name and value."""

    __slots__ = ("name", "type", "value")

    def __init__(self, kind: str, name: str, value: Any) -> None:
        self.type, self.name, self.value = kind, name, value

    def __eq__(self, other: object) -> bool:
        if type(other) is not Member:
            return NotImplemented
        return (self.type, self.name, self.value) == (other.type, other.name, other.value)

    def __hash__(self) -> int:
        return hash((self.type, self.name))

    def __repr__(self) -> str:
        return f"<{self.type}.{self.name}: {self.value!r}>"
