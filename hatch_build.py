"""Builds the WebAssembly guests into the wheel, editable ones too; without them all else works."""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_BUILD = os.path.join(os.path.dirname(os.path.abspath(__file__)), "src/belljar/wasm/build.py")


class GuestBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """BELLJAR_WASM_GUESTS=no leaves them out; `belljar wasm build` makes them later."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        build_data["artifacts"].append("src/belljar/wasm/guests/*")
        if os.environ.get("BELLJAR_WASM_GUESTS", "").lower() in ("0", "no", "off", "false"):
            self.app.display_warning("BELLJAR_WASM_GUESTS says not to build the WebAssembly guests")
            return
        spec = importlib.util.spec_from_file_location("belljar_wasm_build", _BUILD)
        assert spec is not None and spec.loader is not None
        build = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = build
        spec.loader.exec_module(build)
        for make in build.GUEST_BUILDERS:
            try:
                make(self.app.display_info)
            except build.CannotBuild as problem:
                self.app.display_warning(
                    f"{problem}\nBelljar is built without this guest, so that its wasm backend "
                    "lacks a language; `belljar wasm build` makes it later."
                )
