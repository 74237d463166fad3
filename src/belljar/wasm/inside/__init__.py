"""What runs inside the WebAssembly component: part of it since it was built."""
