"""What a build adds: the WebAssembly guests, and the address of the repository it is built from."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

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


class RepositoryHook(MetadataHookInterface):  # type: ignore[type-arg]
    """`urls`: where SECURITY.md sends those who report a hole.

    It is BELLJAR_REPOSITORY, or git's `origin` if others can open that, because a fork's users
    report to the fork.
    """

    def update(self, metadata: dict[str, Any]) -> None:
        address = repository(self.root)
        metadata["urls"] = {"Repository": address} if address else {}
        if address.startswith("https://github.com/"):
            metadata["urls"]["Security"] = f"{address}/security/advisories/new"


def repository(root: str) -> str:
    """The web address of the repository; empty if there is none that others could open."""
    named = os.environ.get("BELLJAR_REPOSITORY", "").strip()
    if named:
        if not (address := _public(named)):
            raise ValueError(f"BELLJAR_REPOSITORY={named!r}: give it as https://HOST/PATH")
        return address
    if not os.path.exists(os.path.join(root, ".git")):  # git would look for one further up
        return ""
    asked = ["git", "-C", root, "config", "--get", "remote.origin.url"]
    try:
        found = subprocess.run(asked, capture_output=True, text=True, check=False).stdout
    except OSError:  # git is not installed
        return ""
    return _public(found.strip())


def _public(address: str) -> str:
    """`address` as https, without a user's name and token; empty for paths and local hosts."""
    pattern = r"(?:(?:https|ssh)://(?:[^/@]*@)?|[\w.-]+@(?=[^/]+:))([\w.-]+)(?::\d+(?=/))?[/:](.+)"
    match = re.fullmatch(pattern, address)
    if match is None:
        return ""
    host, path = match[1].lower(), match[2].strip("/").removesuffix(".git")
    if not re.search(r"\.[a-z]{2,}$", host) or host.endswith((".local", ".internal", ".localhost")):
        return ""
    return f"https://{host}/{path}"
