# needs: pip
import subprocess, sys, zipfile

with zipfile.ZipFile("tiny-1.0-py3-none-any.whl", "w") as wheel:
    wheel.writestr("tiny.py", "answer = 42\n")
    wheel.writestr(
        "tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n"
    )
    wheel.writestr(
        "tiny-1.0.dist-info/WHEEL",
        "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    )
    wheel.writestr("tiny-1.0.dist-info/RECORD", "")
done = subprocess.run(
    [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-index",
        "--no-deps",
        "--target",
        ".",
        "tiny-1.0-py3-none-any.whl",
    ],
    capture_output=True,
    text=True,
)
assert done.returncode == 0, done.stderr
import tiny

print(tiny.answer)
