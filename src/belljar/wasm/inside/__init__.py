"""What runs inside the WebAssembly component: baked into it with the interpreter when it is built."""
