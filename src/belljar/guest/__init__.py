"""What runs inside the sandbox: standard library only, Python 3.9 and later, none of the rest."""
