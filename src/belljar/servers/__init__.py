"""Servers over the engine: each translates one protocol, and none knows a backend."""
