import subprocess, sys

subprocess.run([sys.executable, "-m", "venv", "--without-pip", "v"], check=True)
print(
    subprocess.run(
        ["v/bin/python", "-c", "import sys; print(sys.prefix != sys.base_prefix)"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
)
