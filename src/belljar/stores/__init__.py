"""Where the events of runs go: sinks for an engine."""
