import subprocess, sys

told = subprocess.run(
    ["python", "-c", "import sys; print(sys.version)"], capture_output=True, text=True
)
assert told.stdout.strip() == sys.version, told
