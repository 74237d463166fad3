# needs: !fc-list
import subprocess

shown = subprocess.run(["fc-list", ":", "family"], capture_output=True, text=True)
assert shown.stderr == "" and shown.returncode == 0, shown
