"""The one list of what the suite cannot test yet, because the thing to be tested is not built.

A case that needs one of these is counted as pending, with the reason, and never as held. Delete a
line here when the surface exists; its assertions are then errors until somebody implements them.
"""

from __future__ import annotations

from .cases import Case

SURFACES = {
    "http server": "there is no HTTP server yet",
    "mcp server": "there is no MCP server yet",
    "sessions": "there are no live sessions yet",
    "proxy": "there is no allow-list proxy yet",
    "image backends": "the suite makes no hostile image yet",
    "control arms": "not one run of one program: `--controls` answers it",
    "ablation": "not one run of one program: `--ablation` answers it",
    "policy mutation": "no backend can leave out a single rule of its policy yet",
    "audit tools": "the programs it names are other people's, and not part of Belljar",
}

# Assertions that ask about a surface.
_ASSERTIONS = {
    "http server": (
        "server_alive", "http_status_in", "no_run_started", "explicit_error",
        "constant_time_compare", "other_client_p99_le", "connections_closed_within_s",
        "same_answer_as_nonexistent", "zero_lost", "zero_duplicated", "rejected_have_429_or_503",
        "fd_and_rss_return_to_baseline", "slot_released", "zero_acknowledged_lost",
        "orphans_reaped_on_start", "no_double_execution_of_idempotent_key", "no_corrupt_state",
        "recovers_after_space", "recovers", "listens_only_on_loopback",
        "token_required_even_on_loopback", "tenant_b_started_within_s", "run_killed_within_s",
        "served_with_nosniff_attachment_csp", "server_log_lacks_guest_connection",
        "entry_not_parsed_as_option", "host_helpers_env_clean", "error_code",
    ),
    "mcp server": (
        "jsonrpc_error_or_ignored", "next_request_ok", "no_response_for_cancelled",
        "process_exits_within_s", "tools_list_constant",
    ),
    "sessions": ("next_call_in_session_ok",),
    "proxy": ("proxy_log_all_denied", "upstream_log_only"),
    "image backends": ("typed_error_or_ok",),
    "control arms": ("detector_fires",),
    "ablation": ("matrix_recorded",),
    "policy mutation": ("mutation_score_ge",),
    "audit tools": ("zero_critical_findings",),
}  # fmt: skip

# Cases whose assertions we have but whose situation we cannot make yet.
_CASES = {
    "rf-007-swap-during-collect": "sessions",
    "ne-021-rebind-allowed-name": "proxy",
}

_BY_ASSERTION = {name: surface for surface, names in _ASSERTIONS.items() for name in names}
_GROUPS = {"mcp": "mcp server"}


def missing_surface(case: Case) -> str | None:
    """The surface that this case needs and nobody has built, or None."""
    if case.id in _CASES:
        return _CASES[case.id]
    if case.group in _GROUPS:
        return _GROUPS[case.group]
    names = [assertion.partition(":")[0] for assertion in case.expect.asserts]
    # The most telling reason: nearly every client case also asks for a live server.
    found = [_BY_ASSERTION[name] for name in names if name in _BY_ASSERTION]
    specific = [surface for surface in found if surface != "http server"]
    return next(iter([*specific, *found]), None)


def why(surface: str) -> str:
    return f"{surface}: {SURFACES[surface]}"
