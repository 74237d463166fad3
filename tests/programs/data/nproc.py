# run outside: no
# needs: !nproc
import os, subprocess

shown = subprocess.run(["nproc"], capture_output=True, text=True).stdout.strip()
assert shown == "1" == str(os.cpu_count()), shown
