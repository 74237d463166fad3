"""What runs inside the sandbox. Standard library only, Python 3.9 and later, imports nothing of ours."""
