"""WebAssembly guests: built when the package is, compiled once per host, run in workers."""
