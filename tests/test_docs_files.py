"""The example of docs/files.md is run as it stands there."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import belljar

PAGE = Path(__file__).parent.parent / "docs" / "files.md"


def test_the_example_shows_what_comes_out() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    *_, shown = block.splitlines()
    body = ast.parse(block).body
    assert isinstance(body[-1], ast.Expr)
    names: dict[str, Any] = {"belljar": belljar}
    exec("\n".join([*map(ast.unparse, body[:-1]), f"told = {ast.unparse(body[-1])}"]), names)
    assert names["told"] == ast.literal_eval(shown.removeprefix("# "))
